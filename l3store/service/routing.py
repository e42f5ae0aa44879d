"""How the routes of the wire are made and called."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from l3store.errors import RefusedError
from l3store.service.context import context_of
from l3store.service.shapes import Problem

_Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class WireRoute(APIRoute):
    """A FastAPI route, found, guarded and described like any other, and called directly.

    Its endpoint takes ``request``, ``service`` and a pydantic ``body``, any of them, and returns a response or a
    pydantic model. Resolving more general parameters takes longer than reading a hot cell.
    """

    def get_route_handler(self) -> _Handler:
        endpoint = self.endpoint
        hints = typing.get_type_hints(endpoint)
        wanted = inspect.signature(endpoint).parameters
        body_type: type[BaseModel] | None = hints.get("body")
        status = self.status_code or 200

        async def handle(request: Request) -> Response:
            arguments: dict[str, Any] = {}
            if "request" in wanted:
                arguments["request"] = request
            if "service" in wanted:
                arguments["service"] = context_of(request)
            if body_type is not None:
                arguments["body"] = await _read(request, body_type)
            result = await endpoint(**arguments)
            if isinstance(result, BaseModel):
                text = result.model_dump_json(exclude_none=self.response_model_exclude_none)
                return Response(text, status, media_type="application/json")
            answer: Response = result
            return answer

        return handle


def resource_router(prefix: str, tag: str, route: type[APIRoute] = APIRoute) -> APIRouter:
    """A router for one resource, whose errors are described as problem documents."""
    return APIRouter(
        prefix=prefix,
        tags=[tag],
        route_class=route,
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
