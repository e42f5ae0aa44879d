"""Memory in front of another backend: what was written or read last is read from here, and writes can be answered here.

An object is kept in the buffer that it was received into, or read into; nothing is copied to keep it. Writes go on to
the backend behind in the order in which they came. With `behind`, they are answered before that: then as much as half
of the memory may be waiting to be written, and further writes wait with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from l3store.backend.buffers import Buffer, BufferPool
from l3store.backend.protocol import Backend, Cells, CellRun, NewObject, Sums
from l3store.errors import RetryError
from l3store.layout import Key
from l3store.layout.sums import SUM_BYTES

_BATCH_BYTES = 16 << 20
_WAIT_SECONDS = 10.0

_log = logging.getLogger("l3store.backend")


class _Resident:
    """An object in memory. ``unwritten`` until the backend behind has it."""

    __slots__ = ("buffer", "sums", "unwritten")

    def __init__(self, buffer: Buffer, sums: Sums, *, unwritten: bool) -> None:
        self.buffer = buffer
        self.sums = sums
        self.unwritten = unwritten


class RamTier:
    """See the module. ``on_lost`` is told of an object that was answered and then could not be written."""

    def __init__(self, lower: Backend, pool: BufferPool, *, behind: bool) -> None:
        self._lower = lower
        self._pool = pool
        self._behind = behind
        self._residents: OrderedDict[Key, _Resident] = OrderedDict()
        self._queue: OrderedDict[Key, NewObject] = OrderedDict()
        self._unwritten_bytes = 0
        self._writing: asyncio.Task[None] | None = None
        self._in_hand: set[Key] = set()
        self._progress = asyncio.Condition()
        self.on_lost: Callable[[Key, Exception], None] = lambda key, error: None
        self.hit_bytes = 0
        self.missed_bytes = 0
        pool.reclaim = self._reclaim

    @property
    def resident_bytes(self) -> int:
        """Bytes of objects in memory."""
        return sum(len(resident.buffer.view) for resident in self._residents.values())

    @property
    def unwritten_bytes(self) -> int:
        """Bytes that were answered and are not written yet."""
        return self._unwritten_bytes

    async def load_namespaces(self) -> dict[str, dict[str, Any]]:
        return await self._lower.load_namespaces()

    async def save_namespace(self, digest: str, registration: Mapping[str, Any]) -> None:
        await self._lower.save_namespace(digest, registration)

    async def drop_namespace(self, digest: str) -> None:
        await self._lower.drop_namespace(digest)

    def scan(self) -> AsyncIterator[list[Key]]:
        return self._lower.scan()

    async def put(self, objects: Sequence[NewObject]) -> list[bool | Exception]:
        if not self._behind:
            results = await self._lower.put(objects)
            for new, result in zip(objects, results, strict=True):
                if result is True:
                    self._keep(new, unwritten=False)
            return results
        size = sum(len(new.buffer.view) for new in objects)
        await self._wait_for_room(size)
        results = []
        for new in objects:
            results.append(new.key not in self._queue and new.key not in self._residents)
            if results[-1]:
                self._keep(new, unwritten=True)
                self._queue[new.key] = new
                new.buffer.retain()
                self._unwritten_bytes += len(new.buffer.view)
        if self._writing is None and self._queue:
            self._writing = asyncio.create_task(self._write_behind())
        return results

    async def read(self, runs: Sequence[CellRun]) -> Cells:
        residents = [self._residents.get(run.key) for run in runs]
        absent = [run for run, resident in zip(runs, residents, strict=True) if resident is None]
        for run, resident in zip(runs, residents, strict=True):
            if resident is not None:
                # Held before anything else runs: who is evicted while we read the others stays whole for us.
                resident.buffer.retain()
                self._residents.move_to_end(run.key)
                self.hit_bytes += run.length
        try:
            below = await self._lower.read(absent) if absent else None
        except BaseException:
            for resident in residents:
                if resident is not None:
                    resident.buffer.release()
            raise
        if below is not None:
            self.missed_bytes += below.length
            if len(runs) == 1:
                self._keep_read(runs[0], below)
                return below
        return _merge(runs, residents, below)

    async def read_sums(self, runs: Sequence[CellRun]) -> Sums:
        residents = [self._residents.get(run.key) for run in runs]
        if None not in residents:
            return _joined([_sums_of(run, resident) for run, resident in zip(runs, residents, strict=True) if resident])
        parts = []
        for run, resident in zip(runs, residents, strict=True):
            parts.append(_sums_of(run, resident) if resident else await self._lower.read_sums([run]))
        return _joined(parts)

    async def delete(self, keys: Sequence[Key]) -> int:
        absent = 0
        for key in keys:
            if key in self._queue and key not in self._in_hand:
                self._unqueue(key)
                absent += 1
            self.forget(key)
        while self._in_hand & set(keys):
            async with self._progress:
                await self._progress.wait()
        return absent + await self._lower.delete(keys)

    async def quarantine(self, key: Key) -> None:
        self.forget(key)
        await self._lower.quarantine(key)

    def forget(self, key: Key) -> None:
        """Drop the copy in memory."""
        resident = self._residents.pop(key, None)
        if resident is not None:
            resident.buffer.release()

    async def free_bytes(self) -> int:
        return await self._lower.free_bytes()

    async def probe(self) -> None:
        await self._lower.probe()

    async def flush(self) -> None:
        """Wait until everything that was answered is written."""
        while self._writing is not None:
            await asyncio.wait([self._writing])

    async def close(self) -> None:
        await self.flush()
        for key in list(self._residents):
            self.forget(key)
        await self._lower.close()

    def _keep(self, new: NewObject, *, unwritten: bool) -> None:
        self.forget(new.key)
        self._residents[new.key] = _Resident(new.buffer.retain(), new.sums, unwritten=unwritten)

    def _keep_read(self, run: CellRun, cells: Cells) -> None:
        """Keep an object that was read whole."""
        if run.count == run.stored_cells and len(cells.buffers) == 1 and run.key not in self._residents:
            self._residents[run.key] = _Resident(cells.buffers[0].retain(), cells.sums, unwritten=False)

    def _reclaim(self, wanted: int) -> int:
        """Drop what was used longest ago and is written."""
        freed = 0
        for key in list(self._residents):
            if freed >= wanted:
                break
            resident = self._residents[key]
            if not resident.unwritten:
                freed += len(resident.buffer.view)
                self.forget(key)
        return freed

    async def _wait_for_room(self, size: int) -> None:
        limit = self._pool.total // 2
        try:
            async with asyncio.timeout(_WAIT_SECONDS), self._progress:
                await self._progress.wait_for(lambda: not self._queue or self._unwritten_bytes + size <= limit)
        except TimeoutError as error:
            raise RetryError("too much waits to be written; try again in a second") from error

    async def _write_behind(self) -> None:
        try:
            while self._queue:
                await self._write_batch()
        finally:
            self._writing = None

    async def _write_batch(self) -> None:
        batch: list[NewObject] = []
        size = 0
        for new in self._queue.values():
            batch.append(new)
            size += len(new.buffer.view)
            if size >= _BATCH_BYTES:
                break
        self._in_hand = {new.key for new in batch}
        try:
            results = await self._lower.put(batch)
        except Exception as error:  # noqa: BLE001 - the objects are lost, and whoever counts is told
            results = [error] * len(batch)
        self._in_hand = set()
        for new, result in zip(batch, results, strict=True):
            self._unqueue(new.key)
            if isinstance(result, Exception):
                _log.error("could not write %s, which was answered: %s", new.key, result)
                self.forget(new.key)
                self.on_lost(new.key, result)
        async with self._progress:
            self._progress.notify_all()

    def _unqueue(self, key: Key) -> None:
        new = self._queue.pop(key)
        self._unwritten_bytes -= len(new.buffer.view)
        new.buffer.release()
        resident = self._residents.get(key)
        if resident is not None:
            resident.unwritten = False


def _sums_of(run: CellRun, resident: _Resident) -> Sums:
    start = run.first * SUM_BYTES
    return Sums(resident.sums.packed[start : start + run.count * SUM_BYTES], resident.sums.by_writer)


def _joined(parts: Sequence[Sums]) -> Sums:
    return Sums(b"".join(part.packed for part in parts), all(part.by_writer for part in parts))


def _merge(runs: Sequence[CellRun], residents: Sequence[_Resident | None], below: Cells | None) -> Cells:
    """Cells of both tiers in the order of the runs. ``below`` is one stretch of memory for all runs that it has."""
    views = []
    sums = []
    buffers = list(below.buffers) if below is not None else []
    rest = below.views[0] if below is not None else memoryview(b"")
    rest_sums = below.sums.packed if below is not None else b""
    for run, resident in zip(runs, residents, strict=True):
        if resident is not None:
            start = run.first * run.cell_bytes
            views.append(resident.buffer.view[start : start + run.length])
            sums.append(_sums_of(run, resident))
            buffers.append(resident.buffer)
        else:
            assert below is not None
            views.append(rest[: run.length])
            rest = rest[run.length :]
            size = run.count * SUM_BYTES
            sums.append(Sums(rest_sums[:size], below.sums.by_writer))
            rest_sums = rest_sums[size:]
    return Cells(views, _joined(sums), buffers)
