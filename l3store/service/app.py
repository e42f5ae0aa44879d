"""The FastAPI application over a store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from l3store import __version__
from l3store.index import Reader, Store
from l3store.service import problems
from l3store.service.context import Context
from l3store.service.guard import Guard
from l3store.service.limits import Limits
from l3store.service.metrics import Metrics
from l3store.service.routes import ROUTERS

_log = logging.getLogger("l3store.service")


class App(FastAPI):
    """FastAPI whose requests go through one guard to their routes.

    Its schema says what this service answers: problem documents instead of FastAPI's 422.
    """

    guard: Guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        scope["app"] = self
        await self.guard(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            schema = super().openapi()
            for operations in schema["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)
                    problem = operation["responses"]["default"]["content"]
                    problem[problems.MEDIA_TYPE] = problem.pop("application/json")
            for unused in ("HTTPValidationError", "ValidationError"):
                schema["components"]["schemas"].pop(unused, None)
            self.openapi_schema = schema
        return self.openapi_schema


def create_app(store: Store, limits: Limits | None = None, *, on_ready: Callable[[], None] = lambda: None) -> FastAPI:
    """The service over a store, which it starts and closes. ``on_ready`` is called when the index is complete."""
    limits = (limits or Limits()).within(store.tier.pool.total)
    metrics = Metrics(store)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        # Listening begins at once: who asks before the index is complete is told to come back.
        starting = asyncio.create_task(_start(store, on_ready))
        try:
            yield
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await store.close()

    app = App(
        title="l3store",
        version=__version__,
        summary="A third-level KV cache for LLM serving",
        lifespan=lifespan,
        redirect_slashes=False,
    )
    # Not included but taken over, before FastAPI's own: one flat list in the order of use is searched fastest.
    app.router.routes[:0] = [route for router in ROUTERS for route in router.routes]
    app.guard = Guard(app.router, Context(store=store, reader=Reader(store), limits=limits, metrics=metrics))
    return app


async def _start(store: Store, on_ready: Callable[[], None]) -> None:
    try:
        await store.start()
    except Exception:  # noqa: BLE001 - whatever it was: the service stays up, answers 503 and says why
        _log.exception("the store could not start")
    else:
        on_ready()
