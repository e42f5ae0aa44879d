"""Every error as an RFC 9457 problem document."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from l3store.errors import L3Error, MethodNotAllowedError, NotRoutedError, RefusedError
from l3store.layout import LayoutError

MEDIA_TYPE = "application/problem+json"
_CLIENT_GONE = 499

_log = logging.getLogger("l3store.service")


def problem_response(error: L3Error, headers: Mapping[str, str] | None = None) -> Response:
    """The response for an error."""
    body = json.dumps(error.to_problem(), ensure_ascii=False).encode("utf-8", "backslashreplace")
    return Response(body, error.status, {**(headers or {}), **error.headers}, MEDIA_TYPE)


def answer_to(error: Exception, scope: Scope) -> Response:
    """What a request is answered that ended in an exception, before anything else was answered."""
    if isinstance(error, L3Error):
        return problem_response(error)
    if isinstance(error, LayoutError):
        field = getattr(error, "field", None)
        return problem_response(RefusedError(str(error), **({"field": field} if field else {})))
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    if isinstance(error, HTTPException):
        return _not_routed(error, scope)
    if isinstance(error, ClientDisconnect):
        # Nobody is left to read this; what was received of the body is dropped, and nothing was stored of it.
        return Response(status_code=_CLIENT_GONE)
    _log.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
    return problem_response(L3Error("a fault of the service; its log has the details"))


def _invalid(error: RequestValidationError) -> Response:
    issues = [{"where": ".".join(map(str, e["loc"])), "what": e["msg"]} for e in error.errors()[:20]]
    detail = "; ".join(f"{issue['where']}: {issue['what']}" for issue in issues[:3])
    return problem_response(RefusedError(detail, issues=issues))


def _not_routed(error: HTTPException, scope: Scope) -> Response:
    what = f"{scope['method']} {scope['path'][:200]}"
    if error.status_code == MethodNotAllowedError.status:
        return problem_response(MethodNotAllowedError(f"{what} is not offered"), {"Allow": _allowed(scope)})
    if error.status_code == NotRoutedError.status:
        return problem_response(NotRoutedError(f"{what} is not a resource of this service; see /docs"))
    return problem_response(RefusedError(f"{what}: {error.detail}"))


def _allowed(scope: Scope) -> str:
    """The methods of all routes of a path: the router itself names those of the first alone."""
    methods: set[str] = set()
    for route in scope["app"].routes:
        if route.matches(dict(scope))[0] is not Match.NONE:
            methods |= route.methods
    return ", ".join(sorted(methods))
