"""Where the bytes of a body go: a list of views, filled in order, whose cells are summed as they are completed."""

from __future__ import annotations

from collections.abc import Sequence

from l3store.layout.sums import cell_sum

_BATCH = 256
"""Views given to one system call; Linux takes 1,024."""


class Scatter:
    """Views to fill in the order of the wire. With ``cell_bytes``, every view is whole cells, and `sums` are theirs."""

    def __init__(self, views: Sequence[memoryview], *, cell_bytes: int | None = None) -> None:
        self._views = [view.cast("B") if view.format != "B" or view.ndim != 1 else view for view in views]
        self._cell_bytes = cell_bytes
        self._at = 0
        self._offset = 0
        self._summed = 0
        self.sums: list[int] = []
        self.length = sum(map(len, self._views))
        self._skip_empty()

    @property
    def full(self) -> bool:
        return self._at == len(self._views)

    def targets(self) -> list[memoryview]:
        """What to receive into next, in order."""
        targets = self._views[self._at : self._at + _BATCH]
        targets[0] = targets[0][self._offset :]
        return targets

    def copy(self, data: memoryview) -> int:
        """Take bytes that were received elsewhere; how many fitted."""
        taken = 0
        while taken < len(data) and not self.full:
            target = self.targets()[0]
            count = min(len(target), len(data) - taken)
            target[:count] = data[taken : taken + count]
            taken += count
            self.advance(count)
        return taken

    def advance(self, count: int) -> None:
        """Note that ``count`` more bytes have arrived, and sum the cells that they complete."""
        while count:
            view = self._views[self._at]
            step = min(count, len(view) - self._offset)
            self._offset += step
            count -= step
            if self._cell_bytes is not None:
                self._sum_up_to(view, self._cell_bytes)
            if self._offset == len(view):
                self._at += 1
                self._offset = self._summed = 0
                self._skip_empty()

    def _sum_up_to(self, view: memoryview, cell_bytes: int) -> None:
        while self._summed + cell_bytes <= self._offset:
            self.sums.append(cell_sum(view[self._summed : self._summed + cell_bytes]))
            self._summed += cell_bytes

    def _skip_empty(self) -> None:
        while not self.full and not len(self._views[self._at]):
            self._at += 1
