"""Bytes at rest: the Backend protocol, the local disk, and memory in front of either."""

from __future__ import annotations

from l3store.backend.buffers import BufferPool, PooledBuffer
from l3store.backend.disk import DiskBackend
from l3store.backend.protocol import Ack, Backend, CellRun, NewObject, Sums
from l3store.backend.ram import Cells, RamTier

__all__ = [
    "Ack",
    "Backend",
    "BufferPool",
    "CellRun",
    "Cells",
    "DiskBackend",
    "NewObject",
    "PooledBuffer",
    "RamTier",
    "Sums",
]
