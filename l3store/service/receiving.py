"""From arriving bytes to objects that may be stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from l3store.backend import NewObject, PooledBuffer, Sums
from l3store.errors import WrongSumsError
from l3store.layout import Key
from l3store.layout.sums import SUM_BYTES, cell_sum, pack_sums


@dataclass(frozen=True, slots=True)
class Announced:
    """A body that is to come: whole cells of an object, and its writer's sums where it sends them."""

    key: Key
    length: int
    cell_bytes: int
    sums: bytes | None


class Arrivals:
    """Bodies that arrive back to back in one buffer. Cells are summed as they do, while the cache has them."""

    def __init__(self, bodies: Sequence[Announced], view: memoryview, held: PooledBuffer) -> None:
        self._bodies = bodies
        self._view = view
        self._held = held
        self._cells = _cells(bodies)
        self._next = next(self._cells, None)
        self._sums: list[int] = []

    def arrived(self, count: int) -> None:
        """Note that the first ``count`` bytes of the view are there."""
        while self._next is not None and self._next[1] <= count:
            start, end = self._next
            self._sums.append(cell_sum(self._view[start:end]))
            self._next = next(self._cells, None)

    def objects(self) -> list[NewObject | WrongSumsError]:
        """For each body that has arrived whole, in order: what is to be stored, or that its sums are wrong."""
        made: list[NewObject | WrongSumsError] = []
        at = cell = 0
        for body in self._bodies:
            end = cell + body.length // body.cell_bytes
            if end > len(self._sums):
                break
            made.append(self._object(body, self._view[at : at + body.length], pack_sums(self._sums[cell:end])))
            at += body.length
            cell = end
        return made

    def _object(self, body: Announced, view: memoryview, computed: bytes) -> NewObject | WrongSumsError:
        if body.sums is not None and body.sums != computed:
            cells = range(0, len(computed), SUM_BYTES)
            bad = [at // SUM_BYTES for at in cells if computed[at : at + SUM_BYTES] != body.sums[at : at + SUM_BYTES]]
            return WrongSumsError(f"{len(bad)} cells of {body.key} do not match their sums, the first is cell {bad[0]}")
        return NewObject(body.key, view, Sums(computed, by_writer=body.sums is not None), self._held)


def _cells(bodies: Sequence[Announced]) -> Iterator[tuple[int, int]]:
    at = 0
    for body in bodies:
        for _ in range(body.length // body.cell_bytes):
            yield at, at + body.cell_bytes
            at += body.cell_bytes
