"""How routes are made and called."""

from __future__ import annotations

import inspect
import typing
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from l3store.errors import RefusedError
from l3store.service.context import context_of
from l3store.service.shapes import Problem


class WireRoute(APIRoute):
    """A FastAPI route, found, guarded and described like any other, and called directly.

    Its endpoint is a coroutine function that takes ``request``, ``service``, a pydantic ``body`` and parameters of the
    path as text, any of them, and returns a response, a pydantic model, or None. Resolving more general parameters
    takes longer than reading a hot cell.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._methods = frozenset(self.methods or ())
        wanted = inspect.signature(self.endpoint).parameters
        self._wants_request = "request" in wanted
        self._wants_service = "service" in wanted
        self._body: type[BaseModel] | None = typing.get_type_hints(self.endpoint).get("body")
        self._from_path = tuple(name for name in wanted if name not in {"request", "service", "body"})

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        found = self.path_regex.match(scope["path"]) if scope["type"] == "http" else None
        if found is None:
            return Match.NONE, {}
        match = Match.FULL if scope["method"] in self._methods else Match.PARTIAL
        return match, {"endpoint": self.endpoint, "path_params": found.groupdict(), "route": self}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in self._methods:
            # Raises what says so.
            await super().handle(scope, receive, send)
            return
        request = Request(scope, receive, send)
        arguments: dict[str, Any] = {name: scope["path_params"][name] for name in self._from_path}
        if self._wants_request:
            arguments["request"] = request
        if self._wants_service:
            arguments["service"] = context_of(request)
        if self._body is not None:
            arguments["body"] = await _read(request, self._body)
        await self._response(await self.endpoint(**arguments))(scope, receive, send)

    def _response(self, result: Response | BaseModel | None) -> Response:
        if isinstance(result, Response):
            return result
        status = self.status_code or 200
        if result is None:
            return Response(status_code=status)
        return model_response(result, status, exclude_none=self.response_model_exclude_none)


def model_response(model: BaseModel, status: int, *, exclude_none: bool = False) -> Response:
    """A pydantic model as JSON."""
    return Response(model.model_dump_json(exclude_none=exclude_none), status, media_type="application/json")


def resource_router(prefix: str, tag: str) -> APIRouter:
    """A router for one resource, whose errors are described as problem documents."""
    return APIRouter(
        prefix=prefix,
        tags=[tag],
        route_class=WireRoute,
        responses={"default": {"model": Problem, "description": "problem"}},
        generate_unique_id_function=_operation_id,
    )


async def _read(request: Request, kind: type[BaseModel]) -> BaseModel:
    """The JSON body of a request. Raises `RefusedError`, or RequestValidationError as FastAPI does."""
    # A form on some web page can send anything but this to a service on loopback.
    if "json" not in request.headers.get("content-type", ""):
        raise RefusedError("body: send JSON, with Content-Type: application/json")
    try:
        return kind.model_validate_json(await request.body())
    except ValidationError as error:
        issues = error.errors(include_url=False, include_context=False)
        raise RequestValidationError([{**issue, "loc": ("body", *issue["loc"])} for issue in issues]) from error


def _operation_id(route: APIRoute) -> str:
    return route.name
