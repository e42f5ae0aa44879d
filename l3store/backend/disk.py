"""Objects on a local file system.

    DATA_DIR/objects/{first byte of the page hash}/{key}     256 folders, all made at start
    DATA_DIR/objects/{..}/{number}.partial                   a write that is not visible yet; swept at start
    DATA_DIR/namespaces/{digest}.json
    DATA_DIR/tmp/                                            registrations that are being written; swept at start
    DATA_DIR/quarantine/                                     what failed its sums

A file is written beside its place and renamed to its name: it is there whole or not at all, and the first writer wins.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import functools
import itertools
import json
import logging
import os
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import aiofiles

from l3store.backend import file
from l3store.backend.descriptors import Descriptors, OpenFile
from l3store.backend.gathering import Gathering
from l3store.backend.naming import name_file
from l3store.backend.partitions import PARTIAL, PARTITIONS, make_partitions, object_names, sweep
from l3store.backend.protocol import Ack, CellRun, NewObject, Sums
from l3store.errors import MissError, StorageFullError
from l3store.layout import Key
from l3store.layout.sums import SUM_BYTES

_T = TypeVar("_T")
_FULL = {errno.ENOSPC, errno.EDQUOT}
_GATHERED = 64
"""Objects of several writers that are written in one trip to a thread; each of them waits for all."""

_log = logging.getLogger("l3store.backend")


class DiskBackend:
    """See the module. One process owns a data folder.

    ``threads`` bounds the file operations in flight, ``descriptors`` the files that are kept open between reads; None
    is a share of what the process may open.
    """

    def __init__(
        self, data_dir: Path, *, ack: Ack = Ack.FILE, threads: int = 8, descriptors: int | None = None
    ) -> None:
        self._root = data_dir
        self._objects = data_dir / "objects"
        self._tmp = data_dir / "tmp"
        self._quarantine = data_dir / "quarantine"
        self._namespaces = data_dir / "namespaces"
        self._ack = ack
        self._serial = itertools.count()
        for folder in (self._objects, self._tmp, self._quarantine, self._namespaces):
            folder.mkdir(parents=True, exist_ok=True)
        make_partitions(str(self._objects))
        if ack is Ack.FSYNC:
            for folder in (self._objects, data_dir):
                _fsync_folder(folder)
        self._lock = _lock(data_dir)
        self._files = Descriptors(self._place, limit=descriptors)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="l3store-disk")
        # A write to a file is work for the processor, one to the disk is a wait, and waits can be many at once.
        lanes = threads if ack is Ack.FSYNC else max(1, min(threads, (os.cpu_count() or 1) // 2))
        self._puts = Gathering(functools.partial(self._run, self._put), lanes=lanes, most=_GATHERED)

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

    async def scan(self) -> AsyncIterator[list[str]]:
        await self._run(self._sweep)
        # One after the other: to list is to call the system for every name, and each call would wait for whoever
        # works on the names before it.
        for partition in PARTITIONS:
            yield await self._run(object_names, str(self._objects), partition)

    async def put(self, objects: Sequence[NewObject]) -> list[bool | Exception]:
        return list(await self._puts(objects))

    async def read(self, runs: Sequence[CellRun], into: memoryview) -> Sums:
        return await self._run(self._read, runs, into)

    async def read_sums(self, runs: Sequence[CellRun]) -> Sums:
        return await self._run(self._read_sums, runs)

    async def delete(self, keys: Sequence[Key]) -> int:
        return await self._run(self._delete, keys)

    async def quarantine(self, key: Key) -> None:
        await self._run(self._set_aside, key)

    async def free_bytes(self) -> int:
        return (await self._run(shutil.disk_usage, self._root)).free

    async def probe(self) -> None:
        await self._run(self._probe)

    async def close(self) -> None:
        # Pending operations are short; the folder must not be handed on before the last of them ended.
        await asyncio.to_thread(self._pool.shutdown)
        self._files.close()
        os.close(self._lock)

    def path(self, key: Key) -> Path:
        """Where an object's file is, or would be."""
        return Path(self._place(key))

    def _place(self, key: Key) -> str:
        return f"{self._objects}/{key.page_hash[:2]}/{key}"

    async def _run(self, call: Callable[..., _T], *args: object) -> _T:
        running = asyncio.get_running_loop().run_in_executor(self._pool, call, *args)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            # The thread works in the caller's memory, which must not be used for anything else before it is done.
            await asyncio.wait([running])
            raise

    def _sweep(self) -> None:
        sweep(str(self._tmp))
        sweep(str(self._objects), suffix=PARTIAL)

    def _put(self, objects: Sequence[NewObject]) -> list[bool | Exception]:
        return [self._put_one(new) for new in objects]

    def _put_one(self, new: NewObject) -> bool | Exception:
        path = self._place(new.key)
        folder = path.rpartition("/")[0]
        partial = f"{folder}/{next(self._serial)}{PARTIAL}"
        try:
            fd = _create(folder, partial)
            try:
                file.write_object(fd, new)
                if self._ack is Ack.FSYNC:
                    os.fsync(fd)
            finally:
                os.close(fd)
            created = name_file(partial, path)
            if self._ack is Ack.FSYNC:
                # Also where another writer was first: it may not have come to this yet, and we are about to answer.
                _fsync_folder(folder)
        except OSError as error:
            # Where it could not be made it cannot be removed either; what is left behind is swept at the next start.
            with contextlib.suppress(OSError):
                _unlink(partial)
            return _named(error, str(new.key))
        return created

    def _read(self, runs: Sequence[CellRun], into: memoryview) -> Sums:
        """Each object is opened once, wherever in the batch its runs are."""
        by_object: dict[Key, list[tuple[CellRun, memoryview]]] = {}
        at = 0
        for run in runs:
            end = at + run.length
            by_object.setdefault(run.key, []).append((run, into[at:end]))
            at = end
        trailers = {}
        for key, parts in by_object.items():
            opened = self._acquire(key)
            try:
                trailers[key] = opened.trailer = file.read_runs(opened.fd, parts, opened.trailer)
            finally:
                self._files.release(opened)
        return _sums(runs, trailers)

    def _read_sums(self, runs: Sequence[CellRun]) -> Sums:
        trailers = {}
        for run in runs:
            if run.key in trailers:
                continue
            opened = self._acquire(run.key)
            try:
                if opened.trailer is None:
                    opened.trailer = file.read_trailer(opened.fd, run)
                trailers[run.key] = opened.trailer
            finally:
                self._files.release(opened)
        return _sums(runs, trailers)

    def _acquire(self, key: Key) -> OpenFile:
        try:
            return self._files.acquire(key)
        except FileNotFoundError as error:
            raise MissError(f"{key} is not stored", key=str(key)) from error

    def _set_aside(self, key: Key) -> None:
        with self._files.leaving([key]), contextlib.suppress(FileNotFoundError):
            os.rename(self._place(key), self._quarantine / f"{key}.{next(self._serial)}")

    def _delete(self, keys: Sequence[Key]) -> int:
        """Delete all that can be; the first error is raised after the last key."""
        deleted = 0
        failed: OSError | None = None
        with self._files.leaving(keys):
            for key in keys:
                try:
                    deleted += _unlink(self._place(key))
                except OSError as error:
                    failed = failed or error
        if failed is not None:
            raise failed
        return deleted

    def _probe(self) -> None:
        path = self._objects / f"{next(self._serial)}{PARTIAL}"
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


def _create(folder: str, partial: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(partial, flags, 0o644)
    except FileNotFoundError:
        # Tidied away by somebody, as it was empty. This level and no more: where the data folder is gone, another must
        # not be begun in its place.
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        _fsync_folder(os.path.dirname(folder))
        return os.open(partial, flags, 0o644)


def _sums(runs: Sequence[CellRun], trailers: Mapping[Key, file.Trailer]) -> Sums:
    parts = []
    for run in runs:
        start = run.first * SUM_BYTES
        parts.append(trailers[run.key].packed[start : start + run.cells * SUM_BYTES])
    return Sums(b"".join(parts), all(trailer.by_writer for trailer in trailers.values()))


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


def _fsync_folder(folder: Path | str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
