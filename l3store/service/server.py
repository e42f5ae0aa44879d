"""Listening: the application on uvicorn."""

from __future__ import annotations

import json
import socket

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from l3store.errors import RefusedError
from l3store.service.problems import MEDIA_TYPE

_KEEP_ALIVE_SECONDS = 75
_GRACE_SECONDS = 10
_BACKLOG = 2048


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
    """uvicorn's protocol, whose answer to what is not HTTP is a problem document too."""

    def send_400_response(self, msg: str) -> None:
        problem = RefusedError("this is not an HTTP/1.1 request, or its framing is ambiguous").to_problem()
        body = json.dumps(problem).encode()
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\n"
            b"content-type: " + MEDIA_TYPE.encode() + b"\r\n"
            b"content-length: " + str(len(body)).encode() + b"\r\n"
            b"connection: close\r\n\r\n" + body
        )
        self.transport.close()
