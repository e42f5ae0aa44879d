"""One restore: receive layer by layer into staging buffers, and unpack each run of layers while the next arrives."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from l3client.lanes import Lane
from l3client.rank import MAX_PAGES, Rank, rows, slices
from l3client.relayout import Placement, pages_to_pool
from l3client.streams import Event
from l3client.transfer import Transfer
from l3client.transport import Order
from l3store.errors import CorruptError
from l3store.layout import Range

_STEPS = 8
_MIN_STEP_BYTES = 2 << 20


class Restore:
    """What a lane does for one restore."""

    def __init__(
        self, rank: Rank, page_hashes: list[str], ids: Tensor, transfer: Transfer, *, after: Event | None
    ) -> None:
        """Nothing is unpacked before ``after``."""
        self._rank = rank
        self._hashes = page_hashes
        self._ids = ids
        self._transfer = transfer
        self._after = after

    def run(self, lane: Lane) -> int:
        """Returns how many leading pages are good in every layer."""
        if self._after is not None:
            # Before a buffer is taken, which others could use while we wait.
            lane.follow(self._after, self._transfer)
        good = len(self._hashes)
        for layers, pages_at_once in self._steps():
            placement = self._rank.placement(layers)
            for batch in slices(good, pages_at_once):
                received = self._receive(lane, batch, layers, placement)
                if received < batch.stop - batch.start:
                    good = batch.start + received
                    break
            if not good:
                break
            self._transfer.advance(layers.end, good)
        return good

    def _receive(self, lane: Lane, batch: slice, layers: Range, placement: Placement) -> int:
        """Receive some layers of some pages and unpack what is good of them; how many pages that is."""
        self._transfer.require_going()
        size = placement.shape.page_bytes
        hashes = self._hashes[batch]
        buffer = self._rank.staging.acquire(self._rank.patience)
        event = None
        try:
            views = [buffer.view[i * size : (i + 1) * size] for i in range(len(hashes))]
            part = self._rank.part_of(layers)
            read = self._rank.client.read_pages(part, hashes, placement.shape, views, order=Order.LAYER)
            self._rank.tally.add(CorruptError.__name__, len(read.corrupt))
            if read.good:
                pages = rows(buffer.tensor, read.good, size)
                wanted = self._ids[batch][: read.good]
                event = self._transfer.begin(
                    layers,
                    lambda: lane.copies.submit(lambda: pages_to_pool(pages, self._rank.pool, wanted, placement)),
                )
                self._transfer.moved(read.good * size)
        finally:
            buffer.release(event)
        return read.good

    def _steps(self) -> Iterator[tuple[Range, int]]:
        """Runs of layers to read together, and of how many pages at once: early layers early, calls not too small."""
        plan = self._rank.plan
        buffer_bytes = self._rank.staging.buffer_bytes
        pages = len(self._hashes)
        layer_bytes = plan.shape.groups * plan.shape.cell_bytes
        step = min(max(pages * len(plan.layers) * layer_bytes // _STEPS, _MIN_STEP_BYTES), buffer_bytes)
        count = max(1, step // (pages * layer_bytes))
        for start in range(plan.layers.start, plan.layers.end, count):
            layers = Range(start, min(start + count, plan.layers.end))
            yield layers, max(1, min(MAX_PAGES, buffer_bytes // (len(layers) * layer_bytes)))
