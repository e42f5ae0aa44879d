"""What every backend has to do. A backend's own test module subclasses `BackendSuite` and says how to make one."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator

import pytest

from l3store.backend import Backend, CellRun, NewObject, Sums
from l3store.errors import MissError
from l3store.layout import InvalidKeyError, Key, parse_key
from l3store.layout.sums import sum_cells
from tests.support import page_hashes

CELL = 96
DIGEST = "ukv1-0123456789abcdef"


def key_of(page: int = 0, first: int = 0, end: int = 4, group: int | None = 0, digest: str = DIGEST) -> Key:
    suffix = "" if group is None else f"_H{group}"
    return parse_key(f"{page_hashes('conformance', page + 1)[page]}_{digest}_L{first}-{end}{suffix}")


def new_object(key: Key, fill: int = 1, *, by_writer: bool = True) -> NewObject:
    cells = len(key.coordinate.layers)
    body = b"".join(bytes([(fill + cell) % 256]) * CELL for cell in range(cells))
    return NewObject(key, body, Sums(sum_cells(body, CELL), by_writer))


def run_of(key: Key, first: int = 0, count: int | None = None) -> CellRun:
    return CellRun(key, first, len(key.coordinate.layers) - first if count is None else count, CELL)


async def read(backend: Backend, *runs: CellRun) -> tuple[bytes, Sums]:
    into = memoryview(bytearray(sum(run.length for run in runs)))
    sums = await backend.read(runs, into)
    return bytes(into), sums


async def scanned(backend: Backend) -> list[Key]:
    """Every stored object, after a check that each batch is sorted and has all of its pages."""
    keys: list[Key] = []
    pages: set[str] = set()
    async for names in backend.scan():
        assert names == sorted(names)
        batch = [parse_key(name) for name in names if _is_key(name)]
        assert pages.isdisjoint(key.page_hash for key in batch)
        pages.update(key.page_hash for key in batch)
        keys += batch
    return sorted(keys)


def _is_key(name: str) -> bool:
    try:
        parse_key(name)
    except InvalidKeyError:
        return False
    return True


class BackendSuite(ABC):
    """Tests of one backend."""

    @abstractmethod
    def make(self) -> Backend:
        """A backend over the place of this test; a second one is the first, started again."""

    @pytest.fixture
    async def backend(self) -> AsyncIterator[Backend]:
        made = self.make()
        yield made
        await made.close()

    async def test_what_was_put_is_read(self, backend: Backend) -> None:
        new = new_object(key_of(), by_writer=False)
        assert await backend.put([new]) == [True]
        assert await read(backend, run_of(new.key)) == (new.body, new.sums)
        assert await backend.read_sums([run_of(new.key)]) == new.sums

    async def test_runs_of_several_objects_are_read_back_to_back(self, backend: Backend) -> None:
        one, two = new_object(key_of(0), 1), new_object(key_of(1, 2, 9, None), 50)
        assert await backend.put([one, two]) == [True, True]
        runs = [run_of(two.key, 3, 2), run_of(one.key, 1, 3), run_of(two.key, 0, 1)]
        data, sums = await read(backend, *runs)
        expected = b"".join(
            bytes(memoryview(new.body))[first * CELL : end * CELL]
            for new, first, end in [(two, 3, 5), (one, 1, 4), (two, 0, 1)]
        )
        assert data == expected
        assert sums == Sums(sum_cells(expected, CELL), by_writer=True)
        assert await backend.read_sums(runs) == sums

    async def test_sums_are_the_writers_only_where_all_are(self, backend: Backend) -> None:
        await backend.put([new_object(key_of(0)), new_object(key_of(1), by_writer=False)])
        assert (await backend.read_sums([run_of(key_of(0))])).by_writer is True
        assert (await backend.read_sums([run_of(key_of(0)), run_of(key_of(1))])).by_writer is False

    async def test_the_first_writer_wins(self, backend: Backend) -> None:
        first, second = new_object(key_of(), 1), new_object(key_of(), 2)
        assert await backend.put([first]) == [True]
        assert await backend.put([second]) == [False]
        assert (await read(backend, run_of(first.key)))[0] == first.body

    async def test_of_many_writers_at_once_one_wins_and_its_bytes_stay(self, backend: Backend) -> None:
        news = [new_object(key_of(), fill) for fill in range(24)]
        results = [result for [result] in await asyncio.gather(*(backend.put([new]) for new in news))]
        assert sorted(map(bool, results)) == [False] * 23 + [True]
        assert all(isinstance(result, bool) for result in results)
        assert (await read(backend, run_of(key_of())))[0] == news[results.index(True)].body

    async def test_what_is_not_there_is_a_miss_that_names_it(self, backend: Backend) -> None:
        await backend.put([new_object(key_of(0))])
        for call in (read(backend, run_of(key_of(0)), run_of(key_of(1))), backend.read_sums([run_of(key_of(1))])):
            with pytest.raises(MissError) as caught:
                await call
            assert caught.value.members["key"] == str(key_of(1))

    async def test_deleted_is_gone_and_may_be_put_again(self, backend: Backend) -> None:
        await backend.put([new_object(key_of(0)), new_object(key_of(1))])
        assert await backend.delete([key_of(0), key_of(2)]) == 1
        assert await backend.delete([key_of(0)]) == 0
        with pytest.raises(MissError):
            await read(backend, run_of(key_of(0)))
        assert await scanned(backend) == [key_of(1)]
        again = new_object(key_of(0), 9)
        assert await backend.put([again]) == [True]
        assert (await read(backend, run_of(key_of(0))))[0] == again.body

    async def test_quarantined_is_never_served_again(self, backend: Backend) -> None:
        await backend.put([new_object(key_of())])
        await backend.quarantine(key_of())
        await backend.quarantine(key_of())
        with pytest.raises(MissError):
            await read(backend, run_of(key_of()))
        assert await scanned(backend) == []
        assert await backend.put([new_object(key_of(), 7)]) == [True]
        await backend.quarantine(key_of())
        assert await scanned(backend) == []

    async def test_a_scan_gives_every_object_once(self, backend: Backend) -> None:
        keys = [key_of(page, first, first + 2, group) for page in range(40) for first in (0, 2) for group in (0, 1)]
        keys += [key_of(0, 0, 4, None, "l3x1-" + "a" * 32)]
        assert await backend.put([new_object(key) for key in keys]) == [True] * len(keys)
        assert await scanned(backend) == sorted(keys)

    async def test_objects_and_registrations_outlive_it(self) -> None:
        first = self.make()
        await first.put([new_object(key_of())])
        await first.save_namespace(DIGEST, {"a": 1})
        await first.save_namespace(DIGEST, {"a": 2, "ü": ["x"]})
        await first.save_namespace("l3x1-" + "a" * 32, {})
        await first.drop_namespace("l3x1-" + "a" * 32)
        await first.drop_namespace("l3x1-" + "a" * 32)
        await first.close()
        second = self.make()
        assert await second.load_namespaces() == {DIGEST: {"a": 2, "ü": ["x"]}}
        assert await scanned(second) == [key_of()]
        assert (await read(second, run_of(key_of())))[0] == new_object(key_of()).body
        await second.close()

    async def test_a_reader_keeps_the_bytes_of_what_is_deleted_meanwhile(self, backend: Backend) -> None:
        """Reads, deletes and puts of other bytes under one key: a reader has one of them whole, or a miss."""
        bodies = [bytes(memoryview(new_object(key_of(), fill).body)) for fill in (1, 101)]
        stop = False

        async def churn() -> None:
            for turn in range(60):
                await backend.put([new_object(key_of(), (1, 101)[turn % 2])])
                await backend.delete([key_of()])
            nonlocal stop
            stop = True

        async def reader() -> int:
            seen = 0
            while not stop:
                try:
                    data, sums = await read(backend, run_of(key_of()))
                except MissError:
                    continue
                assert data in bodies
                assert sums.packed == sum_cells(data, CELL)
                seen += 1
            return seen

        churning = asyncio.create_task(churn())
        assert sum(await asyncio.gather(*(reader() for _ in range(4)))) > 0
        await churning

    async def test_it_says_what_is_free_and_that_it_can_be_written(self, backend: Backend) -> None:
        assert await backend.free_bytes() > 0
        await backend.probe()
