"""Bytes at rest: the Backend protocol and the local disk."""

from __future__ import annotations

from l3store.backend.disk import Ack, DiskBackend
from l3store.backend.protocol import Backend, CellRun, NewObject, Sums

__all__ = ["Ack", "Backend", "CellRun", "DiskBackend", "NewObject", "Sums"]
