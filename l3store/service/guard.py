"""Around all routes: what is checked of every request before its body, and what becomes of every exception.

A body has exactly one Content-Length and no Transfer-Encoding. How a connection ends whose body is refused is
`l3store.service.http`'s.
"""

from __future__ import annotations

import re
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from l3store.errors import LengthRequiredError, RefusedError, TooLargeError
from l3store.service.context import SCOPE_KEY, Context
from l3store.service.limits import Limits
from l3store.service.problems import answer_to
from l3store.service.wire import wire_of

LENGTH_KEY = "l3store.content_length"
"""Where the announced length of a body stands in the scope of its request."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_WITH_BODY = {"PUT", "POST", "PATCH"}


class Guard:
    """The one ASGI middleware: each layer around a route costs about as much as finding a hot cell."""

    def __init__(self, routes: ASGIApp, service: Context) -> None:
        self._routes = routes
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request, whatever happens. Raises what comes after an answer has begun."""
        began = time.monotonic()
        scope[SCOPE_KEY] = self._service
        answer = wire_of(scope) or _Noting(send)
        if isinstance(answer, _Noting):
            send = answer.send
        try:
            scope[LENGTH_KEY] = _checked_length(scope, self._service.limits)
            await self._routes(scope, receive, send)
        except Exception as error:
            if answer.status:
                raise
            await answer_to(error, scope)(scope, receive, send)
        finally:
            # By route, not by path: a path has a key in it.
            route = getattr(scope.get("route"), "path", "none")
            self._service.metrics.answered(scope["method"], route, answer.status, time.monotonic() - began)


class _Noting:
    """Notes the status of an answer on a server that is not ours."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


def _checked_length(scope: Scope, limits: Limits) -> int:
    """The Content-Length, 0 where no body is announced. Raises for framing, paths and sizes that we do not take."""
    if _CONTROL.search(scope["path"]):
        # A route's pattern would take a line feed at the end for nothing.
        raise RefusedError("the path has control characters")
    declared = _declared_length(scope)
    if declared:
        _check_size(scope, declared, limits)
    return declared


def _declared_length(scope: Scope) -> int:
    headers = dict(scope["headers"])
    if b"transfer-encoding" in headers:
        raise LengthRequiredError("a body needs a Content-Length; Transfer-Encoding is not taken")
    length = headers.get(b"content-length")
    if length is None:
        if scope["method"] in _WITH_BODY and not scope["path"].endswith("/suspect"):
            raise LengthRequiredError(f"{scope['method']} needs a Content-Length")
        return 0
    if [name for name, _ in scope["headers"]].count(b"content-length") > 1:
        raise RefusedError("more than one Content-Length")
    if not length.isdigit() or len(length) > 19:
        raise RefusedError("Content-Length is not a number")
    return int(length)


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
