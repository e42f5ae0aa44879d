"""The disk passes the suite, and keeps what it says of its files."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from l3store.backend import Ack, DiskBackend, naming
from l3store.backend.file import footprint, overhead
from l3store.backend.naming import name_file
from l3store.errors import CorruptError, MissError, StorageFullError
from tests.conformance.backend_suite import CELL, DIGEST, BackendSuite, key_of, new_object, read, run_of, scanned


class TestDiskAckFile(BackendSuite):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "data"

    def make(self) -> DiskBackend:
        return DiskBackend(self.folder, ack=Ack.FILE)


class TestDiskAckFsync(BackendSuite):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "data"

    def make(self) -> DiskBackend:
        return DiskBackend(self.folder, ack=Ack.FSYNC)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskBackend]:
    made = DiskBackend(tmp_path / "data")
    yield made
    asyncio.run(made.close())


def partials(data: Path) -> list[str]:
    """Files of writes that are not visible."""
    return names(data / "tmp") + [name for name in names(data / "objects") if name.endswith(".partial")]


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


async def test_objects_fan_out_by_the_first_byte_of_the_page_hash(tmp_path: Path, disk: DiskBackend) -> None:
    objects = tmp_path / "data" / "objects"
    assert sorted(path.name for path in objects.iterdir()) == [f"{byte:02x}" for byte in range(256)]
    keys = [key_of(page) for page in range(8)]
    await disk.put([new_object(key) for key in keys])
    assert names(objects) == sorted(f"{key.page_hash[:2]}/{key}" for key in keys)


async def test_a_file_is_cells_sums_and_a_footer(tmp_path: Path, disk: DiskBackend) -> None:
    new = new_object(key_of(), by_writer=True)
    await disk.put([new])
    data = disk.path(new.key).read_bytes()
    assert data == bytes(memoryview(new.body)) + new.sums.packed + b"L3C1\x01\0\0\0"
    assert len(data) == 4 * CELL + overhead(4)
    assert footprint(4, CELL) == 4096
    assert footprint(4, 1020) == 8192


@pytest.mark.parametrize("length", [0, 1, CELL, 4 * CELL, 4 * CELL + overhead(4) - 1])
async def test_a_torn_file_is_corrupt(disk: DiskBackend, length: int) -> None:
    await disk.put([new_object(key_of())])
    with disk.path(key_of()).open("r+b") as file:
        file.truncate(length)
    for call in (read(disk, run_of(key_of(), 0, 1)), disk.read_sums([run_of(key_of())])):
        with pytest.raises(CorruptError) as caught:
            await call
        assert caught.value.members["key"] == str(key_of())


@pytest.mark.parametrize("footer", [b"\0" * 8, b"L3C2\0\0\0\0", b"L3C1\2\0\0\0", b"PK\3\4\0\0\0\0"])
async def test_a_foreign_footer_is_corrupt(disk: DiskBackend, footer: bytes) -> None:
    await disk.put([new_object(key_of())])
    data = disk.path(key_of()).read_bytes()
    disk.path(key_of()).write_bytes(data[:-8] + footer)
    with pytest.raises(CorruptError):
        await read(disk, run_of(key_of()))


async def test_the_quarantine_keeps_the_file(tmp_path: Path, disk: DiskBackend) -> None:
    await disk.put([new_object(key_of())])
    data = disk.path(key_of()).read_bytes()
    await disk.quarantine(key_of())
    [kept] = (tmp_path / "data" / "quarantine").iterdir()
    assert kept.name.startswith(str(key_of()))
    assert kept.read_bytes() == data


async def test_a_scan_sweeps_the_leftovers_of_a_crash_and_reads_names_alone(tmp_path: Path, disk: DiskBackend) -> None:
    data = tmp_path / "data"
    await disk.put([new_object(key_of(0)), new_object(key_of(1))])
    (data / "tmp" / "17").write_bytes(b"half a registration")
    (disk.path(key_of(0)).parent / "17.partial").write_bytes(b"half an obj")
    (data / "objects" / "18.partial").write_bytes(b"l3st")
    (data / "objects" / "ab" / "stray").write_bytes(b"x")
    (data / "objects" / "ab" / ("ab" * 40)).write_bytes(b"x")
    (disk.path(key_of(0)).parent / "README").write_bytes(b"x")
    (data / "objects" / "lost+found").mkdir()
    disk.path(key_of(1)).write_bytes(b"")
    assert await scanned(disk) == sorted([key_of(0), key_of(1)])
    assert partials(data) == []
    assert (data / "objects" / "ab" / "stray").exists()


async def test_a_folder_has_one_owner(tmp_path: Path, disk: DiskBackend) -> None:
    with pytest.raises(BlockingIOError, match="in use by another l3store"):
        DiskBackend(tmp_path / "data")
    assert await disk.put([new_object(key_of())]) == [True]


@pytest.mark.parametrize("call", ["os.open", "os.writev", "l3store.backend.disk.name_file"])
@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, StorageFullError), (errno.EDQUOT, StorageFullError), (errno.EIO, OSError)]
)
async def test_a_failed_write_is_that_objects_error_and_leaves_nothing(
    tmp_path: Path, disk: DiskBackend, monkeypatch: pytest.MonkeyPatch, call: str, number: int, kind: type[Exception]
) -> None:
    """The second of three writes fails."""
    await disk.put([new_object(key_of(9, group=g)) for g in range(1)])
    patched: dict[str, Callable[..., Any]] = {"os.open": os.open, "os.writev": os.writev}
    real = patched.get(call, name_file)
    calls = 0

    def failing(*args: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(number, os.strerror(number))
        return real(*args, **more)

    # All in one folder that is there already, so that each object is one call.
    keys = [key_of(9, group=g) for g in (1, 2, 3)]
    monkeypatch.setattr(call, failing)
    results = await disk.put([new_object(key) for key in keys])
    monkeypatch.undo()
    assert (results[0], results[2]) == (True, True)
    assert isinstance(results[1], kind)
    assert partials(tmp_path / "data") == []
    assert sorted(await scanned(disk)) == sorted([key_of(9, group=0), keys[0], keys[2]])
    assert await disk.put([new_object(keys[1])]) == [True]


async def test_a_short_write_goes_on_where_it_stopped(disk: DiskBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.writev

    def short(fd: int, buffers: Any) -> int:
        return real(fd, [memoryview(buffers[0])[:37]])

    monkeypatch.setattr(os, "writev", short)
    new = new_object(key_of())
    assert await disk.put([new]) == [True]
    monkeypatch.undo()
    assert await read(disk, run_of(key_of())) == (new.body, new.sums)


async def test_a_short_read_goes_on_where_it_stopped(disk: DiskBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    new = new_object(key_of())
    await disk.put([new])
    real = os.preadv

    def short(fd: int, buffers: Any, offset: int) -> int:
        return real(fd, [memoryview(buffers[0])[:37]], offset)

    monkeypatch.setattr(os, "preadv", short)
    assert await read(disk, run_of(key_of())) == (new.body, new.sums)


async def test_a_disk_error_while_reading_is_no_miss(disk: DiskBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    await disk.put([new_object(key_of())])

    def failing(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(OSError, match="Input/output error") as caught:
        await read(disk, run_of(key_of()))
    assert not isinstance(caught.value, MissError)


async def test_a_delete_that_fails_for_one_deletes_the_others(
    disk: DiskBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    await disk.put([new_object(key_of(page)) for page in range(3)])
    real = os.unlink

    def failing(path: Any, *more: Any, **named: Any) -> None:
        if str(key_of(1)) in str(path):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        real(path, *more, **named)

    monkeypatch.setattr(os, "unlink", failing)
    with pytest.raises(OSError, match="Read-only"):
        await disk.delete([key_of(page) for page in range(3)])
    assert await scanned(disk) == [key_of(1)]


async def test_a_registration_that_cannot_be_stored_leaves_the_one_before(
    tmp_path: Path, disk: DiskBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    await disk.save_namespace(DIGEST, {"a": 1})

    def failing(_fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(StorageFullError):
        await disk.save_namespace(DIGEST, {"a": 2})
    monkeypatch.undo()
    assert await disk.load_namespaces() == {DIGEST: {"a": 1}}
    assert partials(tmp_path / "data") == []


async def test_a_registration_that_is_not_json_is_passed_over(tmp_path: Path, disk: DiskBackend) -> None:
    await disk.save_namespace(DIGEST, {"a": 1})
    (tmp_path / "data" / "namespaces" / "x.json").write_bytes(b"\0\0")
    assert await disk.load_namespaces() == {DIGEST: {"a": 1}}


async def test_fsync_is_called_where_it_is_asked_for_and_only_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def noting(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", noting)
    for ack in (Ack.FILE, Ack.FSYNC):
        backend = DiskBackend(tmp_path / ack, ack=ack)
        await backend.put([new_object(key_of())])
        folder = backend.path(key_of()).parent
        await backend.close()
        if ack is Ack.FILE:
            assert synced == []
    # The folders that were made at start, then the file, and last the folder in which it got its name.
    assert synced[:-2] == [str(folder.parent), str(folder.parent.parent)]
    assert synced[-2].startswith(f"{folder}/")
    assert synced[-2].endswith(".partial")
    assert synced[-1] == str(folder)


async def test_a_writer_who_comes_second_syncs_the_folder_before_it_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = DiskBackend(tmp_path / "data", ack=Ack.FSYNC)
    await backend.put([new_object(key_of())])
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    assert await backend.put([new_object(key_of())]) == [False]
    assert synced[-1] == str(backend.path(key_of()).parent)
    await backend.close()


@pytest.mark.parametrize("number", [None, errno.EINVAL, errno.ENOSYS])
async def test_a_file_system_without_a_rename_that_spares_what_is_there(
    tmp_path: Path, disk: DiskBackend, monkeypatch: pytest.MonkeyPatch, number: int | None
) -> None:
    """Then it is linked, and all is the same."""

    def unknown(*_: object) -> int:
        ctypes.set_errno(number or 0)
        return -1

    monkeypatch.setattr(naming, "_renameat2", None if number is None else unknown)
    first, second = new_object(key_of(), 1), new_object(key_of(), 2)
    assert await disk.put([first, second, new_object(key_of(1))]) == [True, False, True]
    assert (await read(disk, run_of(key_of())))[0] == first.body
    assert partials(tmp_path / "data") == []
    assert disk.path(key_of()).stat().st_nlink == 1


async def test_a_folder_that_somebody_tidied_away_is_made_again(disk: DiskBackend) -> None:
    disk.path(key_of()).parent.rmdir()
    assert await disk.put([new_object(key_of())]) == [True]
    assert await scanned(disk) == [key_of()]


async def test_objects_of_the_former_two_levels_of_folders_move_up(tmp_path: Path) -> None:
    """Also those that were stored anew meanwhile, of which the file in its place stays."""
    first = DiskBackend(tmp_path / "data")
    news = [new_object(key_of(page, group=group), 10 * page + group) for page in range(30) for group in (0, 1)]
    await first.put(news)
    for new in news:
        path = first.path(new.key)
        old = path.parent / new.key.page_hash[2:4]
        old.mkdir(exist_ok=True)
        path.rename(old / path.name)
        (old / "3.partial").write_bytes(b"half an object")
    stranger = first.path(key_of(0)).parent / key_of(0).page_hash[2:4] / "README"
    stranger.write_bytes(b"x")
    again = new_object(key_of(1, group=1), 200)
    assert await first.put([again]) == [True]
    await first.close()
    second = DiskBackend(tmp_path / "data")
    for _ in range(2):
        assert await scanned(second) == sorted(new.key for new in news)
    for new in news:
        expected = again if new.key == again.key else new
        assert await read(second, run_of(new.key)) == (expected.body, expected.sums)
    assert partials(tmp_path / "data") == []
    kept = [path.name for path in (tmp_path / "data" / "objects").glob("*/*") if path.is_dir()]
    assert kept == [stranger.parent.name]
    assert stranger.exists()
    await second.close()


async def test_a_file_in_the_wrong_folder_is_nobodys(disk: DiskBackend) -> None:
    await disk.put([new_object(key_of(page)) for page in range(3)])
    wrong = disk.path(key_of(0)).parent / str(key_of(1))
    disk.path(key_of(1)).rename(wrong)
    assert await scanned(disk) == sorted([key_of(0), key_of(2)])
    assert wrong.exists()
