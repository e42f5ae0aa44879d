"""One HTTP/1.1 connection whose bodies go straight between the socket and the caller's memory."""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from l3client.transport.scatter import Scatter
from l3client.transport.timeouts import Timeouts
from l3store.errors import ConnectError, L3Error, ProtocolError, TimeoutExpiredError, TransportError, from_problem

_MAX_HEAD = 64 << 10
_MAX_PROBLEM = 1 << 20
_MAX_SMALL = 64 << 20
_MAX_INTERIM = 16
_VECTORS = 256
_ERROR = 400
_SUCCESS = {200, 201}
_NUMBER = re.compile(r"[0-9]{1,18}")
_STATUS = re.compile(r"HTTP/1\.1 ([1-9][0-9]{2})(?: .*)?")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a service listens. ``context`` is for https."""

    host: str
    port: int
    context: ssl.SSLContext | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers (lower-case names) of a response, and the bytes of its body."""

    status: int
    headers: Mapping[str, str]
    length: int


class Connection:
    """A connection in use by one thread. After any error it must be closed: its place in the stream is unknown."""

    def __init__(self, address: Address, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self._name = f"{address.host}:{address.port}"
        host = f"[{address.host}]" if ":" in address.host else address.host
        self._host = f"{host}:{address.port}"
        self._rest = memoryview(b"")
        self._began = time.monotonic()
        self._moving = 0
        self.reusable = True
        self.answered = False
        self._socket = self._connect(address)

    def close(self) -> None:
        self._socket.close()

    def abort(self) -> None:
        """End what another thread does with this connection: it gets `ConnectError`, and then closes it."""
        with contextlib.suppress(OSError):
            # Not the one of an SSLSocket, which takes away what the other thread is using.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    @property
    def stale(self) -> bool:
        """Whether something came that nobody asked for: the end of the stream, or more than an answer."""
        return bool(self._rest) or self._readable()

    def request(self, method: str, target: str, headers: Mapping[str, str], body: Sequence[memoryview]) -> Head:
        """Send a request, its body straight from the caller's memory, and receive the head of the answer.

        Raises the error that an error answer describes, also one that comes before all of the body was sent.
        """
        self.answered = False
        length = sum(map(len, body))
        self._began = time.monotonic()
        self._moving = length
        lines = [f"{method} {target} HTTP/1.1", f"Host: {self._host}", f"Content-Length: {length}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        request = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        try:
            self._send([memoryview(request), *body])
        except TransportError:
            # The service may have refused early and stopped reading: what it said is worth more than that it stopped.
            self.reusable = False
            if self._readable():
                with contextlib.suppress(TransportError):
                    self._answer()
            raise
        head = self._answer()
        self._moving += head.length
        return head

    def receive(self, scatter: Scatter) -> None:
        """Receive exactly what the scatter has room for."""
        taken = scatter.copy(self._rest)
        self._rest = self._rest[taken:]
        while not scatter.full:
            targets = scatter.targets()
            with self._phase("read"):
                got = self._receive_into(targets)
            if not got:
                raise ConnectError(f"{self._name} closed the connection in the middle of an answer")
            scatter.advance(got)

    def read(self, length: int) -> bytearray:
        """Receive a small body."""
        if length > _MAX_SMALL:
            raise ProtocolError(f"{self._name} sent {length} bytes where at most {_MAX_SMALL} are expected")
        data = bytearray(length)
        self.receive(Scatter([memoryview(data)]))
        return data

    def _connect(self, address: Address) -> socket.socket:
        with contextlib.ExitStack() as undo:
            try:
                connected = socket.create_connection((address.host, address.port), self._timeouts.connect)
                undo.callback(connected.close)
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if address.context is not None:
                    connected = address.context.wrap_socket(connected, server_hostname=address.host)
            except TimeoutError as error:
                raise TimeoutExpiredError(f"{self._name} did not take a connection", phase="connect") from error
            except (OSError, UnicodeError) as error:  # a name that cannot be a host's is a UnicodeError
                raise ConnectError(f"cannot connect to {self._name}: {error}") from error
            undo.pop_all()
        return connected

    def _send(self, buffers: list[memoryview]) -> None:
        at = 0
        offset = 0
        while at < len(buffers):
            batch = buffers[at : at + _VECTORS]
            batch[0] = batch[0][offset:]
            with self._phase("write"):
                sent = self._send_some(batch)
            offset += sent
            while at < len(buffers) and offset >= len(buffers[at]):
                offset -= len(buffers[at])
                at += 1

    def _send_some(self, buffers: Sequence[memoryview]) -> int:
        if isinstance(self._socket, ssl.SSLSocket):
            return self._socket.send(next((b for b in buffers if len(b)), b""))
        return self._socket.sendmsg(buffers)

    def _receive_into(self, targets: Sequence[memoryview]) -> int:
        if len(targets) == 1 or isinstance(self._socket, ssl.SSLSocket):
            return self._socket.recv_into(targets[0])
        return self._socket.recvmsg_into(targets)[0]

    def _answer(self) -> Head:
        head = self._head()
        interim = 0
        while head.status < 200:  # 100 Continue and its like precede the answer
            interim += 1
            if interim > _MAX_INTERIM:
                raise ProtocolError(f"{self._name} sent {interim} interim answers and no final one")
            head = self._head()
        options = [option.strip() for option in head.headers.get("connection", "").lower().split(",")]
        if "close" in options or "content-length" not in head.headers:
            self.reusable = False
        if head.status >= _ERROR:
            raise self._error(head)
        if head.status not in _SUCCESS:
            raise ProtocolError(f"{self._name} answered with HTTP status {head.status}, which the wire does not have")
        return head

    def _head(self) -> Head:
        received = bytearray(self._rest)
        end = received.find(b"\r\n\r\n")
        while end < 0:
            if len(received) > _MAX_HEAD:
                raise ProtocolError(f"{self._name} sent a head of more than {_MAX_HEAD} bytes")
            with self._phase("read"):
                piece = self._socket.recv(16 << 10)
            if not piece:
                raise ConnectError(f"{self._name} closed the connection without an answer")
            self.answered = True
            seen = max(0, len(received) - 3)
            received += piece
            end = received.find(b"\r\n\r\n", seen)
        self._rest = memoryview(bytes(received[end + 4 :]))
        return self._parse(bytes(received[:end]))

    def _parse(self, head: bytes) -> Head:
        status_line, *lines = head.decode("latin-1").split("\r\n")
        fields = [(name.strip().lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        headers = dict(fields)
        status = _STATUS.fullmatch(status_line)
        # A second Content-Length that differs would leave the end of the body to taste.
        length, *others = {value for name, value in fields if name == "content-length"} or {"0"}
        if status is None or others or not _NUMBER.fullmatch(length) or "transfer-encoding" in headers:
            raise ProtocolError(f"{self._name} sent an answer that is not of the wire: {status_line[:80]!r}")
        return Head(int(status[1]), headers, int(length))

    def _error(self, head: Head) -> L3Error:
        if head.length > _MAX_PROBLEM:
            self.reusable = False
            return from_problem(head.status, {})
        try:
            body = self.read(head.length)
        except TransportError:
            # The status has said what matters.
            self.reusable = False
            return from_problem(head.status, {})
        try:
            problem = json.loads(body)
        except (ValueError, RecursionError):
            problem = {"detail": f"HTTP status {head.status}: {bytes(body[:200])!r}"}
        return from_problem(head.status, problem if isinstance(problem, dict) else {})

    def _readable(self) -> bool:
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return True
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(0))

    def _phase(self, phase: str) -> _Phase:
        whole = self._timeouts.whole(self._moving)
        left = self._began + whole - time.monotonic()
        if left <= 0:
            raise TimeoutExpiredError(f"{self._name}: the call took longer than {whole:.1f} s", phase="call")
        return _Phase(self._socket, self._name, phase, min(left, getattr(self._timeouts, phase)))


class _Phase:
    """One system call under a phase's timeout."""

    __slots__ = ("_name", "_phase", "_seconds")

    def __init__(self, connected: socket.socket, name: str, phase: str, seconds: float) -> None:
        if connected.gettimeout() != seconds:
            connected.settimeout(seconds)
        self._name = name
        self._phase = phase
        self._seconds = seconds

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, TimeoutError):
            raise TimeoutExpiredError(
                f"{self._name}: nothing moved for {self._seconds:.3g} s", phase=self._phase
            ) from error
        if isinstance(error, OSError) and not isinstance(error, L3Error):
            raise ConnectError(f"{self._name}: {error}") from error
