"""Memory in front of a backend: what was read last is read from here again, and writes can be answered here.

An object is kept in the buffer that it was read into, or received into; nothing is copied to keep it. With `Ack.RAM` a
write is answered from here, and goes on to the backend behind, in the order in which they came: in the next pause
between writes, after a second, or when a quarter of the memory waits for it, whichever is first. As much as half of the
memory may wait, and further writes wait with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from l3store.backend.buffers import BufferPool, PooledBuffer
from l3store.backend.protocol import Ack, Backend, CellRun, NewObject, Sums
from l3store.errors import RetryError
from l3store.layout import Key
from l3store.layout.sums import SUM_BYTES

_BATCH_BYTES = 16 << 20
_WAIT_SECONDS = 10.0
_QUIET_SECONDS = 0.02
_HELD_SECONDS = 1.0

_NOTHING = memoryview(b"")

_log = logging.getLogger("l3store.backend")


@dataclass(frozen=True, slots=True)
class Cells:
    """Cells in memory, a view for each run that was asked, and their sums. They stay as they are until `release`."""

    views: list[memoryview]
    sums: Sums
    buffers: list[PooledBuffer]

    @property
    def length(self) -> int:
        """Bytes."""
        return sum(map(len, self.views))

    def release(self) -> None:
        """Give the memory back; once."""
        for buffer in self.buffers:
            buffer.release()


class _Resident:
    """An object in memory. ``unwritten`` until the backend has it."""

    __slots__ = ("buffer", "sums", "unwritten", "view")

    def __init__(self, view: memoryview, buffer: PooledBuffer, sums: Sums, *, unwritten: bool) -> None:
        self.view = view
        self.buffer = buffer.retain()
        self.sums = sums
        self.unwritten = unwritten

    def sums_of(self, run: CellRun) -> Sums:
        start = run.first * SUM_BYTES
        return Sums(self.sums.packed[start : start + run.cells * SUM_BYTES], self.sums.by_writer)


class RamTier:
    """See the module. ``on_lost`` is told of an object that was answered and then could not be written.

    ``hot_bytes`` bounds what is kept only because it may be asked for again; None leaves that to the pool.
    """

    def __init__(self, backend: Backend, pool: BufferPool, *, ack: Ack, hot_bytes: int | None = None) -> None:
        self.pool = pool
        self.on_lost: Callable[[Key, Exception], None] = lambda key, error: None
        self.hit_bytes = 0
        self.missed_bytes = 0
        self._backend = backend
        self._behind = ack is Ack.RAM
        self._hot_bytes = pool.total if hot_bytes is None else hot_bytes
        self._residents: OrderedDict[Key, _Resident] = OrderedDict()
        self._queue: OrderedDict[Key, NewObject] = OrderedDict()
        self._in_hand: set[Key] = set()
        self._writing: asyncio.Task[None] | None = None
        self._progress = asyncio.Condition()
        self._deletions = 0
        self._last_put = 0.0
        self._closing = False
        self.resident_bytes = 0
        self.unwritten_bytes = 0
        pool.reclaim = self._reclaim

    async def put(self, objects: Sequence[NewObject]) -> list[bool | Exception]:
        """Store objects; see `Backend.put`. Raises `RetryError` where too much waits to be written."""
        if not self._behind or any(new.held is None for new in objects):
            # Not kept: most of what is written is not asked for soon, and memory that is used again at once is still in
            # the processor's cache.
            return await self._backend.put(objects)
        await self._wait_for_room(sum(len(memoryview(new.body)) for new in objects))
        self._last_put = time.monotonic()
        answers: list[bool | Exception] = []
        for new in objects:
            answers.append(new.key not in self._queue and new.key not in self._residents)
            if answers[-1]:
                self._enqueue(new)
                self._keep_new(new)
        if self._writing is None and self._queue:
            self._writing = asyncio.create_task(self._write_behind())
        return answers

    def whole(self, key: Key) -> Cells | None:
        """A whole object, to be released, where it is in memory."""
        resident = self._residents.get(key)
        if resident is None:
            return None
        self._residents.move_to_end(key)
        self.hit_bytes += len(resident.view)
        return Cells([resident.view], resident.sums, [resident.buffer.retain()])

    async def read(self, runs: Sequence[CellRun]) -> Cells:
        """The cells of runs, in their order; see `Backend.read` for what is raised."""
        residents = self._residents
        views: list[memoryview] = []
        sums: list[bytes] = []
        buffers: list[PooledBuffer] = []
        held: PooledBuffer | None = None
        by_writer = True
        hit = 0
        absent = []
        for key, first, cells, cell_bytes in runs:
            resident = residents.get(key)
            if resident is None:
                absent.append(len(views))
                views.append(_NOTHING)
                sums.append(b"")
                continue
            residents.move_to_end(key)
            # Held before anything else happens: what is evicted while we wait for the backend stays whole for us. What
            # was read or written together shares a buffer.
            if resident.buffer is not held:
                held = resident.buffer.retain()
                buffers.append(held)
            view, own = resident.view, resident.sums
            length = cells * cell_bytes
            if len(view) == length:
                views.append(view)
                sums.append(own.packed)
            else:
                views.append(view[first * cell_bytes : first * cell_bytes + length])
                sums.append(own.packed[first * SUM_BYTES : (first + cells) * SUM_BYTES])
            by_writer = by_writer and own.by_writer
            hit += length
        self.hit_bytes += hit
        if absent:
            try:
                below = await self._read_below([runs[at] for at in absent], buffers)
            except BaseException:
                for buffer in buffers:
                    buffer.release()
                raise
            for at, (view, read) in zip(absent, below, strict=True):
                views[at] = view
                sums[at] = read.packed
                by_writer = by_writer and read.by_writer
        return Cells(views, Sums(b"".join(sums), by_writer), buffers)

    async def read_sums(self, runs: Sequence[CellRun]) -> Sums:
        """The sums that `read` would give, without the cells."""
        parts = []
        for run in runs:
            resident = self._residents.get(run.key)
            parts.append(resident.sums_of(run) if resident is not None else await self._backend.read_sums([run]))
        return _joined(parts)

    async def delete(self, keys: Sequence[Key]) -> int:
        """Delete objects; how many were there."""
        unwritten = await self._withdraw(keys)
        return len(unwritten) + await self._backend.delete([key for key in keys if key not in unwritten])

    async def quarantine(self, key: Key) -> None:
        """Set an object aside."""
        await self._withdraw([key])
        await self._backend.quarantine(key)

    def forget(self, key: Key) -> None:
        """Drop the copy in memory, unless it is the only one."""
        if key not in self._queue and (resident := self._residents.pop(key, None)) is not None:
            self._dismiss(resident)

    async def _withdraw(self, keys: Sequence[Key]) -> set[Key]:
        """Drop objects from memory, unwritten ones too; the latter are named."""
        self._deletions += 1
        wanted = set(keys)
        while self._in_hand & wanted:
            async with self._progress:
                await self._progress.wait()
        unwritten = {key for key in keys if key in self._queue}
        for key in unwritten:
            self._dequeue(key)
        for key in keys:
            self.forget(key)
        return unwritten

    async def close(self) -> None:
        """Write everything that was answered, then close the backend."""
        self._closing = True
        while self._writing is not None:
            await asyncio.wait([self._writing])
        for key in list(self._residents):
            self.forget(key)
        await self._backend.close()

    async def _read_below(self, runs: Sequence[CellRun], buffers: list[PooledBuffer]) -> list[tuple[memoryview, Sums]]:
        """Read from the backend into one buffer, and keep what was read whole."""
        length = sum(run.length for run in runs)
        buffer = await self.pool.acquire(length)
        buffers.append(buffer)
        deletions = self._deletions
        sums = await self._backend.read(runs, buffer.view)
        self.missed_bytes += length
        keep = deletions == self._deletions and all(run.cells == run.stored_cells for run in runs)
        parts = []
        at = sum_at = 0
        for run in runs:
            size = run.cells * SUM_BYTES
            view = buffer.view[at : at + run.length]
            own = Sums(sums.packed[sum_at : sum_at + size], sums.by_writer)
            parts.append((view, own))
            # What was deleted meanwhile must not come back from here; and what shares its buffer with parts that
            # nobody could ask for again would hold more memory than it is worth.
            if keep:
                self._keep(run.key, _Resident(view, buffer, own, unwritten=False))
            at += run.length
            sum_at += size
        return parts

    def _keep_new(self, new: NewObject) -> None:
        if new.held is not None:
            self._keep(new.key, _Resident(memoryview(new.body), new.held, new.sums, unwritten=True))

    def _keep(self, key: Key, resident: _Resident) -> None:
        self.forget(key)
        if key in self._residents:
            resident.buffer.release()
            return
        self._residents[key] = resident
        self.resident_bytes += len(resident.view)
        self._trim()

    def _trim(self) -> None:
        excess = self.resident_bytes - self.unwritten_bytes - self._hot_bytes
        if excess > 0:
            self._reclaim(excess)

    def _dismiss(self, resident: _Resident) -> None:
        self.resident_bytes -= len(resident.view)
        resident.buffer.release()

    def _reclaim(self, wanted: int) -> int:
        """Drop what was used longest ago and is written; how many bytes."""
        freed = 0
        victims = []
        for key, resident in self._residents.items():
            if freed >= wanted:
                break
            if not resident.unwritten:
                victims.append(key)
                freed += len(resident.view)
        for key in victims:
            self.forget(key)
        return freed

    async def _wait_for_room(self, size: int) -> None:
        limit = self.pool.total // 2
        if not self._queue or self.unwritten_bytes + size <= limit:
            return
        try:
            async with asyncio.timeout(_WAIT_SECONDS), self._progress:
                await self._progress.wait_for(lambda: not self._queue or self.unwritten_bytes + size <= limit)
        except TimeoutError as error:
            raise RetryError("too much waits to be written; try again in a second") from error

    async def _write_behind(self) -> None:
        try:
            while self._queue:
                await self._pause()
                await self._write_batch()
        finally:
            self._writing = None

    async def _pause(self) -> None:
        """Wait for a pause between writes: files take the processor from those who wait for an answer."""
        until = time.monotonic() + _HELD_SECONDS
        while not self._closing and self.unwritten_bytes < self.pool.total // 4:
            now = time.monotonic()
            rest = min(self._last_put + _QUIET_SECONDS, until) - now
            if rest <= 0:
                return
            await asyncio.sleep(rest)

    async def _write_batch(self) -> None:
        batch: list[NewObject] = []
        size = 0
        for new in self._queue.values():
            batch.append(new)
            size += len(memoryview(new.body))
            if size >= _BATCH_BYTES:
                break
        self._in_hand = {new.key for new in batch}
        results: Sequence[bool | Exception]
        try:
            results = await self._backend.put(batch)
        except Exception as error:  # noqa: BLE001 - what it was is told to whoever counts, for each object
            results = [error] * len(batch)
        self._in_hand = set()
        for new, result in zip(batch, results, strict=True):
            self._dequeue(new.key)
            if isinstance(result, Exception):
                _log.error("%s was answered and could not be written: %s", new.key, result)
                self.forget(new.key)
                self.on_lost(new.key, result)
        self.pool.reconsider()
        async with self._progress:
            self._progress.notify_all()

    def _enqueue(self, new: NewObject) -> None:
        self._queue[new.key] = new
        self.unwritten_bytes += len(memoryview(new.body))
        if new.held is not None:
            new.held.retain()

    def _dequeue(self, key: Key) -> None:
        new = self._queue.pop(key)
        self.unwritten_bytes -= len(memoryview(new.body))
        if new.held is not None:
            new.held.release()
        if (resident := self._residents.get(key)) is not None:
            resident.unwritten = False
            self._trim()


def _joined(parts: Sequence[Sums]) -> Sums:
    if len(parts) == 1:
        return parts[0]
    return Sums(b"".join(part.packed for part in parts), all(part.by_writer for part in parts))
