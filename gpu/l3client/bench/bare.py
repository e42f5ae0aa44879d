"""The ceiling: what two processes move over bare sockets, asked object by object as we and the peers are."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from l3client.bench import bare_server
from l3client.bench.contender import Handle
from l3client.bench.memory import address
from l3client.bench.process import Server
from l3client.bench.served import Served
from l3client.bench.workload import Batch, Case, Item, Kind


class BareHandle(Handle):
    """One socket."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, operation: bytes, at: int, length: int) -> None:
        self._socket.sendall(bare_server.REQUEST.pack(operation, at, length))

    def receive(self, into: memoryview) -> None:
        bare_server.receive(self._socket, into)

    def send(self, operation: bytes, at: int, data: Sequence[memoryview]) -> None:
        """Send, and wait for the byte that says that it is there."""
        self.ask(operation, at, sum(map(len, data)))
        for view in data:
            self._socket.sendall(view)
        if self._socket.recv(1) != b".":
            raise ConnectionError("the bare server ended")

    def get(self, item: Item, into: memoryview) -> None:
        self.ask(b"G", item.at, len(into))
        self.receive(into)

    def put(self, item: Item) -> None:
        self.send(b"P", item.at, [item.data])

    def close(self) -> None:
        self._socket.close()


class Bare(Served):
    """Send from memory, receive into memory. A batch is one exchange of all its bytes."""

    name = "bare"
    about = "bare sockets: send from memory, recv_into memory; the ceiling"
    required = True

    def launch(self) -> None:
        command = [sys.executable, "-I", bare_server.__file__, str(self.work.moved_bytes), str(self.folder)]
        self.server = Server(command, self.folder / "log", pipe=True)
        self.port = int(self.server.line())

    def connect(self) -> Handle:
        return BareHandle(self.port)

    def prepare(self, case: Case, turn: int) -> None:
        super().prepare(case, turn)
        # Its memory holds one set of bytes: put back what a case reads after another has written.
        wanted = self._items if case.kind in {Kind.GET, Kind.SMALL} else ()
        for item in dict.fromkeys(wanted):
            self.handles[0].put(item)
        if case.kind is Kind.READ:
            for batch in self._batches:
                self.write_batch(batch)

    def read_batch(self, batch: Batch) -> None:
        handle = self._handle
        handle.ask(b"G", batch.at, batch.length)
        handle.receive(self.work.into[batch.at : batch.at + batch.length])

    def write_batch(self, batch: Batch) -> None:
        # Their bytes lie in one run, but for the one place where a turn's rotation starts over.
        self._handle.send(b"P", batch.at, runs(batch.items, self.work.source))

    @property
    def _handle(self) -> BareHandle:
        handle = self.handles[0]
        assert isinstance(handle, BareHandle)
        return handle


class BareFileHandle(BareHandle):
    """Puts go to files; the client reads them back itself."""

    def __init__(self, port: int, folder: Path) -> None:
        super().__init__(port)
        self._folder = folder

    def get(self, item: Item, into: memoryview) -> None:
        with open(self._folder / str(item.at), "rb", buffering=0) as file:
            file.readinto(into)

    def put(self, item: Item) -> None:
        self.send(b"F", item.at, [item.data])


class BareFile(Bare):
    """Receive and write to a new file for each object."""

    name = "bare file"
    about = "bare sockets: recv_into memory and write to a new file"
    kinds = frozenset({Kind.PUT})

    def connect(self) -> Handle:
        return BareFileHandle(self.port, self.folder)

    def load(self) -> None:
        """Nothing is read."""

    def remove(self, items: Sequence[Item]) -> None:
        for item in items:
            os.unlink(self.folder / str(item.at))


def runs(items: Sequence[Item], source: memoryview) -> list[memoryview]:
    """The bytes of items in as few views as they lie in. All of them are parts of ``source``."""
    base = address(source)
    found: list[tuple[int, int]] = []
    for item in items:
        start = address(item.data) - base
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], start + len(item.data))
        else:
            found.append((start, start + len(item.data)))
    return [source[a:b] for a, b in found]
