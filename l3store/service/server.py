"""Listening: the application on uvicorn's server, over our own connections."""

from __future__ import annotations

import logging
import socket
import sys
from typing import Literal

import uvicorn
from fastapi import FastAPI

from l3store.service.http import WireConnection

_KEEP_ALIVE_SECONDS = 75
_GRACE_SECONDS = 7
_BACKLOG = 2048
_REMEMBERED = 100
_SWITCH_SECONDS = 0.0005


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


def run(
    app: FastAPI,
    listener: socket.socket,
    *,
    loop: Literal["auto", "asyncio", "uvloop"] = "auto",
    log_level: str = "info",
) -> None:
    """Serve until SIGINT or SIGTERM, then finish what is in flight."""
    # A disk thread gives the interpreter up for every system call, and waits up to so long to get it back from a busy
    # loop, 5 ms by default. How much this gains is not measured well yet: docs/performance.md.
    sys.setswitchinterval(_SWITCH_SECONDS)
    logging.getLogger("asyncio").addFilter(Sparing())
    config = uvicorn.Config(
        app,
        loop=loop,
        http=WireConnection,  # type: ignore[arg-type]  # uvicorn's own are all of the unbuffered kind
        ws="none",
        log_config=None,
        log_level="warning" if log_level == "info" else log_level,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    uvicorn.Server(config).run(sockets=[listener])


class Sparing(logging.Filter):
    """Lets each message through once a second.

    Where no descriptor is left, asyncio logs a traceback for every place of its backlog.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        message = str(record.msg)[:80]
        if record.created - self._last.get(message, 0.0) < 1.0:
            return False
        if len(self._last) > _REMEMBERED:
            self._last.clear()
        self._last[message] = record.created
        return True
