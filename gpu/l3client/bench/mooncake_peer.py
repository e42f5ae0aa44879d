"""Mooncake Store over TCP: its master, a process that lends memory, and a client process.

Mooncake's Python need not be ours, so its client runs in a process of its own, on memory that it shares with the bench;
it times itself, and is told what to do over a pipe outside the timed part.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from l3client.bench import mooncake_worker
from l3client.bench.contender import MismatchError, NotFoundError, Timing, check
from l3client.bench.lmcache_peer import python_with
from l3client.bench.memory import address, clear
from l3client.bench.process import Server, StartError, free_port
from l3client.bench.workload import WRITES, Case, Item, Kind, Workload, items_of

_LEASE_MS = 60_000
_CHUNK = 512


class Mooncake:
    name = "mooncake"
    about = "Mooncake Store over TCP, its own client process; batches by batch_get_into and batch_put_from"
    kinds = frozenset({Kind.GET, Kind.PUT, Kind.READ, Kind.WRITE, Kind.SMALL, Kind.MATCH})
    required = False

    def __init__(self, work: Workload, folder: Path, python: str | None) -> None:
        self.work = work
        self.folder = folder
        self._python = python
        self._servers: list[Server] = []
        self._client: Server | None = None
        self._source = self._into = memoryview(b"")
        self._items: tuple[Item, ...] = ()

    @property
    def server_pids(self) -> list[int]:
        return [pid for server in self._servers for pid in server.pids]

    @property
    def client_pids(self) -> list[int]:
        return self._client.pids if self._client else []

    def start(self) -> None:
        python = python_with("mooncake.store", self._python) if self._python else python_with("mooncake", None)
        beside = Path(python).parent / "mooncake_master"
        binary = str(beside) if beside.exists() else shutil.which("mooncake_master")
        if binary is None:
            raise NotFoundError(f"no mooncake_master beside {python} or in PATH")
        self.folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        command = [binary, "--rpc_address=127.0.0.1", f"--rpc_port={port}", "--metrics_host=127.0.0.1"]
        command += [f"--metrics_port={free_port()}", f"--default_kv_lease_ttl={_LEASE_MS}"]
        master = Server(command, self.folder / "master.log")
        self._servers.append(master)
        master.wait_for_port(port)
        length = self.work.moved_bytes
        # Twice what is loaded and once what is written, and room for its allocator.
        worker = [python, "-I", mooncake_worker.__file__]  # -I: what lies beside the file stays unimported
        address, segment = f"127.0.0.1:{port}", str(4 * length + (256 << 20))
        lender = Server([*worker, "segment", address, segment], self.folder / "segment.log", pipe=True)
        self._servers.append(lender)
        lender.line()
        fds = [os.memfd_create(name) for name in ("source", "into")]
        for fd in fds:
            os.ftruncate(fd, length)
        self._source, self._into = (memoryview(mmap.mmap(fd, length)) for fd in fds)
        self._source[:] = self.work.source[:length]
        command = [*worker, "client", address, "0", *map(str, fds), str(length)]
        self._client = Server(command, self.folder / "client.log", pipe=True, pass_fds=fds)
        self._client.line()
        for fd in fds:
            os.close(fd)
        for items in (self.work.big, items_of(self.work.batches), self.work.match.items):
            for at in range(0, len(items), _CHUNK):
                part = items[at : at + _CHUNK]
                self._tell("batch_put", part, cuts=[(0, len(part))])

    def prepare(self, case: Case, turn: int) -> None:
        if case.kind is Kind.MATCH:
            self._items = self.work.match.items
        elif case.kind is Kind.PUT:
            self._items = self.work.fresh_objects(turn)[1]
        elif case.kind is Kind.WRITE:
            self._items = items_of(self.work.fresh_batches(turn)[1])
        else:
            sources = {Kind.GET: self.work.gets, Kind.SMALL: self.work.small, Kind.READ: items_of(self.work.batches)}
            self._items = sources[case.kind]
        clear(self._into)

    def run(self, case: Case) -> Timing:
        if case.kind is Kind.MATCH:
            said = self._tell("find", self._items, calls=self.work.sizes.match_calls)
            if said["found"] != len(self._items):
                raise MismatchError(f"{self.name} found {said['found']} of {len(self._items)} objects")
            return Timing(said["seconds"], 0, tuple(said["latencies"]))
        what = "put" if case.kind in WRITES else "get"
        if case.kind in {Kind.READ, Kind.WRITE}:
            said = self._tell(f"batch_{what}", self._items, cuts=self._cuts())
        else:
            said = self._tell(what, self._items, threads=case.connections)
        return Timing(said["seconds"], sum(len(i.data) for i in self._items), tuple(said["latencies"]))

    def verify(self, case: Case) -> int:
        if case.kind is Kind.MATCH:
            return 0
        if case.kind in WRITES:
            self._tell("batch_get", self._items, cuts=self._cuts())
        check(self._items, self._into, self.name)
        return sum(len(item.data) for item in self._items)

    def clean(self, case: Case) -> None:
        if case.kind in WRITES:
            self._tell("remove", self._items)

    def stop(self) -> None:
        if self._client:
            self._client.stop()
        for server in reversed(self._servers):
            server.stop()
        self._servers, self._client = [], None

    def _cuts(self) -> list[tuple[int, int]]:
        """Where one batch ends and the next begins."""
        step = max(1, len(self._items) // self.work.sizes.batches)
        return [(at, min(at + step, len(self._items))) for at in range(0, len(self._items), step)]

    def _tell(self, what: str, items: Sequence[Item], **more: Any) -> dict[str, Any]:
        assert self._client is not None
        assert self._client.process.stdin is not None
        names = [str(item.key) for item in items]
        order = {"do": what, "names": names, "sizes": [len(i.data) for i in items], **more}
        order["places"] = [self._place(item) if what.endswith("put") else item.at for item in items]
        self._client.process.stdin.write(json.dumps(order).encode() + b"\n")
        self._client.process.stdin.flush()
        said: dict[str, Any] = json.loads(self._client.line(120))
        if said.get("failed"):
            raise StartError(f"mooncake {what} failed: {said['failed']}")
        return said

    def _place(self, item: Item) -> int:
        """Where the bytes of an item lie in what is sent."""
        return address(item.data) - address(self.work.source)
