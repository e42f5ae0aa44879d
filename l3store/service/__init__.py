"""The HTTP service."""

from __future__ import annotations

from l3store.service.app import create_app
from l3store.service.limits import Limits

__all__ = ["Limits", "create_app"]
