"""What is checked of every request before its body: framing and size. And how a body that is refused is got rid of.

A body has exactly one Content-Length and no Transfer-Encoding. An error that is answered while the client is still
sending has to reach it: closing at once would reset the connection under the unread answer. So the answer is sent
whole, a bounded amount of what still comes is read and dropped, and then the connection is closed.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from l3store.errors import L3Error, LengthRequiredError, RefusedError, TooLargeError
from l3store.service.limits import Limits
from l3store.service.problems import problem_response

_WITH_BODY = {"PUT", "POST", "PATCH"}
_DRAIN_BYTES = 64 << 20
_DRAIN_SECONDS = 5.0
_FIRST_ERROR = 400


class Framing:
    """ASGI middleware around the whole app."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(receive, send)
        try:
            declared = _declared_length(scope)
            body.left = declared
            _check_size(scope, declared, self._limits)
        except L3Error as error:
            await problem_response(error)(scope, body.receive, body.send)
            return
        scope["l3store.content_length"] = declared
        await self._app(scope, body.receive, body.send)


class _Body:
    """Knows how much of a request's body is still to come, and closes the connection behind an early error."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._closing = False
        self.left = 0

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self.left -= len(message.get("body", b""))
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= _FIRST_ERROR and self.left != 0:
            self._closing = True
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if not (self._closing and last):
            await self._send(message)
            return
        await self._send({**message, "more_body": True})
        await self._drain()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _drain(self) -> None:
        dropped = 0
        try:
            async with asyncio.timeout(_DRAIN_SECONDS):
                while dropped < _DRAIN_BYTES:
                    message = await self._receive()
                    dropped += len(message.get("body", b""))
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return
        except TimeoutError:
            return


def _declared_length(scope: Scope) -> int:
    """The Content-Length, 0 where no body is announced. Raises for framing that we do not take."""
    lengths = [value for name, value in scope["headers"] if name == b"content-length"]
    if any(name == b"transfer-encoding" for name, _ in scope["headers"]):
        raise LengthRequiredError("a body needs a Content-Length; Transfer-Encoding is not taken")
    if len(lengths) > 1:
        raise RefusedError("more than one Content-Length")
    if not lengths:
        if scope["method"] in _WITH_BODY and not scope["path"].endswith("/suspect"):
            raise LengthRequiredError(f"{scope['method']} needs a Content-Length")
        return 0
    if not lengths[0].isdigit() or len(lengths[0]) > 19:
        raise RefusedError("Content-Length is not a number")
    return int(lengths[0])


def _check_size(scope: Scope, declared: int, limits: Limits) -> None:
    """Refuse a body beyond its limit before a byte of it is received."""
    path = scope["path"]
    limit = limits.max_json_bytes
    if path.startswith("/v1/objects/") and scope["method"] == "PUT":
        limit = limits.max_object_bytes
    elif path == "/v1/pages/write":
        limit = limits.max_write_bytes
    if declared > limit:
        raise TooLargeError(f"a body of {declared} bytes; this resource takes {limit} at most", limit=limit)
