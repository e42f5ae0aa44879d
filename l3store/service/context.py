"""What every route works with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from l3store.backend import BufferPool
from l3store.index import Reader, Store
from l3store.service.limits import Limits
from l3store.service.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Context:
    store: Store
    reader: Reader
    limits: Limits
    metrics: Metrics

    @property
    def pool(self) -> BufferPool:
        """The memory for bodies."""
        return self.store.tier.pool


def context_of(request: Request) -> Context:
    """The context of the service that a request came to."""
    context = request.app.state.context
    assert isinstance(context, Context)
    return context


async def _context(request: Request) -> Context:
    # A coroutine, as FastAPI runs plain functions on a thread.
    return context_of(request)


Service = Annotated[Context, Depends(_context)]
