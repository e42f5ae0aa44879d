"""Objects on a local file system.

    DATA_DIR/objects/{first hash byte}/{second hash byte}/{key}     never more than 65,536 folders
    DATA_DIR/namespaces/{digest}.json
    DATA_DIR/objects/.../{number}.partial                           a write that is not visible yet; swept at start
    DATA_DIR/tmp/                                                   the same of registrations
    DATA_DIR/quarantine/                                            what failed its sums

A file is written beside its place and linked to its name: it is there whole or not at all, and the first writer wins.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import itertools
import json
import logging
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import aiofiles

from l3store.backend import file
from l3store.backend.protocol import Ack, CellRun, NewObject, Sums
from l3store.errors import MissError, StorageFullError
from l3store.layout import InvalidKeyError, Key, parse_key

_T = TypeVar("_T")
_PARTIAL = ".partial"
_FULL = {errno.ENOSPC, errno.EDQUOT}

_log = logging.getLogger("l3store.backend")


class DiskBackend:
    """See the module. ``threads`` bounds the file operations in flight; one process owns a data folder."""

    def __init__(self, data_dir: Path, *, ack: Ack = Ack.FILE, threads: int = 8) -> None:
        self._root = data_dir
        self._objects = data_dir / "objects"
        self._tmp = data_dir / "tmp"
        self._quarantine = data_dir / "quarantine"
        self._namespaces = data_dir / "namespaces"
        self._ack = ack
        self._serial = itertools.count()
        for folder in (self._objects, self._tmp, self._quarantine, self._namespaces):
            folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(data_dir)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="l3store-disk")

    async def load_namespaces(self) -> dict[str, dict[str, Any]]:
        registrations = {}
        for path in sorted(self._namespaces.glob("*.json")):
            async with aiofiles.open(path, encoding="utf-8") as document:
                try:
                    registrations[path.stem] = json.loads(await document.read())
                except ValueError as error:
                    # As good as lost: a client that registers again brings it, and its objects, back.
                    _log.error("%s is not JSON: %s", path, error)
        return registrations

    async def save_namespace(self, digest: str, registration: Mapping[str, Any]) -> None:
        partial = self._tmp / f"{digest}.{next(self._serial)}"
        try:
            async with aiofiles.open(partial, "w", encoding="utf-8") as document:
                await document.write(json.dumps(registration, indent=1))
                await document.flush()
                # A lost registration makes all of its objects unreadable, so it is always safe before it is answered.
                await self._run(os.fsync, document.fileno())
            await self._run(os.replace, partial, self._namespaces / f"{digest}.json")
            await self._run(_fsync_folder, self._namespaces)
        except OSError as error:
            raise _named(error, f"the registration of {digest}") from error
        finally:
            await self._run(_unlink, partial)

    async def drop_namespace(self, digest: str) -> None:
        await self._run((self._namespaces / f"{digest}.json").unlink, True)

    async def scan(self) -> AsyncIterator[list[Key]]:
        await self._run(self._sweep)
        for first in range(256):
            yield await self._run(self._scan_partition, self._objects / f"{first:02x}")

    async def put(self, objects: Sequence[NewObject]) -> list[bool | Exception]:
        return await self._run(self._put, objects)

    async def read(self, runs: Sequence[CellRun], into: memoryview) -> Sums:
        return await self._run(self._read, runs, into)

    async def read_sums(self, runs: Sequence[CellRun]) -> Sums:
        return await self._run(self._read_sums, runs)

    async def delete(self, keys: Sequence[Key]) -> int:
        return await self._run(self._delete, keys)

    async def quarantine(self, key: Key) -> None:
        target = self._quarantine / f"{key}.{next(self._serial)}"
        await self._run(_rename_if_there, self.path(key), target)

    async def free_bytes(self) -> int:
        return (await self._run(shutil.disk_usage, self._root)).free

    async def probe(self) -> None:
        await self._run(self._probe)

    async def close(self) -> None:
        # Pending operations are short; the folder must not be handed on before the last of them ended.
        await asyncio.to_thread(self._pool.shutdown)
        os.close(self._lock)

    def path(self, key: Key) -> Path:
        """Where an object's file is, or would be."""
        return Path(self._place(key))

    def _place(self, key: Key) -> str:
        return f"{self._objects}/{key.page_hash[:2]}/{key.page_hash[2:4]}/{key}"

    async def _run(self, call: Callable[..., _T], *args: object) -> _T:
        running = asyncio.get_running_loop().run_in_executor(self._pool, call, *args)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            # The thread works in the caller's memory, which must not be used for anything else before it is done.
            await asyncio.wait([running])
            raise

    def _sweep(self) -> None:
        for leftover in [*_listed(self._tmp), *(path for path in _listed(self._objects) if path.endswith(_PARTIAL))]:
            os.unlink(leftover)

    def _scan_partition(self, partition: Path) -> list[Key]:
        keys = []
        for folder in _listed(partition):
            for path in _listed(folder):
                if path.endswith(_PARTIAL):
                    os.unlink(path)
                elif key := _read_key(path):
                    keys.append(key)
        return keys

    def _put(self, objects: Sequence[NewObject]) -> list[bool | Exception]:
        return [self._put_one(new) for new in objects]

    def _put_one(self, new: NewObject) -> bool | Exception:
        path = self._place(new.key)
        # Beside its place: ext4 takes much longer for a new file where many were made than where few are.
        folder = path.rpartition("/")[0]
        partial = f"{folder}/{next(self._serial)}{_PARTIAL}"
        try:
            fd = self._create(folder, partial)
            try:
                file.write_object(fd, new)
                if self._ack is Ack.FSYNC:
                    os.fsync(fd)
            finally:
                os.close(fd)
            return self._link(folder, partial, path)
        except OSError as error:
            return _named(error, str(new.key))
        finally:
            # Where it could not be made it cannot be removed either; what is left behind is swept at the next start.
            with contextlib.suppress(OSError):
                _unlink(partial)

    def _create(self, folder: str, partial: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(partial, flags, 0o644)
        except FileNotFoundError:
            # These two levels and no more: where the data folder is gone, another must not be begun in its place.
            for level in (os.path.dirname(folder), folder):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(level)
            if self._ack is Ack.FSYNC:
                _fsync_folder(os.path.dirname(folder))
                _fsync_folder(self._objects)
            return os.open(partial, flags, 0o644)

    def _link(self, folder: str, partial: str, path: str) -> bool:
        try:
            os.link(partial, path)
        except FileExistsError:
            created = False
        else:
            created = True
        if self._ack is Ack.FSYNC:
            # Also where another writer was first: it may not have come to this yet, and we are about to acknowledge.
            _fsync_folder(folder)
        return created

    def _read(self, runs: Sequence[CellRun], into: memoryview) -> Sums:
        parts = []
        at = 0
        for run in runs:
            fd = self._open(run.key)
            try:
                parts.append(file.read_run(fd, run, into[at : at + run.length]))
            finally:
                os.close(fd)
            at += run.length
        return file.join(parts)

    def _read_sums(self, runs: Sequence[CellRun]) -> Sums:
        parts = []
        for run in runs:
            fd = self._open(run.key)
            try:
                parts.append(file.read_run_sums(fd, run))
            finally:
                os.close(fd)
        return file.join(parts)

    def _open(self, key: Key) -> int:
        try:
            return os.open(self._place(key), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise MissError(f"{key} is not stored", key=str(key)) from error

    def _delete(self, keys: Sequence[Key]) -> int:
        """Delete all that can be; the first error is raised after the last key."""
        deleted = 0
        failed: OSError | None = None
        for key in keys:
            try:
                deleted += _unlink(self._place(key))
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return deleted

    def _probe(self) -> None:
        path = self._objects / f"{next(self._serial)}{_PARTIAL}"
        try:
            path.write_bytes(b"l3store")
        finally:
            _unlink(path)


def _lock(data_dir: Path) -> int:
    """One process owns a folder: a second one would not see what the first stores and evicts."""
    fd = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise BlockingIOError(
            error.errno, f"{data_dir} is in use by another l3store: stop it, or give --data-dir another folder"
        ) from error
    return fd


def _listed(folder: Path | str) -> Iterator[str]:
    try:
        with os.scandir(folder) as entries:
            yield from (entry.path for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        return


def _read_key(path: str) -> Key | None:
    try:
        return parse_key(path.rpartition("/")[2])
    except InvalidKeyError:
        return None


def _named(error: OSError, what: str) -> Exception:
    """What a failed write is to a caller: a full disk has a class of its own, the rest stays what it is."""
    if error.errno in _FULL:
        return StorageFullError(f"no space to store {what}: {error.strerror}")
    return error


def _unlink(path: Path | str) -> bool:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def _rename_if_there(path: Path, target: Path) -> None:
    try:
        os.rename(path, target)
    except FileNotFoundError:
        return


def _fsync_folder(folder: Path | str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
