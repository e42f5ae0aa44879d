"""What is checked of every request before its body: framing and size.

A body has exactly one Content-Length and no Transfer-Encoding. How a connection ends whose body is refused is
`l3store.service.http`'s.
"""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

from l3store.errors import L3Error, LengthRequiredError, RefusedError, TooLargeError
from l3store.service.limits import Limits
from l3store.service.problems import problem_response

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_WITH_BODY = {"PUT", "POST", "PATCH"}


class Framing:
    """ASGI middleware around the whole app."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            _check_path(scope)
            declared = _declared_length(scope)
            _check_size(scope, declared, self._limits)
        except L3Error as error:
            await problem_response(error)(scope, receive, send)
            return
        scope["l3store.content_length"] = declared
        await self._app(scope, receive, send)


def _check_path(scope: Scope) -> None:
    if _CONTROL.search(scope["path"]):
        # A route's pattern would take a line feed at the end for nothing.
        raise RefusedError("the path has control characters")


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
