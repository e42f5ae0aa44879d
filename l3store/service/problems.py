"""Every error as an RFC 9457 problem document."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match

from l3store.errors import L3Error, MethodNotAllowedError, NotRoutedError, RefusedError
from l3store.layout import LayoutError

MEDIA_TYPE = "application/problem+json"
_CLIENT_GONE = 499

_log = logging.getLogger("l3store.service")


def problem_response(error: L3Error, headers: Mapping[str, str] | None = None) -> Response:
    """The response for an error."""
    body = json.dumps(error.to_problem(), ensure_ascii=False).encode("utf-8", "backslashreplace")
    return Response(body, error.status, {**(headers or {}), **error.headers}, MEDIA_TYPE)


def install(app: FastAPI, routers: Sequence[APIRouter]) -> None:
    """Map every exception of an app of these routers to a problem document."""
    app.state.routers = routers
    app.add_exception_handler(L3Error, _on_l3_error)
    app.add_exception_handler(LayoutError, _on_layout_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_bug)


async def _on_l3_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, L3Error)
    return problem_response(error)


async def _on_layout_error(_request: Request, error: Exception) -> Response:
    members: dict[str, Any] = {}
    if field := getattr(error, "field", None):
        members["field"] = field
    return problem_response(RefusedError(str(error), **members))


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    issues = [{"where": ".".join(map(str, e["loc"])), "what": e["msg"]} for e in error.errors()[:20]]
    detail = "; ".join(f"{issue['where']}: {issue['what']}" for issue in issues[:3])
    if issues[0]["where"] == "body" and "json" not in request.headers.get("content-type", ""):
        detail += " (send JSON, with Content-Type: application/json)"
    return problem_response(RefusedError(detail, issues=issues))


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, L3Error):
        # FastAPI wraps what goes wrong while it reads a JSON body.
        return problem_response(error.__cause__)
    what = f"{request.method} {request.url.path[:200]}"
    if error.status_code == MethodNotAllowedError.status:
        return problem_response(MethodNotAllowedError(f"{what} is not offered"), {"Allow": _allowed(request)})
    if error.status_code == NotRoutedError.status:
        return problem_response(NotRoutedError(f"{what} is not a resource of this service; see /docs"))
    return problem_response(RefusedError(f"{what}: {error.detail}"))


async def _on_disconnect(_request: Request, _error: Exception) -> Response:
    # Nobody is left to read this; what was received of the body is dropped, and nothing was stored of it.
    return Response(status_code=_CLIENT_GONE)


async def _on_bug(request: Request, error: Exception) -> Response:
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return problem_response(L3Error("a fault of the service; its log has the details"))


def _allowed(request: Request) -> str:
    """The methods of all routes of a path: the router itself names those of the first alone."""
    methods: set[str] = set()
    for route in (route for router in request.app.state.routers for route in router.routes):
        if route.matches(dict(request.scope))[0] is not Match.NONE:
            methods |= route.methods
    return ", ".join(sorted(methods))
