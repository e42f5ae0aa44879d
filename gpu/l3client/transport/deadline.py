"""httpx with a deadline for a whole call: its own timeouts begin anew with every byte that comes."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import httpcore
import httpx

_KEEP_SECONDS = 5.0

_end: ContextVar[float] = ContextVar("l3client_deadline")


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Calls over a `DeadlineTransport` in this block end with a timeout when it has taken so long."""
    token = _end.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _end.reset(token)


class DeadlineTransport(httpx.HTTPTransport):
    """What httpx would use, over connections that look at the deadline."""

    def __init__(self, *, limit: int, context: ssl.SSLContext | None) -> None:
        super().__init__(verify=context or False, trust_env=False)
        # The only place where httpcore takes another network; httpx passes none on.
        self._pool = httpcore.ConnectionPool(
            ssl_context=context,
            max_connections=limit,
            keepalive_expiry=_KEEP_SECONDS,
            network_backend=_Network(httpcore.SyncBackend()),
        )


class _Network(httpcore.NetworkBackend):
    def __init__(self, network: httpcore.NetworkBackend) -> None:
        self._network = network

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        seconds = _within(timeout, httpcore.ConnectTimeout)
        return _Stream(self._network.connect_tcp(host, port, seconds, local_address, socket_options))


class _Stream(httpcore.NetworkStream):
    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream = stream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _within(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _within(timeout, httpcore.WriteTimeout))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            # Closing alone does not wake a thread that waits for this socket. Not the one of an SSLSocket, which takes
            # away what that thread is using.
            socket.socket.shutdown(self._stream.get_extra_info("socket"), socket.SHUT_RDWR)
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        seconds = _within(timeout, httpcore.ConnectTimeout)
        return _Stream(self._stream.start_tls(ssl_context, server_hostname, seconds))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _within(timeout: float | None, expired: type[httpcore.TimeoutException]) -> float | None:
    left = _end.get(None)
    if left is None:
        return timeout
    left -= time.monotonic()
    if left <= 0:
        raise expired("the call as a whole took too long")
    return left if timeout is None else min(left, timeout)
