"""Files that stay open between reads: few enough, and never those of what is gone."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from l3store.backend import DiskBackend, NewObject, Sums
from l3store.backend.descriptors import Descriptors
from l3store.errors import CorruptError, MissError
from l3store.index import Order, Reader, Store
from l3store.layout import Key, parse_key
from tests.conformance.backend_suite import CELL, key_of, new_object, read, run_of
from tests.support import Pages, tiny

LIMIT = 8


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskBackend]:
    made = DiskBackend(tmp_path / "data", descriptors=LIMIT)
    yield made
    asyncio.run(made.close())
    assert open_files(tmp_path / "data" / "objects") == []


class Calls:
    """Counts the calls of a function of ``os``, those for files of objects."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.count = 0
        real = getattr(os, name)

        def counting(*args: Any, **more: Any) -> Any:
            self.count += 1
            return real(*args, **more)

        monkeypatch.setattr(os, name, counting)


def open_files(objects: Path) -> list[str]:
    """What this process has open there; what is deleted says so."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue
        if target.startswith((str(objects), str(objects.parent / "quarantine"))):
            found.append(target)
    return sorted(found)


async def test_an_object_is_opened_once_for_many_reads(disk: DiskBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    new = new_object(key_of())
    await disk.put([new])
    opened, got = Calls(monkeypatch, "open"), Calls(monkeypatch, "preadv")
    for layer in range(4):
        data, sums = await read(disk, run_of(new.key, layer, 1))
        assert data == memoryview(new.body)[layer * CELL : (layer + 1) * CELL]
        assert sums.packed == new.sums.packed[8 * layer : 8 * layer + 8]
        assert await disk.read_sums([run_of(new.key, layer, 1)]) == sums
    assert opened.count == 1
    # The cells of each read; the sums once for all.
    assert got.count == 5


async def test_runs_of_one_object_are_read_together_wherever_they_stand_in_a_batch(
    disk: DiskBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    news = [new_object(key_of(page, 0, 6), 20 * page) for page in range(12)]
    await disk.put(news)
    opened, got = Calls(monkeypatch, "open"), Calls(monkeypatch, "preadv")
    runs = [run_of(new.key, layer, 1) for layer in (0, 1, 2, 5, 4) for new in news]
    data, sums = await read(disk, *runs)
    bodies = {new.key: memoryview(new.body) for new in news}
    assert data == b"".join(bodies[run.key][run.first * CELL : (run.first + 1) * CELL] for run in runs)
    packed = {new.key: new.sums.packed for new in news}
    assert sums.packed == b"".join(packed[run.key][8 * run.first : 8 * run.first + 8] for run in runs)
    assert await disk.read_sums(runs) == sums
    assert opened.count <= 2 * len(news)
    # Layers 0 to 2, layer 5, layer 4, and the trailer: once with the cells, once more for the sums alone.
    assert got.count <= 5 * len(news)


async def test_a_batch_may_have_more_runs_than_one_call_takes(disk: DiskBackend) -> None:
    new = new_object(key_of(0, 0, 2500))
    await disk.put([new])
    data, sums = await read(disk, *(run_of(new.key, layer, 1) for layer in range(2500)))
    assert (data, sums) == (new.body, new.sums)


async def test_no_more_than_the_limit_stay_open(tmp_path: Path, disk: DiskBackend) -> None:
    news = [new_object(key_of(page), page) for page in range(5 * LIMIT)]
    await disk.put(news)
    for new in random.Random(0).choices(news, k=200):
        assert (await read(disk, run_of(new.key)))[0] == new.body
        assert len(open_files(tmp_path / "data" / "objects")) <= LIMIT
    await asyncio.gather(*(read(disk, run_of(new.key)) for new in news for _ in range(3)))
    assert len(open_files(tmp_path / "data" / "objects")) == LIMIT


@pytest.mark.parametrize("act", ["delete", "quarantine"])
async def test_what_is_gone_is_closed_and_what_comes_after_it_is_read(
    tmp_path: Path, disk: DiskBackend, act: str
) -> None:
    for turn in range(3):
        new = new_object(key_of(), 40 * turn)
        assert await disk.put([new]) == [True]
        assert (await read(disk, run_of(key_of())))[0] == new.body
        assert len(open_files(tmp_path / "data" / "objects")) == 1
        await (disk.delete([key_of()]) if act == "delete" else disk.quarantine(key_of()))
        assert open_files(tmp_path / "data" / "objects") == []
        for call in (read(disk, run_of(key_of())), disk.read_sums([run_of(key_of())])):
            with pytest.raises(MissError):
                await call


async def test_what_is_torn_while_it_is_open_is_corrupt(disk: DiskBackend) -> None:
    await disk.put([new_object(key_of())])
    await read(disk, run_of(key_of()))
    os.truncate(disk.path(key_of()), 2 * CELL)
    with pytest.raises(CorruptError):
        await read(disk, run_of(key_of()))
    await disk.quarantine(key_of())
    again = new_object(key_of(), 7)
    assert await disk.put([again]) == [True]
    assert await read(disk, run_of(key_of())) == (again.body, again.sums)


async def test_what_cannot_be_deleted_is_still_read(disk: DiskBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    new = new_object(key_of())
    await disk.put([new])
    await read(disk, run_of(key_of()))

    def failing(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "unlink", failing)
    with pytest.raises(OSError, match="Read-only"):
        await disk.delete([key_of()])
    monkeypatch.undo()
    assert (await read(disk, run_of(key_of())))[0] == new.body


class Files:
    """Small files under keys, and descriptors over them."""

    def __init__(self, folder: Path, limit: int = LIMIT) -> None:
        self.folder = folder
        self.kept = Descriptors(self.place, limit=limit)

    def place(self, key: Key) -> str:
        return str(self.folder / str(key))

    def write(self, key: Key, content: bytes) -> None:
        Path(self.place(key)).write_bytes(content)

    def replace(self, key: Key, content: bytes) -> None:
        with self.kept.leaving([key]):
            os.unlink(self.place(key))
        self.write(key, content)

    def read(self, key: Key) -> bytes:
        opened = self.kept.acquire(key)
        try:
            return os.pread(opened.fd, 100, 0)
        finally:
            self.kept.release(opened)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    (tmp_path / "objects").mkdir()
    made = Files(tmp_path / "objects")
    yield made
    made.kept.close()
    assert open_files(tmp_path / "objects") == []


def test_a_reader_keeps_what_it_has_and_the_next_gets_what_came_after(files: Files) -> None:
    files.write(key_of(), b"old")
    before = files.kept.acquire(key_of())
    files.replace(key_of(), b"new")
    assert files.read(key_of()) == b"new"
    assert os.pread(before.fd, 100, 0) == b"old"
    files.kept.release(before)
    assert files.read(key_of()) == b"new"


def test_who_opened_a_file_before_it_was_deleted_does_not_keep_it_for_others(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deletion, and a new file, come between the opening and the keeping."""
    files.write(key_of(), b"old")
    real = os.open

    def slow(*args: Any, **more: Any) -> int:
        monkeypatch.undo()
        fd = real(*args, **more)
        files.replace(key_of(), b"new")
        return fd

    monkeypatch.setattr(os, "open", slow)
    assert files.read(key_of()) == b"old"
    assert files.read(key_of()) == b"new"


def test_nothing_is_kept_of_what_is_leaving(files: Files) -> None:
    files.write(key_of(0), b"old")
    files.write(key_of(1), b"other")
    with files.kept.leaving([key_of(0)]):
        assert files.read(key_of(0)) == b"old"
        assert files.read(key_of(1)) == b"other"
        assert open_files(files.folder) == [files.place(key_of(1))]
        os.unlink(files.place(key_of(0)))
        files.write(key_of(0), b"new")
        assert files.read(key_of(0)) == b"new"
    assert files.read(key_of(0)) == b"new"


def test_where_no_descriptor_is_left_ours_are_given_up(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    for page in range(3):
        files.write(key_of(page), b"%d" % page)
    assert [files.read(key_of(page)) for page in (0, 1)] == [b"0", b"1"]
    real = os.open

    def exhausted(path: Any, *args: Any, **more: Any) -> int:
        if open_files(files.folder):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path, *args, **more)

    monkeypatch.setattr(os, "open", exhausted)
    assert files.read(key_of(2)) == b"2"
    assert open_files(files.folder) == [files.place(key_of(2))]


@pytest.mark.parametrize("limit", [0, 2, 100])
def test_many_threads_read_what_others_replace(tmp_path: Path, limit: int) -> None:
    """A reader never gets what was replaced before it began."""
    (tmp_path / "objects").mkdir()
    files = Files(tmp_path / "objects", limit)
    keys = [key_of(page) for page in range(4)]
    done = dict.fromkeys(keys, 0)
    for key in keys:
        files.write(key, b"0")
    stop = threading.Event()
    wrong: list[str] = []
    seen = 0

    def replace(key: Key) -> None:
        for turn in range(1, 150):
            with files.kept.leaving([key]):
                # In one step, so that there is always one to be read.
                Path(f"{files.place(key)}.new").write_bytes(b"%d" % turn)
                os.rename(f"{files.place(key)}.new", files.place(key))
            done[key] = turn

    def reading(seed: int) -> None:
        nonlocal seen
        rng = random.Random(seed)
        while not stop.is_set():
            key = rng.choice(keys)
            least = done[key]
            if int(files.read(key)) < least:
                wrong.append(str(key))
            seen += 1

    readers = [threading.Thread(target=reading, args=(seed,)) for seed in range(4)]
    writers = [threading.Thread(target=replace, args=(key,)) for key in keys]
    for thread in [*readers, *writers]:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    for thread in readers:
        thread.join()
    assert wrong == []
    assert seen > 0
    assert len(open_files(files.folder)) <= limit
    files.kept.close()
    assert open_files(files.folder) == []


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("order", list(Order))
async def test_many_pages_of_many_objects_need_few_descriptors(
    tmp_path: Path, few_descriptors: None, order: Order
) -> None:
    namespace = tiny("org/wide", layers=16, page_size=64, partition=4)
    pages = Pages(namespace, "wide", 128)
    store = Store(DiskBackend(tmp_path / "data"), capacity=None)
    await store.start()
    await store.register(namespace, None)
    coordinates = [(first, first + 4, group) for first in range(0, 16, 4) for group in (0, 1)]
    for page in range(128):
        news = []
        for first, end, group in coordinates:
            body = pages.body(page, first, end, group)
            news.append(NewObject(parse_key(pages.key(page, first, end, group)), body, Sums(pages.sums(body), True)))
        assert await store.put(news) == [True] * 8
    reader = Reader(store)
    found = await reader.read_pages(reader.query(namespace.digest, pages.hashes, None, None), order, verify=True)
    got = b"".join([b"".join(cells.views) async for cells in found])
    found.close()
    assert found.pages == 128
    assert got == pages.read(slice(None), slice(None), slice(None), order)
    assert len(open_files(tmp_path / "data" / "objects")) <= 75
    await store.close()
