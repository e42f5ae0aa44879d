"""The least HTTP client that reads into the caller's memory: for peers that speak HTTP, and for our first layer."""

from __future__ import annotations

import socket

from l3client.bench.contender import Handle
from l3client.bench.workload import Item

_HEAD = 2048
_OK = range(200, 300)


class HttpHandle(Handle):
    """One kept connection. A body is received where it belongs, but for what came with its head."""

    def __init__(self, port: int, prefix: str = "/") -> None:
        self._host = f"127.0.0.1:{port}"
        self._prefix = prefix
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = memoryview(bytearray(_HEAD))
        self._rest = memoryview(b"")

    def request(self, method: str, target: str, body: memoryview | None = None, kind: str = "") -> int:
        """Send a request and receive the head of its answer; the length of the body to `receive`."""
        head = f"{method} {target} HTTP/1.1\r\nHost: {self._host}\r\n"
        if body is not None:
            head += f"Content-Length: {len(body)}\r\n"
        if kind:
            head += f"Content-Type: {kind}\r\n"
        sent = self._socket.sendmsg([(head + "\r\n").encode(), body or b""]) - len(head) - 2
        if body is not None and sent < len(body):
            self._socket.sendall(body[sent:])
        return self._answer(f"{method} {target}")

    def receive(self, into: memoryview) -> None:
        """The next bytes of the body."""
        got = min(len(into), len(self._rest))
        into[:got] = self._rest[:got]
        self._rest = self._rest[got:]
        while got < len(into):
            count = self._socket.recv_into(into[got:])
            if not count:
                raise ConnectionError(f"{self._host} closed the connection in the middle of an answer")
            got += count

    def skip(self, length: int) -> bytes:
        """A small body."""
        body = bytearray(length)
        self.receive(memoryview(body))
        return bytes(body)

    def get(self, item: Item, into: memoryview) -> None:
        length = self.request("GET", f"{self._prefix}{item.key}")
        if length != len(into):
            raise ConnectionError(f"{self._host} sent {length} bytes of {item.key}, not {len(into)}")
        self.receive(into)

    def put(self, item: Item) -> None:
        self.skip(self.request("PUT", f"{self._prefix}{item.key}", item.data))

    def close(self) -> None:
        self._socket.close()

    def _answer(self, asked: str) -> int:
        got = 0
        while True:
            count = self._socket.recv_into(self._buffer[got:])
            got += count
            received = bytes(self._buffer[:got])
            end = received.find(b"\r\n\r\n")
            if end >= 0:
                break
            if not count or got == _HEAD:
                raise ConnectionError(f"{self._host} gave no answer to {asked}")
        self._rest = memoryview(received)[end + 4 :]
        status_line, *lines = received[:end].decode("latin-1").split("\r\n")
        length = next((int(value) for name, _, value in (line.partition(":") for line in lines)
                       if name.lower() == "content-length"), 0)  # fmt: skip
        if int(status_line.split()[1]) not in _OK:
            raise ConnectionError(f"{self._host} answered {asked} with {status_line}: {self.skip(length)[:300]!r}")
        return length
