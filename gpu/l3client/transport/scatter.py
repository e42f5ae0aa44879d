"""Where the bytes of a body go: views, filled in order and in chunks, whose cells are summed chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from l3client.transport.stream import MAX_VECTORS
from l3store.layout.sums import cell_sum, pack_sums, unpack_sums

_CHUNK = 512 << 10
"""Bytes received by one system call, and summed while the cache still has them and the rest is on its way."""


class Scatter:
    """Flat views of bytes, to fill in the order of the wire. With ``cell_bytes``, every view is whole cells.

    targets  what to receive into next, in order, none of it empty; nothing once all is filled
    sums     of the cells of all chunks that are complete, in order
    """

    def __init__(self, views: Sequence[memoryview], *, cell_bytes: int | None = None) -> None:
        self._cell_bytes = cell_bytes
        size = _CHUNK if cell_bytes is None else max(_CHUNK // cell_bytes, 1) * cell_bytes
        sizes = set(map(len, views))
        self._views_are_cells = sizes == {cell_bytes}
        if len(sizes) == 1 and 0 < max(sizes) <= size:
            self._chunks = _even_chunks(views, max(sizes), size)
        else:
            self._chunks = _chunks(views, size)
        self.sums: list[int] = []
        self.targets: list[memoryview]
        self._next()

    def take(self, data: bytes) -> int:
        """Take bytes that were received elsewhere; how many fitted."""
        taken = 0
        with memoryview(data) as view:
            while self.targets and taken < len(view):
                target = self.targets[0]
                count = min(len(target), len(view) - taken)
                target[:count] = view[taken : taken + count]
                taken += count
                self.advance(count)
        return taken

    def advance(self, count: int) -> None:
        """Note that ``count`` more bytes of the targets have arrived."""
        self._left -= count
        if self._left:
            self.targets = _after(self.targets, count)
            return
        if self._cell_bytes is not None:
            self._sum(self._cell_bytes)
        self._next()

    def differing(self, expected: bytes | bytearray) -> list[int]:
        """The cells, by their places in the order of the wire, whose sums are not those of the packed ones."""
        if pack_sums(self.sums) == expected:
            return []
        return [i for i, (a, b) in enumerate(zip(self.sums, unpack_sums(expected), strict=True)) if a != b]

    def _next(self) -> None:
        self._chunk, self._left = next(self._chunks, ([], 0))
        self.targets = self._chunk

    def _sum(self, cell_bytes: int) -> None:
        if self._views_are_cells:
            self.sums += map(cell_sum, self._chunk)
            return
        for piece in self._chunk:
            self.sums += [cell_sum(piece[at : at + cell_bytes]) for at in range(0, len(piece), cell_bytes)]


def _even_chunks(views: Sequence[memoryview], view_bytes: int, size: int) -> Iterator[tuple[list[memoryview], int]]:
    """The same as `_chunks` for views that all have the same size, at a fraction of the cost for each."""
    count = min(size // view_bytes, MAX_VECTORS)
    for at in range(0, len(views), count):
        chunk = list(views[at : at + count])
        yield chunk, len(chunk) * view_bytes


def _chunks(views: Sequence[memoryview], size: int) -> Iterator[tuple[list[memoryview], int]]:
    """The views in lists that have ``size`` bytes, or fewer where there are too many views, and how many they have."""
    chunk: list[memoryview] = []
    room = size
    for view in views:
        at, end = 0, len(view)
        while at < end:
            if not room or len(chunk) == MAX_VECTORS:
                yield chunk, size - room
                chunk, room = [], size
            step = min(end - at, room)
            chunk.append(view if step == end else view[at : at + step])
            at += step
            room -= step
    if chunk:
        yield chunk, size - room


def _after(targets: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of targets after their first ``count`` bytes."""
    at = 0
    while count >= len(targets[at]):
        count -= len(targets[at])
        at += 1
    return [targets[at][count:], *targets[at + 1 :]]
