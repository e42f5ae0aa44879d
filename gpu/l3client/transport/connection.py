"""One HTTP/1.1 connection whose bodies go straight between the socket and the caller's memory."""

from __future__ import annotations

import contextlib
import json
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from l3client.transport.head import Head, parse_head
from l3client.transport.scatter import Scatter
from l3client.transport.stream import MAX_VECTORS, Bytes, Stream, connect
from l3client.transport.timeouts import Timeouts
from l3store.errors import ConnectError, L3Error, ProtocolError, TimeoutExpiredError, TransportError, from_problem

_FIRST = 4 << 10
"""Bytes asked for with a head. What comes of the body is copied, so not many."""

_MAX_HEAD = 64 << 10
_MAX_PROBLEM = 1 << 20
_MAX_SMALL = 64 << 20
_MAX_INTERIM = 16
_LOOKS = 8
_LONGEST_LOOK = 5.0
_ERROR = 400
_SUCCESS = {200, 201}

_What = TypeVar("_What")
_Moved = TypeVar("_Moved")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a service listens. ``context`` is for https."""

    host: str
    port: int
    context: ssl.SSLContext | None = None


class Connection:
    """A connection in use by one thread. After any error it must be closed: its place in the stream is unknown.

    began     when the call that uses it did, by time.monotonic
    reusable  whether it is in order for another call after this one
    answered  whether anything came since the last request
    """

    def __init__(self, address: Address, timeouts: Timeouts, *, began: float) -> None:
        self._timeouts = timeouts
        self._name = f"{address.host}:{address.port}"
        host = f"[{address.host}]" if ":" in address.host else address.host
        self._host = f"Host: {host}:{address.port}\r\n"
        self._rest = b""
        self._moving = 0
        self._end = began + timeouts.whole(0)
        self.began = began
        self.reusable = True
        self.answered = False
        self._stream = self._connect(address)
        # Calls return to look at the time more often than they would have to. Where some bytes came and then no more,
        # that is when the silence can have begun.
        self._look = self._patience = min(min(timeouts.read, timeouts.write) / _LOOKS, _LONGEST_LOOK)
        self._stream.set_patience(self._look)

    def close(self) -> None:
        self._stream.close()

    def abort(self) -> None:
        """End what another thread does with this connection: it gets `ConnectError`, and then closes it."""
        self._stream.abort()

    @property
    def stale(self) -> bool:
        """Whether something came that nobody asked for: the end of the stream, or more than an answer."""
        return bool(self._rest) or self._stream.readable

    def request(self, method: str, target: str, headers: str = "", body: Sequence[memoryview] | None = None) -> Head:
        """Send a request, its body straight from the caller's memory, and receive the head of the answer.

        ``headers`` are whole lines. Raises the error that an error answer describes, also one that comes before all of
        the body was sent.
        """
        self.answered = False
        self._moving = 0
        if body is None:
            body = ()
        else:
            length = sum(map(len, body))
            headers = f"{headers}Content-Length: {length}\r\n"
            self._moving = length
        self._end = self.began + self._timeouts.whole(self._moving)
        request = f"{method} {target} HTTP/1.1\r\n{self._host}{headers}\r\n".encode("latin-1")
        try:
            self._send([request, *body])
        except TransportError:
            # The service may have refused early and stopped reading: what it said is worth more than that it stopped.
            self.reusable = False
            if self._stream.readable:
                with contextlib.suppress(TransportError):
                    self._answer()
            raise
        head = self._answer()
        self._moving += head.length
        self._end = self.began + self._timeouts.whole(self._moving)
        return head

    def receive(self, scatter: Scatter) -> None:
        """Receive exactly what the scatter has room for."""
        if self._rest:
            taken = scatter.take(self._rest)
            self._rest = self._rest[taken:]
        while targets := scatter.targets:
            got = self._patiently(self._stream.fill, targets, "read")
            if not got:
                raise ConnectError(f"{self._name} closed the connection in the middle of an answer")
            scatter.advance(got)

    def read(self, length: int) -> bytes | bytearray:
        """Receive a small body."""
        if length > _MAX_SMALL:
            raise ProtocolError(f"{self._name} sent {length} bytes where at most {_MAX_SMALL} are expected")
        if len(self._rest) == length:
            data, self._rest = self._rest, b""
            return data
        room = bytearray(length)
        self.receive(Scatter([memoryview(room)]))
        return room

    def _connect(self, address: Address) -> Stream:
        seconds = min(self._timeouts.connect, self._end - time.monotonic())
        if seconds <= 0:
            raise self._too_long()
        try:
            return connect(address.host, address.port, context=address.context, seconds=seconds)
        except TimeoutError as error:
            raise TimeoutExpiredError(f"{self._name} did not take a connection", phase="connect") from error
        except (OSError, UnicodeError) as error:  # a name that cannot be a host's is a UnicodeError
            raise ConnectError(f"cannot connect to {self._name}: {error}") from error

    def _send(self, buffers: Sequence[Bytes]) -> None:
        at = offset = 0
        while at < len(buffers):
            batch = list(buffers[at : at + MAX_VECTORS])
            if offset:
                batch[0] = memoryview(batch[0])[offset:]
            offset += self._patiently(self._stream.send, batch, "write")
            while at < len(buffers) and offset >= len(buffers[at]):
                offset -= len(buffers[at])
                at += 1

    def _answer(self) -> Head:
        head = self._head()
        interim = 0
        while head.status < 200:  # 100 Continue and its like precede the answer
            interim += 1
            if interim > _MAX_INTERIM:
                raise ProtocolError(f"{self._name} sent {interim} interim answers and no final one")
            head = self._head()
        if not head.kept:
            self.reusable = False
        if head.status >= _ERROR:
            raise self._error(head)
        if head.status not in _SUCCESS:
            raise ProtocolError(f"{self._name} answered with HTTP status {head.status}, which the wire does not have")
        return head

    def _head(self) -> Head:
        received = self._rest or self._piece()
        end = received.find(b"\r\n\r\n")
        while end < 0:
            if len(received) > _MAX_HEAD:
                raise ProtocolError(f"{self._name} sent a head of more than {_MAX_HEAD} bytes")
            seen = max(0, len(received) - 3)
            received += self._piece()
            end = received.find(b"\r\n\r\n", seen)
        self._rest = received[end + 4 :]
        try:
            return parse_head(received[:end])
        except ValueError as error:
            raise ProtocolError(f"{self._name} sent an answer that is not of the wire: {error}") from error

    def _piece(self) -> bytes:
        piece = self._patiently(self._stream.receive, _FIRST, "read")
        if not piece:
            raise ConnectError(f"{self._name} closed the connection without an answer")
        self.answered = True
        return piece

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

    def _patiently(self, call: Callable[[_What], _Moved], what: _What, phase: str) -> _Moved:
        """Make one call of the stream, again while nothing moves and neither the phase nor the whole is over."""
        began = time.monotonic()
        left = self._end - began
        if left < self._look or self._patience < self._look:
            self._hurry(left)
        while True:
            try:
                return call(what)
            except (BlockingIOError, TimeoutError) as error:
                now = time.monotonic()
                seconds = getattr(self._timeouts, phase)
                if began + seconds <= now < self._end:
                    silence = f"{self._name}: nothing moved for {seconds:.3g} s"
                    raise TimeoutExpiredError(silence, phase=phase) from error
                self._hurry(min(self._end, began + seconds) - now)
            except OSError as error:
                raise ConnectError(f"{self._name}: {error}") from error

    def _hurry(self, left: float) -> None:
        """Let no call take longer than what is left."""
        if left <= 0:
            raise self._too_long()
        patience = min(left, self._look)
        if patience != self._patience:
            self._stream.set_patience(patience)
            self._patience = patience

    def _too_long(self) -> TimeoutExpiredError:
        whole = self._timeouts.whole(self._moving)
        return TimeoutExpiredError(f"{self._name}: the call took longer than {whole:.1f} s", phase="call")
