"""The LMCache server, spoken to in its own wire format: our process needs none of what its client imports."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from l3client.bench.contender import Handle, NotFoundError
from l3client.bench.served import Served
from l3client.bench.workload import Batch, Item, Workload

# lmcache.v1.protocol of 0.5.6: command, length, format, dtype, location, 4 of shape, the key padded with spaces;
# the answer has code, length, format, dtype, 4 of shape, location.
_REQUEST = struct.Struct("iiiiiiiii150s")
_ANSWER = struct.Struct("iiiiiiiii")
_PUT, _GET, _EXIST = 1, 2, 3
_SUCCESS = 200
_FORMAT = 1
_UINT8 = 6


class LMCacheHandle(Handle):
    """One connection. A put has no answer: `finish` asks for the last one, which its thread has then taken."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._last: Item | None = None

    def get(self, item: Item, into: memoryview) -> None:
        if self._ask(_GET, item, 0) != len(into):
            raise ConnectionError(f"the LMCache server does not have {item.key}")
        got = 0
        while got < len(into):
            count = self._socket.recv_into(into[got:])
            if not count:
                raise ConnectionError("the LMCache server closed the connection")
            got += count

    def put(self, item: Item) -> None:
        self._send(_PUT, item, len(item.data))
        self._socket.sendall(item.data)
        self._last = item

    def finish(self) -> None:
        if self._last is not None:
            self._ask(_EXIST, self._last, 0)
            self._last = None

    def close(self) -> None:
        self._socket.close()

    def _send(self, command: int, item: Item, length: int) -> None:
        self._socket.sendall(_REQUEST.pack(command, length, _FORMAT, _UINT8, 0, length, 0, 0, 0, key_of(item)))

    def _ask(self, command: int, item: Item, length: int) -> int:
        self._send(command, item, length)
        answer = self._socket.recv(_ANSWER.size, socket.MSG_WAITALL)
        if len(answer) < _ANSWER.size:
            raise ConnectionError("the LMCache server closed the connection")
        code, size, *_ = _ANSWER.unpack(answer)
        if code != _SUCCESS:
            raise ConnectionError(f"the LMCache server does not have {item.key}")
        return int(size)


def key_of(item: Item) -> bytes:
    """An LMCache key: model@world@worker@hash@dtype. The server cannot delete: keys of places, to be overwritten."""
    where = f"{item.key.digest}/{item.at}/{len(item.data)}"
    return f"bench@1@0@{hashlib.sha256(where.encode()).hexdigest()[:15]}@uint8".encode().ljust(150)


class LMCache(Served):
    name = "lmcache"
    about = "LMCache server (cpu), its own wire format; batches object by object over 4 connections"
    env: Mapping[str, str] = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}

    def __init__(self, work: Workload, folder: Path, python: str | None) -> None:
        super().__init__(work, folder)
        self._python = python

    def command(self) -> list[str]:
        python = python_with("lmcache", self._python)
        return [python, "-m", "lmcache.v1.server", "127.0.0.1", str(self.port), "cpu"]

    def connect(self) -> Handle:
        return LMCacheHandle(self.port)

    # One turn's names serve all turns, and its bytes differ from those of the turn before.

    def fresh_objects(self, turn: int) -> tuple[Item, ...]:
        return _under(self.work.big_namespace.digest, super().fresh_objects(turn))

    def fresh_batches(self, turn: int) -> tuple[Batch, ...]:
        digest = self.work.batch_namespace.digest
        return tuple(Batch(b.namespace, b.hashes, _under(digest, b.items)) for b in super().fresh_batches(turn))


def _under(digest: str, items: tuple[Item, ...]) -> tuple[Item, ...]:
    written = f"{digest}-written"
    return tuple(
        Item(type(i.key)(i.key.page_hash, written, i.key.coordinate), i.data, i.at, i.cell_bytes) for i in items
    )


def python_with(module: str, python: str | None) -> str:
    """A Python that can import a module: the one given, else ours or the one in PATH. Raises `NotFoundError`."""
    for candidate in [python] if python else [sys.executable, shutil.which("python3")]:
        if candidate is None:
            continue
        probe = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
        try:
            done = subprocess.run([candidate, "-c", probe], capture_output=True, check=False, env=dict(os.environ))
        except OSError:
            continue
        if done.returncode == 0:
            return candidate
    where = python or "this Python and the one in PATH"
    raise NotFoundError(f"no module {module} in {where}")
