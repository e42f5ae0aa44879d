"""Listening: the application on uvicorn."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from l3store.errors import HeadersTooLargeError, L3Error, RefusedError
from l3store.service.problems import MEDIA_TYPE

_KEEP_ALIVE_SECONDS = 75
_GRACE_SECONDS = 10
_BACKLOG = 2048
_MAX_HEADER_BYTES = 128 << 10
_LINGER_SECONDS = 5.0
_LINGER_BYTES = 64 << 20


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def run(app: FastAPI, listener: socket.socket, *, log_level: str = "info") -> None:
    """Serve until SIGINT or SIGTERM, then finish what is in flight."""
    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        log_config=None,
        log_level="warning" if log_level == "info" else log_level,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    uvicorn.Server(config).run(sockets=[listener])


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol, and how a connection ends.

    A connection that is closed while its client is still sending is reset, and the reset can overtake the answer. So
    our half is ended, a bounded amount of what still comes is dropped, and then the connection is closed. The other
    way round, a client that has ended its half still gets its answer. What is not HTTP is answered in its turn, with a
    problem document.
    """

    _transport: _ClosingTransport
    _failure: L3Error | None = None
    _ended = False
    _in_message = False
    _in_headers = False
    _header_bytes = 0
    _dropped = 0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = _ClosingTransport(transport, self._close)
        super().connection_made(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._failure is not None or self._transport.is_closing():
            self._drop(len(data))
            return
        continued = self._in_headers
        super().data_received(data)
        if continued and self._in_headers:
            self._header_bytes += len(data)
            if self._header_bytes > _MAX_HEADER_BYTES:
                self._fail(HeadersTooLargeError(f"a request line and headers of more than {_MAX_HEADER_BYTES} bytes"))

    def eof_received(self) -> bool:  # type: ignore[override]
        self._ended = True
        if self._transport.is_closing() or self.cycle is None or self.cycle.response_complete:
            return False
        self.cycle.keep_alive = False
        if self._in_message and not self._in_headers:
            self.cycle.more_body = False
            self.cycle.message_event.set()
        return True

    def on_message_begin(self) -> None:
        self._in_message = self._in_headers = True
        self._header_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._in_headers = False
        if self.parser.should_upgrade():
            # We speak nothing else, and the parser cannot go on behind an offer to.
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        self._in_message = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._failure is not None and self.cycle.response_complete and not self._transport.is_closing():
            self._answer_failure(self._failure)

    def send_400_response(self, msg: str) -> None:
        self._fail(RefusedError("this is not an HTTP/1.1 request, or its framing is ambiguous"))

    def _unsupported_upgrade_warning(self) -> None:
        """Offers to upgrade are ordinary: curl makes one where it could speak HTTP/2."""

    def _fail(self, error: L3Error) -> None:
        """Take no more requests. The error is the answer to what came last, so it waits for those before."""
        self._failure = error
        if self.cycle is None or self.cycle.response_complete:
            self._answer_failure(error)

    def _answer_failure(self, error: L3Error) -> None:
        body = json.dumps(error.to_problem()).encode()
        self._transport.write(
            f"HTTP/1.1 {error.status} {error.title}\r\ncontent-type: {MEDIA_TYPE}\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
            + body
        )
        self._transport.close()

    def _close(self) -> None:
        inner = self._transport.inner
        # Where it was not the client's idleness that ended it, more may be on its way.
        busy = self._in_message or self._failure is not None or not (self.cycle is None or self.cycle.keep_alive)
        if not busy or self._ended or inner.is_closing():
            inner.close()
            return
        inner.write_eof()
        self.flow.resume_reading()
        self._deadline = self.loop.call_later(_LINGER_SECONDS, inner.close)

    def _drop(self, count: int) -> None:
        self._dropped += count
        if self._dropped > _LINGER_BYTES:
            self._transport.inner.close()


class _ClosingTransport(asyncio.Transport):
    """A transport whose `close` is the protocol's."""

    def __init__(self, inner: asyncio.Transport, close: Callable[[], None]) -> None:
        super().__init__()
        self.inner = inner
        self._on_close = close
        self._closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.inner.write(data)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._on_close()

    def is_closing(self) -> bool:
        return self._closed or self.inner.is_closing()

    def pause_reading(self) -> None:
        self.inner.pause_reading()

    def resume_reading(self) -> None:
        self.inner.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.inner.get_extra_info(name, default)
