"""The front door: match, backup and restore for the KV pool of one rank.

A backup asks first what is missing, packs only those pages into staging buffers and sends their objects from there. A
restore receives layer by layer into staging buffers and unpacks each run of layers while the next one arrives.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from l3client.pools import KVPool
from l3client.relayout import Placement, pages_to_pool, pool_to_pages
from l3client.staging import StagingBuffer, StagingPool, StagingTimeoutError
from l3client.streams import CPUStream, Event, Stream, StreamClosedError, open_stream
from l3client.transfer import Transfer
from l3client.transport import Body, L3Client, Order, Part
from l3store.errors import CorruptError, L3Error
from l3store.layout import Coordinate, Key, Namespace, Range, Shard, ShardPlan, plan_reads, plan_writes

_MAX_PAGES = 32_768
_MAX_WRITE_CELLS = 32_768
"""In one write: their sums and keys make up its manifest, which has a limit."""
_RESTORE_STEPS = 8
_CLOSE_SECONDS = 5.0
_MIN_STEP_BYTES = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingOptions:
    """``buffers`` host buffers of ``buffer_bytes``, shared by both directions.

    Who finds none free for ``timeout`` seconds gives its transfer up.
    """

    buffer_bytes: int = 32 << 20
    buffers: int = 4
    timeout: float = 30.0


@dataclass(frozen=True, slots=True)
class _Packed:
    """Pages, by their positions, that are in ``buffer`` once ``event`` is over."""

    positions: list[int]
    buffer: StagingBuffer
    event: Event


class Connector:
    """One rank's pool and its shard of a namespace, over one service. Thread-safe.

    Nothing here raises for what goes wrong between us and the service: `match` is then 0 and a transfer's result is
    smaller. `failures` counts it by kind.
    """

    def __init__(
        self,
        client: L3Client,
        namespace: Namespace,
        shard: Shard,
        pool: KVPool,
        *,
        read_only: bool = False,
        staging: StagingOptions | None = None,
    ) -> None:
        """Raises `SplitGroupError` where the rank's heads split a head group and it is not ``read_only``.

        Also raises ValueError where the pool is not this shard of this namespace.
        """
        self._client = client
        self._namespace = namespace
        if not read_only:
            plan_writes(namespace, shard)
        self._plan = plan_reads(namespace, shard)
        self._read_only = read_only
        self._replica = not shard.writer
        self._pool = pool
        self._part = Part(namespace.digest, self._plan.layers, self._plan.heads)
        self._placement = _placement(self._plan, namespace, self._plan.layers)
        _check_pool(pool, shard, self._placement)
        self._options = staging or StagingOptions()
        self._staging = StagingPool(
            max(self._options.buffer_bytes, self._plan.shape.page_bytes),
            self._options.buffers,
            pinned=pool.device.type == "cuda",
        )
        self._packing = open_stream(pool.device)
        self._unpacking = open_stream(pool.device)
        self._backups = CPUStream()
        self._restores = CPUStream()
        self._lock = threading.Lock()
        self._under_way: set[Transfer] = set()
        self.failures: Counter[str] = Counter()

    def attach(self, labels: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Register the namespace: the stored ones that almost match. Raises `L3Error`."""
        near: list[dict[str, Any]] = self._client.register(self._namespace, labels).get("near", [])
        return near

    def close(self) -> None:
        """End all work. Transfers that are not over end with 0 pages."""
        copies = [copied for stream in (self._packing, self._unpacking) if (copied := _end_of(stream)) is not None]
        # First what a transfer may be waiting for.
        self._staging.close()
        for stream in (self._packing, self._unpacking, self._backups, self._restores):
            stream.close()
        for copied in copies:
            # A GPU still reads and writes what we are about to let go of.
            copied.wait(_CLOSE_SECONDS)
        with self._lock:
            left, self._under_way = self._under_way, set()
        for transfer in left:
            transfer.finish(0, StreamClosedError("the connector was closed"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def namespace(self) -> Namespace:
        return self._namespace

    @property
    def plan(self) -> ShardPlan:
        """The rank's part of every page."""
        return self._plan

    def match(self, page_hashes: Sequence[str]) -> int:
        """How many leading pages the store has for this rank; 0 where it cannot be asked."""
        try:
            return self._match(page_hashes)
        except L3Error as error:
            self._count(type(error).__name__)
            return 0

    def backup(self, page_hashes: Sequence[str], page_ids: Sequence[int], *, after: Event | None = None) -> Transfer:
        """Store what the store does not have of these pages, from the pool's pages ``page_ids``, one for each hash.

        Packing begins after ``after``, and nothing is stored where that failed; until the transfer is done the pages
        must stay as they are. A replica's backup is done at once, as its writer's is the same. The result counts
        leading pages that are stored whole; it is 0 where we are read-only.
        """
        hashes = list(page_hashes)
        ids = self._page_ids(hashes, page_ids)
        transfer = Transfer(len(hashes), self._plan.layers)
        if self._read_only or self._replica or not hashes:
            transfer.finish(0 if self._read_only else len(hashes))
            return transfer
        if after is not None:
            try:
                self._packing.wait_event(after)
            except StreamClosedError as error:
                transfer.finish(0, error)
                return transfer
        self._run(self._backups, transfer, lambda: self._back_up(hashes, ids, transfer, after))
        return transfer

    def restore(self, page_hashes: Sequence[str], page_ids: Sequence[int]) -> Transfer:
        """Load these pages into the pool's pages ``page_ids``, one for each hash, all pages of a layer at a time.

        The result counts leading pages of which every cell arrived and matched its sum; the slots of the others hold
        anything.
        """
        hashes = list(page_hashes)
        ids = self._page_ids(hashes, page_ids)
        transfer = Transfer(len(hashes), self._plan.layers)
        if not hashes:
            transfer.finish(0)
            return transfer
        self._run(self._restores, transfer, lambda: self._restore(hashes, ids, transfer))
        return transfer

    def _match(self, page_hashes: Sequence[str]) -> int:
        matched = 0
        for batch in _slices(len(page_hashes), _MAX_PAGES):
            pages = self._client.control.match(self._part, page_hashes[batch])
            matched += pages
            if pages < batch.stop - batch.start:
                break
        return matched

    def _back_up(self, page_hashes: list[str], ids: Tensor, transfer: Transfer, after: Event | None) -> int:
        """Returns how many leading pages are stored whole."""
        missing = self._missing(page_hashes)
        positions = sorted(missing)
        failed: list[int] = []
        packed: deque[_Packed] = deque()

        def send() -> None:
            first = packed.popleft()
            failed.extend(self._send(page_hashes, missing, first, transfer, after))

        try:
            for batch in _slices(len(positions), self._pages_at_once):
                try:
                    # One is packed while the other is sent. Where there is no other, the one is sent first.
                    buffer = self._staging.acquire(0 if packed else self._options.timeout)
                except StagingTimeoutError:
                    if not packed:
                        raise
                    send()
                    buffer = self._staging.acquire(self._options.timeout)
                pages = positions[batch]
                packed.append(_Packed(pages, buffer, self._pack(pages, ids, buffer)))
                if len(packed) > 1:
                    send()
            while packed:
                send()
        finally:
            for left in packed:
                left.buffer.release(left.event)
        return min(failed, default=len(page_hashes))

    @property
    def _pages_at_once(self) -> int:
        shape = self._plan.shape
        cells = shape.groups * shape.layers
        return max(1, min(self._staging.buffer_bytes // shape.page_bytes, _MAX_WRITE_CELLS // cells))

    def _missing(self, page_hashes: list[str]) -> dict[int, list[Coordinate]]:
        missing: dict[int, list[Coordinate]] = defaultdict(list)
        for batch in _slices(len(page_hashes), _MAX_PAGES):
            for position, coordinate in self._client.control.missing(self._part, page_hashes[batch]):
                missing[batch.start + position].append(coordinate)
        return missing

    def _pack(self, positions: list[int], ids: Tensor, buffer: StagingBuffer) -> Event:
        pages = _pages(buffer.tensor, len(positions), self._plan.shape.page_bytes)
        wanted = ids[positions]
        return self._packing.submit(lambda: pool_to_pages(self._pool, wanted, pages, self._placement))

    def _send(
        self,
        page_hashes: list[str],
        missing: dict[int, list[Coordinate]],
        packed: _Packed,
        transfer: Transfer,
        after: Event | None,
    ) -> list[int]:
        """Send a packed buffer; the positions of pages that were not stored whole."""
        try:
            packed.event.wait()
            # What was to be computed before and was not would be stored for good, under a name that says it was.
            for event in (packed.event, after):
                if event is not None and event.error is not None:
                    raise event.error
            bodies = []
            owners = []
            for slot, position in enumerate(packed.positions):
                page = slot * self._plan.shape.page_bytes
                for coordinate in missing[position]:
                    span = self._span(coordinate)
                    data = packed.buffer.view[page + span.start : page + span.stop]
                    bodies.append(Body(Key(page_hashes[position], self._namespace.digest, coordinate), data))
                    owners.append(position)
            written = self._client.write_pages(bodies, cell_bytes=self._namespace.cell_bytes)
            transfer.submitted(self._plan.layers, packed.event, moved=sum(len(body.data) for body in bodies))
        finally:
            packed.buffer.release(packed.event)
        errors = [owner for owner, result in zip(owners, written, strict=True) if result.error is not None]
        self._count("WriteError", len(errors))
        return errors

    def _span(self, coordinate: Coordinate) -> slice:
        local = Range(coordinate.start_layer - self._plan.layers.start, coordinate.end_layer - self._plan.layers.start)
        group = 0 if coordinate.head_group is None else coordinate.head_group - self._plan.groups.start
        span = self._plan.shape.run_span(local, group)
        return slice(span.offset, span.end)

    def _restore(self, page_hashes: list[str], ids: Tensor, transfer: Transfer) -> int:
        """Returns how many leading pages are good in every layer."""
        good = len(page_hashes)
        for layers, pages_at_once in self._steps(len(page_hashes)):
            placement = _placement(self._plan, self._namespace, layers)
            for batch in _slices(good, pages_at_once):
                received = self._receive(page_hashes[batch], ids[batch], layers, placement, transfer)
                if received < batch.stop - batch.start:
                    good = batch.start + received
                    break
            if not good:
                break
            transfer.advance(layers.end, good)
        return good

    def _receive(
        self, page_hashes: list[str], ids: Tensor, layers: Range, placement: Placement, transfer: Transfer
    ) -> int:
        """Receive some layers of some pages and unpack what is good of them; how many pages that is."""
        size = placement.shape.page_bytes
        buffer = self._staging.acquire(self._options.timeout)
        event = None
        try:
            views = [buffer.view[i * size : (i + 1) * size] for i in range(len(page_hashes))]
            part = Part(self._part.namespace, layers, self._part.heads)
            read = self._client.read_pages(part, page_hashes, placement.shape, views, order=Order.LAYER)
            self._count(CorruptError.__name__, len(read.corrupt))
            if read.good:
                pages = _pages(buffer.tensor, read.good, size)
                wanted = ids[: read.good]
                event = self._unpacking.submit(lambda: pages_to_pool(pages, self._pool, wanted, placement))
                transfer.submitted(layers, event, moved=read.good * size)
        finally:
            buffer.release(event)
        return read.good

    def _steps(self, pages: int) -> Iterator[tuple[Range, int]]:
        """Runs of layers to read together, and of how many pages at once: early layers early, calls not too small."""
        layer_bytes = self._plan.shape.groups * self._plan.shape.cell_bytes
        total = pages * len(self._plan.layers) * layer_bytes
        step = min(max(total // _RESTORE_STEPS, _MIN_STEP_BYTES), self._staging.buffer_bytes)
        count = max(1, step // (pages * layer_bytes))
        for start in range(self._plan.layers.start, self._plan.layers.end, count):
            layers = Range(start, min(start + count, self._plan.layers.end))
            yield layers, max(1, min(_MAX_PAGES, self._staging.buffer_bytes // (len(layers) * layer_bytes)))

    def _page_ids(self, page_hashes: Sequence[str], page_ids: Sequence[int]) -> Tensor:
        # A copy: the caller's list may change while we work.
        ids = torch.as_tensor(page_ids, dtype=torch.int64, device="cpu").clone()
        if ids.shape != (len(page_hashes),):
            raise ValueError(f"{list(ids.shape)} page ids for {len(page_hashes)} page hashes: one for each")
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < self._pool.num_pages):
            raise ValueError(f"page ids {int(ids.min())} to {int(ids.max())} are not in [0, {self._pool.num_pages})")
        return ids

    def _run(self, stream: CPUStream, transfer: Transfer, work: Callable[[], int]) -> None:
        def task() -> None:
            try:
                transfer.finish(work())
            except Exception as error:  # noqa: BLE001 - whatever it is ends this transfer, counted, and nothing else
                self._count(type(error).__name__)
                transfer.finish(0, error)
            with self._lock:
                self._under_way.discard(transfer)

        with self._lock:
            self._under_way.add(transfer)
        try:
            stream.submit(task)
        except StreamClosedError as error:
            transfer.finish(0, error)
            with self._lock:
                self._under_way.discard(transfer)

    def _count(self, kind: str, times: int = 1) -> None:
        if times:
            with self._lock:
                self.failures[kind] += times


def _end_of(stream: Stream) -> Event | None:
    """The end of all that was submitted to a stream so far; None where it is closed."""
    try:
        return stream.submit(lambda: None)
    except StreamClosedError:
        return None


def _placement(plan: ShardPlan, namespace: Namespace, layers: Range) -> Placement:
    shape = namespace.shape(layers=layers, groups=plan.groups)
    return Placement(shape=shape, first_head=plan.first_head, first_layer=layers.start - plan.layers.start)


def _check_pool(pool: KVPool, shard: Shard, placement: Placement) -> None:
    heads = 1 if shard.heads is None else len(shard.heads)
    if (pool.num_layers, pool.heads) != (len(shard.layers), heads):
        raise ValueError(
            f"the pool has {pool.num_layers} layers of {pool.heads} heads, its shard {len(shard.layers)} of {heads}"
        )
    placement.resolve(pool, None)


def _pages(buffer: Tensor, count: int, page_bytes: int) -> Tensor:
    return buffer[: count * page_bytes].view(count, page_bytes)


def _slices(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
