"""One request and its answer: the ASGI side of a connection.

The application gets ordinary ASGI messages, and in ``scope["extensions"]["l3store.wire"]`` this object, whose
`receive_into` and `send_buffers` do the same with bytes that stay where they are.
"""

from __future__ import annotations

import contextlib
import http
import logging
import time
from collections.abc import Callable, Sequence
from email.utils import formatdate
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message

from l3store.layout.sums import Buffer
from l3store.service.http.head import Head
from l3store.service.http.incoming import Incoming
from l3store.service.http.outgoing import Outgoing

EXTENSION = "l3store.wire"

_PIECE = 256 << 10
_ERROR = 400
_NO_BODY = {204, 304}

_log = logging.getLogger("l3store.service")


class Exchange:
    """See the module.

    last      the connection ends behind the answer
    complete  the answer is all out
    status    of the answer; 0 before the application has begun one
    """

    def __init__(
        self, head: Head, incoming: Incoming, outgoing: Outgoing, app_state: dict[str, Any], client: Any, server: Any
    ) -> None:
        self.head = head
        self.last = not head.keep_alive or not head.framed
        self.complete = False
        self.status = 0
        self._incoming = incoming
        self._outgoing = outgoing
        self._continue = head.expects and head.version == "1.1"
        self._start: Message | None = None
        self._started = False
        self._body_told = False
        # Bytes of the answer that are still to be sent; None where it ends with the connection.
        self._left: int | None = None
        self._scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": head.version,
            "method": head.method,
            "scheme": "http",
            "path": head.path,
            "raw_path": head.target,
            "query_string": head.query,
            "root_path": "",
            "headers": head.headers,
            "client": client[:2] if client else None,
            "server": server[:2] if server else None,
            "state": app_state.copy(),
            "extensions": {EXTENSION: self},
        }

    @property
    def continues(self) -> bool:
        """Whether another request may follow on this connection."""
        return self.complete and not self.last

    async def run(self, app: ASGIApp) -> None:
        """Have the application answer."""
        try:
            await app(self._scope, self.receive, self.send)
        except Exception:  # noqa: BLE001 - the connection ends, and the service goes on
            # Where an answer is complete, the application itself has answered for its fault, and logged it.
            if not self.complete:
                _log.exception("%s %s failed", self.head.method, self.head.path)

    # ASGI

    async def receive(self) -> Message:
        if self._incoming.left:
            try:
                await self._ask()
                body = await self._incoming.read_some(_PIECE)
            except ConnectionError:
                return {"type": "http.disconnect"}
            self._body_told = not self._incoming.left
            return {"type": "http.request", "body": bytes(body), "more_body": self._incoming.left > 0}
        if not self._body_told:
            self._body_told = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._incoming.gone()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            body = message.get("body", b"")
            # Nothing is said to an application that answers a client who is gone; ASGI has it find out by `receive`.
            with contextlib.suppress(ConnectionError):
                await self._send([body] if len(body) else [], end=not message.get("more_body", False))

    # The extension

    async def receive_into(self, view: memoryview, arrived: Callable[[int], None] | None = None) -> None:
        """Fill ``view`` from the body; ``arrived`` is told, as they come, how many of its bytes are there.

        Raises ClientDisconnect where the client goes away before.
        """
        self._body_told = True
        try:
            if self._continue:
                await self._ask()
            await self._incoming.read_into(view, arrived)
        except ConnectionError as error:
            raise ClientDisconnect from error

    async def skip(self, count: int) -> None:
        """Drop bytes of the body. Raises ClientDisconnect where the client goes away before."""
        self._body_told = True
        try:
            await self._ask()
            await self._incoming.drop_body(count)
        except ConnectionError as error:
            raise ClientDisconnect from error

    async def send_buffers(self, buffers: Sequence[Buffer]) -> None:
        """Send a piece of the answer's body from where it lies. It may be used again when this returns.

        Raises ClientDisconnect where the client is gone.
        """
        try:
            await self._send(buffers, end=False)
        except ConnectionError as error:
            raise ClientDisconnect from error

    async def _ask(self) -> None:
        """Say 100 Continue to a client that waits for it."""
        if self._continue:
            self._continue = False
            if not self._incoming.head_bytes:
                await self._outgoing.send([b"HTTP/1.1 100 Continue\r\n\r\n"])

    async def _send(self, buffers: Sequence[Buffer], *, end: bool) -> None:
        size = sum(map(len, buffers))
        out: list[Buffer] = []
        if not self._started:
            self._started = True
            out.append(self._answer_head(size if end else None))
        if size and self.head.method != "HEAD" and self.status not in _NO_BODY:
            self._count(size)
            out += buffers
        if out:
            await self._outgoing.send(out)
        # Where the length was told, the answer is complete when so much is sent, whatever the application still says.
        self.complete = not self._left if self._left is not None else end

    def _count(self, size: int) -> None:
        if self._left is not None:
            self._left -= size
            if self._left < 0:
                raise ConnectionAbortedError("an answer with more bytes than it announced")

    def _answer_head(self, whole: int | None) -> bytes:
        """Status line and headers. ``whole``: the bytes of a body that is all here."""
        assert self._start is not None, "a body before http.response.start"
        status = self.status
        lines = [_STATUS_LINES[status], _date()]
        length = whole
        for name, value in self._start.get("headers", ()):
            # ASGI has names in lower case.
            if name == b"content-length":
                length = int(value)
            elif name == b"connection":
                self.last = self.last or b"close" in value.lower()
            else:
                lines.append(b"%b: %b\r\n" % (name, value))
        if status in _NO_BODY:
            self._left = 0
        else:
            self._left = 0 if self.head.method == "HEAD" else length
            if length is None:
                self.last = True
            else:
                lines.append(b"content-length: %d\r\n" % length)
        # An answer that does not wait for the body: the client is to stop sending, or was never told to begin.
        if self._incoming.left and (status >= _ERROR or self._continue):
            self.last = True
        if self.last:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)


def _reason(status: int) -> str:
    try:
        return http.HTTPStatus(status).phrase
    except ValueError:
        return ""


_STATUS_LINES = {status: f"HTTP/1.1 {status} {_reason(status)}\r\n".encode() for status in range(100, 600)}
_dated: tuple[int, bytes] = (0, b"")


def _date() -> bytes:
    """The Date header, made once a second."""
    global _dated
    now = int(time.time())
    if _dated[0] != now:
        _dated = (now, f"date: {formatdate(now, usegmt=True)}\r\n".encode())
    return _dated[1]
