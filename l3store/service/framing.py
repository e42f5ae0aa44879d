"""What is checked of every request before its body: framing and size. And when a connection has to end.

A body has exactly one Content-Length and no Transfer-Encoding. An answer that does not wait for the body says that the
connection ends behind it; how it ends without resetting the answer is `l3store.service.server`'s.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from l3store.errors import L3Error, LengthRequiredError, RefusedError, TooLargeError, WrongLengthError
from l3store.service.limits import Limits
from l3store.service.problems import problem_response

_WITH_BODY = {"PUT", "POST", "PATCH"}
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
        body = _Body(receive, send, expects=any(name == b"expect" for name, _ in scope["headers"]))
        try:
            _check_head(scope)
            declared = _declared_length(scope)
            body.expect(declared)
            _check_size(scope, declared, self._limits)
        except L3Error as error:
            await problem_response(error)(scope, body.receive, body.send)
            return
        scope["l3store.content_length"] = declared
        await self._app(scope, body.receive, body.send)


class _Body:
    """Knows how much of a request's body is still to come. ``expects``: its sender may wait to be asked for it."""

    def __init__(self, receive: Receive, send: Send, *, expects: bool) -> None:
        self._receive = receive
        self._send = send
        self._expects = expects
        self._declared = 0
        # A body whose length cannot be told is one that is still to come.
        self._left = 1

    def expect(self, declared: int) -> None:
        self._declared = self._left = declared

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            if self._left > 0 and not message.get("more_body", False):
                raise WrongLengthError(
                    f"the body ended after {self._declared - self._left} of the {self._declared} bytes announced"
                )
        return message

    async def send(self, message: Message) -> None:
        # What follows a refused body cannot be told from it, nor whether a client that waits to be asked sends it.
        if (
            message["type"] == "http.response.start"
            and self._left
            and (message["status"] >= _FIRST_ERROR or self._expects)
        ):
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        await self._send(message)


def _check_head(scope: Scope) -> None:
    if any(ord(c) < 0x20 or ord(c) == 0x7F for c in scope["path"]):
        # A route's pattern would take a line feed at the end for nothing.
        raise RefusedError("the path has control characters")
    names = {name for name, _ in scope["headers"]}
    if b"upgrade" in names and names & {b"content-length", b"transfer-encoding"}:
        # The parser takes what follows an offer to upgrade for the other protocol.
        raise RefusedError("an offer to upgrade comes with a body: send one without the other")


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
