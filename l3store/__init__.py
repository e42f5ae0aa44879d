"""l3store: a third-level KV cache that every deployment of a model shares."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
