"""One backup: ask what is missing, pack only those pages into staging buffers, and send their objects from there."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from l3client.lanes import Lane
from l3client.rank import MAX_PAGES, Rank, rows, slices
from l3client.relayout import pool_to_pages
from l3client.staging import StagingBuffer, StagingTimeoutError
from l3client.streams import Event
from l3client.transfer import Transfer
from l3client.transport import Body
from l3store.errors import L3Error, UnknownNamespaceError
from l3store.layout import Coordinate, Key

_MAX_WRITE_CELLS = 32_768
"""In one write: their sums and keys make up its manifest, which has a limit."""


@dataclass(frozen=True, slots=True)
class _Packed:
    """Pages, by their positions, that are in ``buffer`` once ``event`` is over."""

    positions: list[int]
    buffer: StagingBuffer
    event: Event


class Backup:
    """What a lane does for one backup."""

    def __init__(
        self,
        rank: Rank,
        page_hashes: list[str],
        ids: Tensor,
        transfer: Transfer,
        *,
        after: Event | None,
        register_again: Callable[[], bool],
    ) -> None:
        """Packing begins after ``after``. ``register_again`` returns whether it did."""
        self._rank = rank
        self._hashes = page_hashes
        self._ids = ids
        self._transfer = transfer
        self._after = after
        self._register_again = register_again
        self._missing: dict[int, list[Coordinate]] = {}

    def run(self, lane: Lane) -> int:
        """Returns how many leading pages are stored whole."""
        self._missing = self._ask()
        positions = sorted(self._missing)
        if positions and self._after is not None:
            lane.follow(self._after, self._transfer)
        failed: list[int] = []
        packed: deque[_Packed] = deque()
        patience = self._rank.patience
        try:
            for batch in slices(len(positions), self._pages_at_once):
                self._transfer.require_going()
                try:
                    # One is packed while the other is sent. Where there is no other, the one is sent first.
                    buffer = self._rank.staging.acquire(0 if packed else patience)
                except StagingTimeoutError:
                    if not packed:
                        raise
                    failed += self._send(packed.popleft())
                    buffer = self._rank.staging.acquire(patience)
                packed.append(self._pack(lane, positions[batch], buffer))
                if len(packed) > 1:
                    failed += self._send(packed.popleft())
            while packed:
                failed += self._send(packed.popleft())
        finally:
            for left in packed:
                left.buffer.release(left.event)
        return min(failed, default=len(self._hashes))

    @property
    def _pages_at_once(self) -> int:
        shape = self._rank.plan.shape
        cells = shape.groups * shape.layers
        return max(1, min(self._rank.staging.buffer_bytes // shape.page_bytes, _MAX_WRITE_CELLS // cells))

    def _ask(self) -> dict[int, list[Coordinate]]:
        try:
            return self._ask_once()
        except UnknownNamespaceError:
            # The service came back without what it knew: nobody else will tell it, and nothing could ever be stored.
            if not self._register_again():
                raise
            return self._ask_once()

    def _ask_once(self) -> dict[int, list[Coordinate]]:
        missing: dict[int, list[Coordinate]] = defaultdict(list)
        for batch in slices(len(self._hashes), MAX_PAGES):
            for position, coordinate in self._rank.client.control.missing(self._rank.part, self._hashes[batch]):
                missing[batch.start + position].append(coordinate)
        return missing

    def _pack(self, lane: Lane, positions: list[int], buffer: StagingBuffer) -> _Packed:
        plan = self._rank.plan
        placement = self._rank.placement(plan.layers)
        try:
            pages = rows(buffer.tensor, len(positions), plan.shape.page_bytes)
            wanted = self._ids[positions]
            event = self._transfer.begin(
                plan.layers,
                lambda: lane.copies.submit(lambda: pool_to_pages(self._rank.pool, wanted, pages, placement)),
            )
        except BaseException:
            buffer.release()
            raise
        return _Packed(positions, buffer, event)

    def _send(self, packed: _Packed) -> list[int]:
        """Send a packed buffer; the positions of pages that were not stored whole."""
        plan, namespace = self._rank.plan, self._rank.namespace
        try:
            packed.event.wait()
            # What was to be computed before and was not would be stored for good, under a name that says it was.
            for event in (packed.event, self._after):
                if event is not None and event.error is not None:
                    raise event.error
            self._transfer.require_going()
            bodies = []
            owners = []
            for slot, position in enumerate(packed.positions):
                page = slot * plan.shape.page_bytes
                for coordinate in self._missing[position]:
                    span = plan.span(coordinate)
                    data = packed.buffer.view[page + span.offset : page + span.end]
                    bodies.append(Body(Key(self._hashes[position], namespace.digest, coordinate), data))
                    owners.append(position)
            written = self._rank.client.write_pages(bodies, cell_bytes=namespace.cell_bytes)
            self._transfer.moved(sum(len(body.data) for body in bodies))
        finally:
            packed.buffer.release(packed.event)
        failures = [(owner, w.error) for owner, w in zip(owners, written, strict=True) if w.error is not None]
        if failures:
            self._transfer.fail(L3Error(failures[0][1]))
        self._rank.tally.add("WriteError", len(failures))
        return [owner for owner, _ in failures]
