"""The RAM tier does what a backend does, whatever it keeps; and what it alone has to do."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from l3store.backend import Ack, Backend, BufferPool, CellRun, DiskBackend, NewObject, RamTier, Sums
from l3store.backend.naming import name_file
from l3store.errors import MissError, RetryError, StorageFullError
from l3store.layout import Key
from l3store.layout.sums import sum_cells
from tests.conformance.backend_suite import CELL, BackendSuite, key_of, new_object, run_of

POOL = 64 * 4096


class Tiered:
    """A tier as a backend: bodies lie in its memory, cells are copied out of it."""

    def __init__(self, folder: Path, ack: Ack, pool: int = POOL) -> None:
        self.disk = DiskBackend(folder, ack=ack)
        self.tier = RamTier(self.disk, BufferPool(pool, timeout=1), ack=ack)

    async def load_namespaces(self) -> dict[str, dict[str, Any]]:
        return await self.disk.load_namespaces()

    async def save_namespace(self, digest: str, registration: Mapping[str, Any]) -> None:
        await self.disk.save_namespace(digest, registration)

    async def drop_namespace(self, digest: str) -> None:
        await self.disk.drop_namespace(digest)

    async def scan(self) -> AsyncIterator[list[str]]:
        await self.settle()
        async for names in self.disk.scan():
            yield names

    async def put(self, objects: Sequence[NewObject]) -> list[bool | Exception]:
        results: list[bool | Exception] = []
        for start in range(0, len(objects), 8):
            with ExitStack() as stack:
                batch = []
                for new in objects[start : start + 8]:
                    held = stack.enter_context(await self.tier.pool.acquire(len(memoryview(new.body))))
                    held.view[:] = new.body
                    batch.append(NewObject(new.key, held.view, new.sums, held))
                results += await self.tier.put(batch)
        await asyncio.sleep(0)
        return results

    async def read(self, runs: Sequence[CellRun], into: memoryview) -> Sums:
        # What is in memory is there at once; others must get their turn all the same.
        await asyncio.sleep(0)
        cells = await self.tier.read(runs)
        into[:] = b"".join(cells.views)
        cells.release()
        return cells.sums

    async def read_sums(self, runs: Sequence[CellRun]) -> Sums:
        return await self.tier.read_sums(runs)

    async def delete(self, keys: Sequence[Key]) -> int:
        return await self.tier.delete(keys)

    async def quarantine(self, key: Key) -> None:
        await self.settle()
        await self.tier.quarantine(key)

    async def free_bytes(self) -> int:
        return await self.disk.free_bytes()

    async def probe(self) -> None:
        await self.disk.probe()

    async def close(self) -> None:
        await self.tier.close()
        assert self.tier.pool.used == 0, "memory that nobody gave back"

    async def settle(self) -> None:
        """Until everything that was answered is written."""
        while self.tier.unwritten_bytes:  # noqa: ASYNC110 - the tier tells nobody, and need not
            await asyncio.sleep(0.001)


class _InFolder(BackendSuite):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "data"


class TestTierAckFile(_InFolder):
    def make(self) -> Backend:
        return Tiered(self.folder, Ack.FILE)


class TestTierAckRam(_InFolder):
    def make(self) -> Backend:
        return Tiered(self.folder, Ack.RAM)


class TestTinyTier(_InFolder):
    """So little memory that nothing stays for long."""

    def make(self) -> Backend:
        return Tiered(self.folder, Ack.FILE, pool=32 * 4096)


async def read_back(tiered: Tiered, key: Key) -> bytes:
    cells = await tiered.tier.read([run_of(key)])
    data = b"".join(cells.views)
    cells.release()
    return data


async def test_what_was_written_is_kept_from_its_first_reader_on(tmp_path: Path) -> None:
    tiered = Tiered(tmp_path / "data", Ack.FILE)
    new = new_object(key_of())
    await tiered.put([new])
    assert tiered.tier.resident_bytes == 0
    (await tiered.tier.read([run_of(new.key)])).release()
    assert tiered.tier.resident_bytes == len(memoryview(new.body))
    tiered.disk.path(new.key).write_bytes(b"gone bad")
    cells = await tiered.tier.read([run_of(new.key, 1, 2)])
    assert b"".join(cells.views) == memoryview(new.body)[CELL : 3 * CELL]
    cells.release()
    assert (tiered.tier.hit_bytes, tiered.tier.missed_bytes) == (2 * CELL, len(memoryview(new.body)))
    # The copy in memory is dropped where what is at rest has to be asked.
    tiered.tier.forget(new.key)
    with pytest.raises(MissError):
        await tiered.tier.read([run_of(new.key)])
    await tiered.close()


async def test_what_was_read_last_needs_no_disk(tmp_path: Path) -> None:
    tiered = Tiered(tmp_path / "data", Ack.FILE)
    news = [new_object(key_of(page), page) for page in range(4)]
    await tiered.put(news)
    for new in news:
        tiered.tier.forget(new.key)
    cells = await tiered.tier.read([run_of(new.key) for new in news])
    cells.release()
    for new in news:
        tiered.disk.path(new.key).unlink()
        assert await read_back(tiered, new.key) == new.body
    await tiered.close()


async def test_it_never_holds_more_than_its_memory(tmp_path: Path) -> None:
    tiered = Tiered(tmp_path / "data", Ack.FILE, pool=8 * 4096)
    news = [new_object(key_of(page), page) for page in range(40)]
    for new in news:
        await tiered.put([new])
        assert tiered.tier.pool.used <= tiered.tier.pool.total
    for new in news:
        assert await read_back(tiered, new.key) == new.body
        assert tiered.tier.resident_bytes <= tiered.tier.pool.total
    await tiered.close()


async def test_a_reader_keeps_its_bytes_while_they_are_evicted_and_deleted(tmp_path: Path) -> None:
    tiered = Tiered(tmp_path / "data", Ack.FILE, pool=8 * 4096)
    new = new_object(key_of(0), 77)
    await tiered.put([new])
    cells = await tiered.tier.read([run_of(new.key)])
    await tiered.tier.delete([new.key])
    for page in range(1, 30):
        await tiered.put([new_object(key_of(page), page)])
    assert b"".join(cells.views) == new.body
    cells.release()
    with pytest.raises(MissError):
        await tiered.tier.read([run_of(new.key)])
    await tiered.close()


async def test_what_is_deleted_while_it_is_read_does_not_come_back(tmp_path: Path) -> None:
    tiered = Tiered(tmp_path / "data", Ack.FILE)
    first, second = new_object(key_of(), 1), new_object(key_of(), 2)
    for _ in range(20):
        await tiered.put([first])
        tiered.tier.forget(first.key)
        reading = asyncio.create_task(tiered.tier.read([run_of(first.key)]))
        await asyncio.sleep(0)
        await tiered.tier.delete([first.key])
        outcome = (await asyncio.gather(reading, return_exceptions=True))[0]
        if not isinstance(outcome, BaseException):
            outcome.release()
        with pytest.raises(MissError):
            await tiered.tier.read([run_of(first.key)])
        assert await tiered.put([second]) == [True]
        assert await read_back(tiered, first.key) == second.body
        await tiered.tier.delete([first.key])
    await tiered.close()


async def test_writes_are_answered_from_memory_and_written_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiered = Tiered(tmp_path / "data", Ack.RAM)
    named: list[str] = []

    def noting(partial: str, path: str) -> bool:
        named.append(path.rpartition("/")[2])
        return name_file(partial, path)

    monkeypatch.setattr("l3store.backend.disk.name_file", noting)
    news = [new_object(key_of(page), page) for page in range(12)]
    for new in news:
        assert await tiered.put([new]) == [True]
    assert tiered.tier.unwritten_bytes > 0
    assert await read_back(tiered, news[-1].key) == news[-1].body
    await tiered.close()
    names = [str(new.key) for new in news]
    assert named == names
    again = DiskBackend(tmp_path / "data")
    assert sorted([name async for found in again.scan() for name in found]) == sorted(names)
    await again.close()


async def test_a_full_disk_behind_a_write_that_was_answered_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiered = Tiered(tmp_path / "data", Ack.RAM)
    lost: list[tuple[Key, Exception]] = []
    tiered.tier.on_lost = lambda key, error: lost.append((key, error))

    def failing(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "writev", failing)
    assert await tiered.put([new_object(key_of())]) == [True]
    await tiered.settle()
    [(key, error)] = lost
    assert key == key_of()
    assert isinstance(error, StorageFullError)
    monkeypatch.undo()
    with pytest.raises(MissError):
        await tiered.tier.read([run_of(key)])
    assert await tiered.put([new_object(key_of())]) == [True]
    await tiered.close()


async def test_writes_wait_where_too_much_is_unwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("l3store.backend.ram._WAIT_SECONDS", 0.05)
    tiered = Tiered(tmp_path / "data", Ack.RAM, pool=5 * 4096)
    go_on = asyncio.Event()
    real = tiered.disk.put

    async def slow(objects: Sequence[NewObject]) -> list[bool | Exception]:
        await go_on.wait()
        return await real(objects)

    monkeypatch.setattr(tiered.disk, "put", slow)
    # 3,840 bytes each; half of the memory is 10,240.
    for page in (0, 1):
        assert await tiered.put([new_object(key_of(page, 0, 40))]) == [True]
    with pytest.raises(RetryError, match="waits to be written"):
        await tiered.put([new_object(key_of(2, 0, 40))])
    go_on.set()
    await tiered.settle()
    assert await tiered.put([new_object(key_of(2, 0, 40))]) == [True]
    await tiered.close()


async def test_what_is_quarantined_before_it_is_written_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotten in memory: the next writer stores it anew, and nothing of the rot reaches the disk."""
    tiered = Tiered(tmp_path / "data", Ack.RAM)
    real = tiered.disk.put
    go_on = asyncio.Event()

    async def slow(objects: Sequence[NewObject]) -> list[bool | Exception]:
        await go_on.wait()
        return await real(objects)

    monkeypatch.setattr(tiered.disk, "put", slow)
    first, second = new_object(key_of(0)), new_object(key_of(1))
    await tiered.put([first])
    await asyncio.sleep(0)
    await tiered.put([second])
    cells = await tiered.tier.read([run_of(second.key)])
    cells.views[0][5] ^= 1
    cells.release()
    await tiered.tier.quarantine(second.key)
    with pytest.raises(MissError):
        await tiered.tier.read([run_of(second.key)])
    assert await tiered.put([second]) == [True]
    go_on.set()
    await tiered.settle()
    tiered.tier.forget(second.key)
    assert await read_back(tiered, second.key) == second.body
    await tiered.close()


async def test_sums_come_from_memory_too(tmp_path: Path) -> None:
    tiered = Tiered(tmp_path / "data", Ack.FILE)
    one, two = new_object(key_of(0), 1), new_object(key_of(1), 9)
    await tiered.put([one, two])
    tiered.tier.forget(two.key)
    expected = sum_cells(bytes(memoryview(one.body)[:CELL]) + bytes(memoryview(two.body)[CELL:]), CELL)
    runs = [run_of(one.key, 0, 1), run_of(two.key, 1, 3)]
    assert (await tiered.tier.read_sums(runs)).packed == expected
    cells = await tiered.tier.read(runs)
    assert cells.sums.packed == expected
    cells.release()
    await tiered.close()
