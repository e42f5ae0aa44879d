"""The seam between what is stored and where its bytes rest."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from l3store.backend.buffers import PooledBuffer
from l3store.layout import Key
from l3store.layout.sums import Buffer


class Ack(StrEnum):
    """When a write is acknowledged: in memory, once its file is complete, or once it would survive a power loss."""

    RAM = "ram"
    FILE = "file"
    FSYNC = "fsync"


class CellRun(NamedTuple):
    """``cells`` consecutive cells of one stored object, the first being its cell ``first``."""

    key: Key
    first: int
    cells: int
    cell_bytes: int

    @property
    def stored_cells(self) -> int:
        """Cells of the stored object: one a layer."""
        at = self.key.coordinate
        return at.end_layer - at.start_layer

    @property
    def length(self) -> int:
        """Bytes of the run."""
        return self.cells * self.cell_bytes


@dataclass(frozen=True, slots=True)
class Sums:
    """Packed sums, and whether the writer made them (else the service, from what it received)."""

    packed: bytes
    by_writer: bool


@dataclass(frozen=True, slots=True)
class NewObject:
    """An object to store: whole cells and their sums. ``held`` is the reusable memory that they lie in, if any."""

    key: Key
    body: Buffer
    sums: Sums
    held: PooledBuffer | None = None


class Backend(Protocol):
    """Objects and namespace registrations at rest.

    An object becomes visible whole or not at all, is never overwritten, and keeps its sums beside it. Reads pin what
    they opened: a delete meanwhile changes no byte under them. Errors: `MissError` (``key`` names the object) where an
    object is not there, `CorruptError` where it is not what was stored, `StorageFullError`, and OSError for the rest.
    """

    async def load_namespaces(self) -> dict[str, dict[str, Any]]:
        """All registrations, by digest."""
        ...

    async def save_namespace(self, digest: str, registration: Mapping[str, Any]) -> None:
        """Store a registration; an earlier one is replaced."""
        ...

    async def drop_namespace(self, digest: str) -> None:
        """Forget a registration. Its objects are deleted one by one."""
        ...

    def scan(self) -> AsyncIterator[list[str]]:
        """What is stored, from names alone. Leftovers of interrupted writes are removed first.

        Names are what `str` gives of keys; strangers' names may be among them. In batches: each is sorted, and has all
        objects of its pages.
        """
        ...

    async def put(self, objects: Sequence[NewObject]) -> list[bool | Exception]:
        """Store objects. For each: True created, False already there, or what went wrong with it."""
        ...

    async def read(self, runs: Sequence[CellRun], into: memoryview) -> Sums:
        """Read runs back to back into ``into``, of exactly their length; their sums in the same order."""
        ...

    async def read_sums(self, runs: Sequence[CellRun]) -> Sums:
        """The sums that `read` would give, without the cells."""
        ...

    async def delete(self, keys: Sequence[Key]) -> int:
        """Delete objects; how many were there."""
        ...

    async def quarantine(self, key: Key) -> None:
        """Set an object aside: never served again, kept for whoever looks into it."""
        ...

    async def free_bytes(self) -> int:
        """What could still be written."""
        ...

    async def probe(self) -> None:
        """Raise where a write would fail now."""
        ...

    async def close(self) -> None: ...
