"""The store over a real folder: capacity, eviction, full disks, races, healing."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from l3store.backend import DiskBackend, NewObject, Sums
from l3store.errors import L3Error, MissError, NotReadyError, RetryError, StorageFullError, UnknownNamespaceError
from l3store.index import Order, Reader, Store
from l3store.index.runset import Need
from l3store.layout import Key, Range, parse_key
from tests.support import Pages, tiny

NAMESPACE = tiny("org/store", page_size=64)
"""A cell of 4 KiB, so an object of 3 takes 16 KiB of the disk with its trailer."""
OBJECT_DISK = 16 << 10


def pages_of(count: int, seed: str = "store") -> Pages:
    return Pages(NAMESPACE, seed, count)


def new(pages: Pages, page: int, first: int = 0, end: int = 3, group: int = 0) -> NewObject:
    body = pages.body(page, first, end, group)
    return NewObject(parse_key(pages.key(page, first, end, group)), body, Sums(pages.sums(body), by_writer=True))


async def content(reader: Reader, key: Key) -> bytes:
    """The bytes that a key names."""
    cells = await reader.read_object(key, verify=True)
    data = b"".join(cells.views)
    cells.release()
    return data


def whole(pages: Pages, page: int) -> list[NewObject]:
    return [new(pages, page, first, first + 3, group) for first in (0, 3) for group in (0, 1)]


def used(folder: Path) -> int:
    """What `du` counts of the objects and what is being written."""
    blocks: dict[int, int] = {}
    for part in ("objects", "tmp"):
        for path in (folder / part).rglob("*"):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            if path.is_file():
                # By inode: a file that is just becoming visible has two names.
                blocks[status.st_ino] = status.st_blocks
    return 512 * sum(blocks.values())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


async def started(folder: Path, capacity: int | None = None) -> Store:
    store = Store(DiskBackend(folder), capacity=capacity)
    await store.start()
    await store.register(NAMESPACE, None)
    return store


@pytest.fixture
async def store(folder: Path) -> AsyncIterator[Store]:
    made = await started(folder, 16 * OBJECT_DISK)
    yield made
    await made.close()


def stored(store: Store, pages: Pages) -> list[int]:
    """The pages that are whole."""
    entry = store.entry(NAMESPACE.digest)
    need = Need(NAMESPACE.layers, Range(0, NAMESPACE.num_groups))
    return [page for page, name in enumerate(pages.hashes) if store.index.runs(entry, name).serves(need)]


def match(store: Store, pages: Pages, order: list[int]) -> int:
    reader = Reader(store)
    return reader.match(reader.query(NAMESPACE.digest, [pages.hashes[page] for page in order], None, None))


async def check_exact(store: Store, folder: Path) -> None:
    """Index, totals and files agree."""
    keys = {str(key) for entry in store.index.namespaces() for key in store.index.keys(entry)}
    files = [path for path in (folder / "objects").rglob("*") if path.is_file()]
    assert {path.name for path in files} == keys
    assert store.index.total.objects == len(files)
    assert store.index.total.disk_bytes == sum(-(-path.stat().st_size // 4096) * 4096 for path in files)


async def test_whole_pages_are_evicted_the_least_recently_used_first(store: Store, folder: Path) -> None:
    pages = pages_of(6)
    for page in range(4):
        assert await store.put(whole(pages, page)) == [True] * 4
    assert match(store, pages, [0, 1]) == 2
    assert await store.put([new(pages, 4)]) == [True]
    # Page 2 was used longest ago, and went with all it had: a page set is evicted as one.
    assert store.counters.evicted_objects == 4
    assert stored(store, pages) == [0, 1, 3]
    await check_exact(store, folder)


async def test_the_tail_of_a_prefix_goes_before_its_head(store: Store) -> None:
    pages = pages_of(8)
    for page in range(4):
        await store.put(whole(pages, page))
    assert match(store, pages, [0, 1, 2, 3]) == 4
    for page in (4, 5):
        await store.put(whole(pages, page))
    assert stored(store, pages) == [0, 1, 4, 5]


async def test_asking_what_is_missing_refreshes_the_head_of_a_prefix_last(store: Store) -> None:
    pages = pages_of(8)
    for page in range(4):
        await store.put(whole(pages, page))
    reader = Reader(store)
    assert list(reader.missing(reader.query(NAMESPACE.digest, pages.hashes[:4], None, None))) == []
    await store.put(whole(pages, 4))
    assert stored(store, pages) == [0, 1, 2, 4]


async def test_what_a_batch_wrote_is_refreshed_in_the_order_of_its_prefix(store: Store) -> None:
    pages = pages_of(8)
    written = [made for page in range(4) for made in whole(pages, page)]
    assert await store.put(written) == [True] * 16
    store.refresh([made.key for made in written])
    await store.put(whole(pages, 4))
    assert stored(store, pages) == [0, 1, 2, 4]


async def test_what_can_never_fit_is_507_and_evicts_nothing(folder: Path) -> None:
    store = await started(folder, 3 * OBJECT_DISK)
    pages = pages_of(2)
    for made in whole(pages, 0)[:3]:
        assert await store.put([made]) == [True]
    results = await store.put(whole(pages, 1))
    assert [type(result) for result in results] == [StorageFullError] * 4
    assert store.index.total.objects == 3
    assert store.counters.evicted_objects == 0
    # What fits makes room.
    assert await store.put(whole(pages, 1)[:3]) == [True] * 3
    await check_exact(store, folder)
    await store.close()


@pytest.mark.parametrize("workers", [1, 12])
async def test_the_disk_never_holds_more_than_the_capacity(folder: Path, workers: int) -> None:
    """Measured after every write, while others write: blocks, as `du` counts them."""
    capacity = 24 * OBJECT_DISK
    store = await started(folder, capacity)
    pages = pages_of(60)
    most = 0

    async def write(worker: int) -> None:
        nonlocal most
        for page in range(worker, 60, workers):
            for made in whole(pages, page):
                await store.put([made])
                most = max(most, used(folder))

    await asyncio.gather(*(write(worker) for worker in range(workers)))
    assert capacity // 2 < most <= capacity
    assert store.index.total.disk_bytes <= capacity
    await check_exact(store, folder)
    await store.close()


async def test_a_smaller_capacity_trims_before_the_service_is_ready(folder: Path) -> None:
    store = await started(folder)
    pages = pages_of(8)
    for page in range(8):
        await store.put(whole(pages, page))
    await store.close()
    store = Store(DiskBackend(folder), capacity=12 * OBJECT_DISK)
    seen: list[int] = []
    real = store.backend.delete

    async def noting(keys: Any) -> int:
        with pytest.raises(NotReadyError):
            store.check_ready()
        seen.append(len(keys))
        return await real(keys)

    store.backend.delete = noting  # type: ignore[method-assign]
    await store.start()
    assert sum(seen) == 20
    assert used(folder) <= 12 * OBJECT_DISK
    assert len(stored(store, pages)) == 3
    await check_exact(store, folder)
    await store.close()


async def test_nothing_is_answered_before_the_start(folder: Path) -> None:
    store = Store(DiskBackend(folder), capacity=None)
    for call in (store.check_ready, store.registrations, lambda: store.entry(NAMESPACE.digest)):
        with pytest.raises(NotReadyError):
            call()
    with pytest.raises(NotReadyError):
        await store.register(NAMESPACE, None)
    with pytest.raises(NotReadyError):
        await store.check_health()
    await store.start()
    await store.check_health()
    assert 0 < store.capacity < 2**62
    await store.close()


def full_disk(monkeypatch: pytest.MonkeyPatch, folder: Path, room: int) -> None:
    """Writes fail as on a disk of so many bytes."""
    real = os.writev

    def writev(fd: int, buffers: Any) -> int:
        if used(folder) + sum(len(memoryview(b)) for b in buffers) > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, buffers)

    monkeypatch.setattr(os, "writev", writev)


async def test_a_disk_that_is_fuller_than_the_capacity_evicts_once_and_retries(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await started(folder, 1000 * OBJECT_DISK)
    pages = pages_of(12)
    full_disk(monkeypatch, folder, 9 * OBJECT_DISK)
    for page in range(12):
        assert await store.put(whole(pages, page)) == [True] * 4
    assert store.counters.evicted_objects > 0
    assert 11 in stored(store, pages)
    await check_exact(store, folder)
    # Filled from outside: nothing of ours can make room.
    full_disk(monkeypatch, folder, 0)
    results = await store.put(whole(pages, 0))
    assert all(isinstance(result, StorageFullError) for result in results)
    monkeypatch.undo()
    assert await store.put(whole(pages, 0)) == [True] * 4
    await check_exact(store, folder)
    await store.close()


async def test_a_disk_error_is_that_objects_error(store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = pages_of(1)
    real, calls = os.writev, 0

    def writev(fd: int, buffers: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers)

    monkeypatch.setattr(os, "writev", writev)
    results = await store.put(whole(pages, 0))
    assert [type(result) for result in results] == [bool, RetryError, bool, bool]
    assert store.counters.write_errors == 1
    await check_exact(store, folder)
    assert match(store, pages, [0]) == 0
    assert await store.put(whole(pages, 0)) == [False, True, False, False]
    assert match(store, pages, [0]) == 1


async def test_a_disk_that_cannot_be_read_is_503_and_loses_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = pages_of(1)
    made = new(pages, 0)
    await store.put([made])

    def preadv(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", preadv)
    reader = Reader(store)
    for call in (reader.read_object(made.key, verify=False), reader.read_sums(made.key), reader.suspect(made.key)):
        with pytest.raises(RetryError):
            await call
    monkeypatch.undo()
    assert await content(reader, made.key) == made.body


async def test_what_cannot_be_deleted_stays_known(store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = pages_of(1)
    await store.put(whole(pages, 0))
    real = os.unlink

    def unlink(path: Any, *more: Any, **named: Any) -> None:
        if "objects" in str(path):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        real(path, *more, **named)

    monkeypatch.setattr(os, "unlink", unlink)
    with pytest.raises(RetryError, match="could not be deleted"):
        await store.delete(new(pages, 0).key)
    monkeypatch.undo()
    await check_exact(store, folder)
    assert await store.delete(new(pages, 0).key)
    await check_exact(store, folder)


async def test_a_registration_that_cannot_be_stored_is_not_registered(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tiny("org/store-other")

    def fsync(_fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(RetryError):
        await store.register(other, None)
    with pytest.raises(UnknownNamespaceError):
        store.entry(other.digest)
    monkeypatch.undo()
    assert (await store.register(other, None))[0] is True


@pytest.mark.parametrize("seed", range(4))
async def test_writes_and_deletes_of_the_same_keys_at_once_leave_no_trace(
    store: Store, folder: Path, seed: int
) -> None:
    """Puts, deletes, evictions and drops in any order: the index is what is on the disk, and reads are whole."""
    pages = pages_of(3)
    others = pages_of(8, "others")
    reader = Reader(store)
    rng = random.Random(seed)
    news = [made for page in range(3) for made in whole(pages, page)]

    async def worker(_: int) -> None:
        for _ in range(60):
            made = rng.choice(news)
            act = rng.random()
            try:
                if act < 0.45:
                    results = await store.put([made] if act < 0.3 else rng.sample(news, 5))
                    assert not any(isinstance(r, RetryError) for r in results if not isinstance(r, StorageFullError))
                elif act < 0.6:
                    await store.delete(made.key)
                elif act < 0.7:
                    await store.put(whole(others, rng.randrange(8)))
                elif act < 0.71:
                    await store.drop(NAMESPACE.digest)
                    await store.register(NAMESPACE, None)
                else:
                    assert await content(reader, made.key) == made.body
            except (MissError, UnknownNamespaceError):
                continue

    await asyncio.gather(*(worker(i) for i in range(16)))
    await check_exact(store, folder)
    assert store._reserved == 0
    assert len(store._departures) == 0
    for made in news:
        if store.has(made.key):
            assert await content(reader, made.key) == made.body
    assert store.counters.lost_objects == 0


async def test_a_put_that_meets_a_delete_is_stored_or_told(store: Store, folder: Path) -> None:
    made = new(pages_of(1), 0)
    for _ in range(100):
        results = await asyncio.gather(store.put([made]), store.delete(made.key), store.put([made]))
        assert isinstance(results[0][0], bool)
        await check_exact(store, folder)


async def test_a_namespace_that_is_dropped_under_a_write_leaves_nothing(store: Store, folder: Path) -> None:
    pages = pages_of(4)
    putting = [asyncio.create_task(store.put(whole(pages, page))) for page in range(4)]
    await asyncio.sleep(0)
    await store.drop(NAMESPACE.digest)
    outcomes = [result for results in await asyncio.gather(*putting) for result in results]
    assert all(result is True or isinstance(result, UnknownNamespaceError) for result in outcomes)
    assert [path for path in (folder / "objects").rglob("*") if path.is_file()] == []
    await check_exact(store, folder)


async def test_one_rotten_object_shrinks_what_every_reader_matches(store: Store) -> None:
    pages = pages_of(3)
    for page in range(3):
        await store.put(whole(pages, page))
    rotten = new(pages, 1, 3, 6, 1).key
    backend = store.backend
    assert isinstance(backend, DiskBackend)
    data = bytearray(backend.path(rotten).read_bytes())
    data[5] ^= 1
    backend.path(rotten).write_bytes(data)
    reader = Reader(store)
    query = reader.query(NAMESPACE.digest, pages.hashes, None, None)
    for order in Order:
        found = await reader.read_pages(query, order, verify=True)
        got = b"".join([b"".join(cells.views) async for cells in found])
        found.close()
        assert (found.pages, got) == (1, pages.read(slice(0, 1), slice(None), slice(None), order))
    assert reader.match(query) == 1
    assert store.counters.corrupt_objects == 1


async def test_a_page_that_rots_behind_the_first_chunk_ends_the_answer_with_an_error(folder: Path) -> None:
    store = await started(folder)
    pages = pages_of(200)
    for page in range(200):
        await store.put(whole(pages, page))
    backend = store.backend
    assert isinstance(backend, DiskBackend)
    path = backend.path(new(pages, 190).key)
    path.write_bytes(path.read_bytes()[:-1])
    reader = Reader(store)
    query = reader.query(NAMESPACE.digest, pages.hashes, None, None)
    found = await reader.read_pages(query, Order.PAGE, verify=False)
    assert found.pages == 200
    got = bytearray()

    async def take() -> None:
        async for cells in found:
            got.extend(b"".join(cells.views))

    with pytest.raises(MissError):
        await take()
    expected = pages.read(slice(None), slice(None), slice(None), "page")
    assert len(got) >= 4 << 20
    assert got == expected[: len(got)]
    assert reader.match(query) == 190
    await store.close()


async def test_keys_of_other_models_in_the_folder_are_passed_over(folder: Path) -> None:
    store = await started(folder)
    pages = pages_of(1)
    await store.put(whole(pages, 0))
    backend = store.backend
    assert isinstance(backend, DiskBackend)
    for coordinate in ("L0-7_H0", "L0-3_H2", "L0-3"):
        stray = f"{pages.hashes[0]}_{NAMESPACE.digest}_{coordinate}"
        (backend.path(parse_key(stray))).write_bytes(b"x")
    await store.close()
    store = await started(folder)
    assert store.index.total.objects == 4
    assert stored(store, pages) == [0]
    await store.close()


async def test_a_start_finds_all_that_is_stored_whatever_its_cut(folder: Path) -> None:
    """Pages in part, off the grid, of several namespaces; one of them registers again only after the start."""
    other = tiny("org/store-lost", page_size=64)
    rng = random.Random(5)
    store = await started(folder)
    await store.register(other, None)
    written: dict[Key, object] = {}
    for namespace in (NAMESPACE, other):
        pages = Pages(namespace, "found", 60)
        for page in range(60):
            cuts = [(0, 3, 0), (3, 6, 0), (0, 3, 1), (3, 6, 1)] if page % 3 else [(0, 2, 0), (1, 6, rng.randrange(2))]
            for made in (new(pages, page, *cut) for cut in cuts[: rng.randint(1, 4)]):
                assert await store.put([made]) == [True]
                written[made.key] = made.body
    before = store.index.total
    await store.close()
    (folder / "namespaces" / f"{other.digest}.json").unlink()
    store = await started(folder)
    assert {key for key in written if key.digest == NAMESPACE.digest} == set(
        store.index.keys(store.entry(NAMESPACE.digest))
    )
    with pytest.raises(UnknownNamespaceError):
        store.entry(other.digest)
    await store.register(other, None)
    assert {key for entry in store.index.namespaces() for key in store.index.keys(entry)} == written.keys()
    assert store.index.total == before
    reader = Reader(store)
    for key in rng.sample(list(written), 40):
        assert await content(reader, key) == written[key]
    await check_exact(store, folder)
    await store.close()


async def test_heal_counts_what_was_lost(store: Store) -> None:
    made = new(pages_of(1), 0)
    await store.put([made])
    backend = store.backend
    assert isinstance(backend, DiskBackend)
    backend.path(made.key).unlink()
    with pytest.raises(MissError):
        await Reader(store).read_object(made.key, verify=False)
    assert (store.counters.lost_objects, store.counters.corrupt_objects) == (1, 0)
    assert not store.has(made.key)


async def test_errors_say_the_key(store: Store) -> None:
    key = Key("0" * 64, NAMESPACE.digest, parse_key(f"{'0' * 64}_{NAMESPACE.digest}_L0-3_H0").coordinate)
    with pytest.raises(L3Error, match=str(key)):
        await Reader(store).read_object(key, verify=False)


async def test_what_was_loaded_is_no_work_for_later_collections(store: Store) -> None:
    assert gc.get_freeze_count() > 0
