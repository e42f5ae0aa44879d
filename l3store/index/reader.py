"""Reads from the store: what is present, what is missing, and the bytes in the order that was asked."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from l3store.backend import CellRun, Cells, Sums
from l3store.errors import CorruptError, MissError, RetryError
from l3store.index.pages import NamespaceIndex
from l3store.index.reading import Order, object_runs, page_runs
from l3store.index.runset import Need
from l3store.index.store import Store
from l3store.layout import Coordinate, Key, Range, grid_objects
from l3store.layout.sums import cell_sum, unpack_sums

CHUNK_BYTES = 4 << 20
"""Pages are read, and handed on, in pieces of about this size; of less where there is little memory."""

_SHARE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PageQuery:
    """Some pages of a namespace, and the part of each that a shard needs."""

    entry: NamespaceIndex
    page_hashes: Sequence[str]
    need: Need

    @property
    def page_bytes(self) -> int:
        return len(self.need.layers) * len(self.need.groups) * self.entry.namespace.cell_bytes


class PageBytes:
    """The leading pages that are present: how many, their bytes in all, and the bytes themselves.

    An iterator of pieces; each is valid until the next one is taken, or `close`. One piece is read ahead.
    """

    def __init__(self, pages: int, length: int, read: Callable[[], Coroutine[Any, Any, Cells | None]]) -> None:
        self.pages = pages
        self.length = length
        self._read = read
        self._ahead: asyncio.Task[Cells | None] | None = None
        self._current: Cells | None = None

    async def begin(self) -> None:
        """Read the first piece. Raises `MissError`."""
        self._current = await self._read()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Cells:
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            if self._current is not None:
                self._current.release()
            self._current = None
            self._current = await ahead
        if self._current is None:
            raise StopAsyncIteration
        self._ahead = asyncio.create_task(self._read())
        return self._current

    def close(self) -> None:
        """Give all memory back; also that of a piece that is still being read."""
        current, self._current = self._current, None
        if current is not None:
            current.release()
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.add_done_callback(_discard)


class Reader:
    """Reads over a store. ``verify`` checks every cell against its sum, for readers that will not do so themselves."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def query(self, digest: str, page_hashes: Sequence[str], layers: Range | None, heads: Range | None) -> PageQuery:
        """Resolve a request. None is all layers, all heads. Raises layout errors that say what to ask instead."""
        entry = self._store.entry(digest)
        wanted = layers or entry.namespace.layers
        entry.namespace.check_layers(wanted)
        return PageQuery(entry=entry, page_hashes=page_hashes, need=Need(wanted, entry.namespace.groups_of(heads)))

    def match(self, query: PageQuery) -> int:
        """How many leading pages are present."""
        pages = self._store.index.leading(query.entry, query.page_hashes, query.need)
        self._store.counters.match_pages_asked += len(query.page_hashes)
        self._store.counters.match_pages_hit += pages
        return pages

    def missing(self, query: PageQuery) -> Iterator[tuple[int, Coordinate]]:
        """The runs that a writer still has to send, cut by the grid: (page's position, coordinate)."""
        namespace = query.entry.namespace
        groups = None if namespace.fields.rank_replicated else query.need.groups
        grid = grid_objects(query.need.layers, groups, namespace.fields.layer_partition)
        for page_hash in reversed(query.page_hashes):
            self._store.index.touch(query.entry, page_hash)
        for position, page_hash in enumerate(query.page_hashes):
            runs = self._store.index.runs(query.entry, page_hash)
            if runs.serves(query.need):
                continue
            for wanted in grid:
                for gap in runs.uncovered(wanted.layers, wanted.head_group or 0):
                    yield position, Coordinate(gap.start, gap.end, wanted.head_group)

    async def read_object(self, key: Key, *, verify: bool) -> Cells:
        """The bytes that a key names, to be released. Raises `MissError` where they are not all stored."""
        if not verify and (hot := self._hot(key)) is not None:
            return hot
        while True:
            runs = self._object_runs(key)
            try:
                return await self._read(runs, verify=verify)
            except MissError as error:
                await self._store.heal(error)

    async def read_sums(self, key: Key) -> Sums:
        """The sums of the cells that a key names. Raises `MissError` where they are not all stored."""
        while True:
            runs = self._object_runs(key)
            try:
                return await self._store.tier.read_sums(runs)
            except MissError as error:
                await self._store.heal(error)
            except OSError as error:
                raise RetryError(f"the stored sums could not be read: {error}") from error

    async def suspect(self, key: Key) -> bool:
        """Check the copies that serve a key: True where one was corrupt, and is now quarantined."""
        corrupt = False
        for run in self._object_runs(key):
            # The copy in memory may be the bad one; what is at rest is asked.
            self._store.tier.forget(run.key)
            try:
                (await self._read([run], verify=True)).release()
            except MissError as error:
                corrupt = corrupt or isinstance(error, CorruptError)
                await self._store.heal(error)
        if corrupt:
            self._store.counters.suspects_corrupt += 1
        else:
            self._store.counters.suspects_sound += 1
        return corrupt

    async def read_pages(self, query: PageQuery, order: Order, *, verify: bool) -> PageBytes:
        """The leading pages that are present. Their first chunk is read before this returns.

        A page that turns out to be lost or corrupt by then ends the answer before it; later, iteration raises
        `MissError` and the reader is left with the complete pages that it has.
        """
        while True:
            pages = self._store.index.leading(query.entry, query.page_hashes, query.need)
            runs = page_runs(self._store.index, query.entry, query.page_hashes[:pages], query.need, order)
            batches = _batches(runs, min(CHUNK_BYTES, self._store.tier.pool.total // _SHARE))
            found = PageBytes(pages, pages * query.page_bytes, functools.partial(self._next, batches, verify=verify))
            try:
                await found.begin()
            except MissError:
                continue
            return found

    async def _next(self, batches: Iterator[list[CellRun]], *, verify: bool) -> Cells | None:
        batch = next(batches, None)
        if batch is None:
            return None
        try:
            return await self._read(batch, verify=verify)
        except MissError as error:
            await self._store.heal(error)
            raise

    async def _read(self, runs: Sequence[CellRun], *, verify: bool) -> Cells:
        try:
            cells = await self._store.tier.read(runs)
        except OSError as error:
            # Not a miss of ours to act on: what cannot be read now may be readable later, and is never deleted.
            raise RetryError(f"the stored bytes could not be read: {error}") from error
        if verify:
            try:
                await asyncio.to_thread(_verify, runs, cells)
            except BaseException:
                cells.release()
                raise
        return cells

    def _hot(self, key: Key) -> Cells | None:
        """An object that was stored as it is asked and is in memory: most reads of objects, and the fastest way."""
        entry = self._store.entry_of(key)
        if key.coordinate not in self._store.index.runs(entry, key.page_hash).coordinates:
            return None
        cells = self._store.tier.whole(key)
        if cells is not None:
            self._store.index.touch(entry, key.page_hash)
        return cells

    def _object_runs(self, key: Key) -> list[CellRun]:
        entry = self._store.entry_of(key)
        runs = object_runs(self._store.index, entry, key)
        if runs is None:
            raise MissError(f"{key} is not stored, or not all of its cells are")
        self._store.index.touch(entry, key.page_hash)
        return runs


def _verify(runs: Sequence[CellRun], cells: Cells) -> None:
    expected = iter(unpack_sums(cells.sums.packed))
    for run, view in zip(runs, cells.views, strict=True):
        for cell in range(run.cells):
            if cell_sum(view[cell * run.cell_bytes : (cell + 1) * run.cell_bytes]) != next(expected):
                raise CorruptError(f"cell {run.first + cell} of the stored {run.key} fails its sum", key=str(run.key))


def _discard(reading: asyncio.Task[Cells | None]) -> None:
    """What was read ahead for nobody."""
    if not reading.cancelled() and reading.exception() is None and (cells := reading.result()) is not None:
        cells.release()


def _batches(runs: Iterator[CellRun], size: int) -> Iterator[list[CellRun]]:
    """Group runs into batches of about ``size`` bytes; longer runs are split between cells."""
    batch: list[CellRun] = []
    room = size
    for whole in runs:
        run = whole
        while (length := run.cells * run.cell_bytes) > room:
            fits = max(room // run.cell_bytes, 0 if batch else 1)
            if fits:
                batch.append(CellRun(run.key, run.first, fits, run.cell_bytes))
                run = CellRun(run.key, run.first + fits, run.cells - fits, run.cell_bytes)
            yield batch
            batch, room = [], size
            if not run.cells:
                break
        else:
            batch.append(run)
            room -= length
    if batch:
        yield batch
