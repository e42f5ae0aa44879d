"""Open files, kept for the next read of the same object."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from l3store.backend.file import Trailer
from l3store.layout import Key

_SHARE = 4
_MOST = 1024
_EXHAUSTED = {errno.EMFILE, errno.ENFILE}


class OpenFile:
    """An object's file, open for reading. ``trailer`` is what a reader has already found behind its cells."""

    __slots__ = ("fd", "kept", "pins", "trailer")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.trailer: Trailer | None = None
        self.pins = 1
        self.kept = True


class Descriptors:
    """At most ``limit`` files that nobody reads just now stay open, those read last; for any thread.

    An object that is deleted, or set aside, is closed with it: `leaving` holds that what is read under its key
    afterwards is what was stored afterwards. A file that somebody else deletes is read for as long as it is open.
    ``limit`` None is a share of what the process may open.
    """

    def __init__(self, place: Callable[[Key], str], *, limit: int | None = None) -> None:
        self._place = place
        self._limit = _default_limit() if limit is None else limit
        self._open: OrderedDict[Key, OpenFile] = OrderedDict()
        self._leaving: list[frozenset[Key]] = []
        self._departures = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def leaving(self, keys: Sequence[Key]) -> Iterator[None]:
        """Around what takes the files of these keys away."""
        gone = frozenset(keys)
        with self._lock:
            closing = [opened for key in gone if (opened := self._forget(key)) is not None]
            self._leaving.append(gone)
        _close(closing)
        try:
            yield
        finally:
            with self._lock:
                self._leaving = [other for other in self._leaving if other is not gone]
                # Who opened a file before it was taken away comes to keep it now: it must not.
                self._departures += 1

    def acquire(self, key: Key) -> OpenFile:
        """Open an object's file, or take the one that is open; to be given back with `release`. Raises OSError."""
        with self._lock:
            opened = self._open.get(key)
            if opened is not None:
                opened.pins += 1
                self._open.move_to_end(key)
                return opened
            departures = self._departures
        return self._keep(key, OpenFile(self._open_file(self._place(key))), departures)

    def release(self, opened: OpenFile) -> None:
        """Give a file back."""
        with self._lock:
            opened.pins -= 1
            closing = not opened.pins and not opened.kept
        if closing:
            os.close(opened.fd)

    def close(self) -> None:
        """Close all that nobody reads just now."""
        with self._lock:
            closing = [opened for key in list(self._open) if (opened := self._forget(key)) is not None]
        _close(closing)

    def _keep(self, key: Key, opened: OpenFile, departures: int) -> OpenFile:
        closing = []
        with self._lock:
            if (
                departures != self._departures
                or key in self._open  # Another reader was faster.
                or any(key in gone for gone in self._leaving)
            ):
                opened.kept = False
                return opened
            self._open[key] = opened
            while len(self._open) > self._limit:
                victim = self._forget(next(iter(self._open)))
                if victim is not None:
                    closing.append(victim)
        _close(closing)
        return opened

    def _forget(self, key: Key) -> OpenFile | None:
        """Keep a file no longer; it is returned where nobody reads it, to be closed."""
        opened = self._open.pop(key, None)
        if opened is None:
            return None
        opened.kept = False
        return None if opened.pins else opened

    def _open_file(self, path: str) -> int:
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
        # Connections took what we left: they need descriptors more than we do.
        self.close()
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _close(files: Sequence[OpenFile]) -> None:
    for opened in files:
        os.close(opened.fd)


def _default_limit() -> int:
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if allowed == resource.RLIM_INFINITY else min(_MOST, allowed // _SHARE)
