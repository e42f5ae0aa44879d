"""What every route works with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from l3store.backend import BufferPool
from l3store.index import Reader, Store
from l3store.service.limits import Limits
from l3store.service.metrics import Metrics

SCOPE_KEY = "l3store.service"
"""Where the context stands in the scope of a request."""


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
    context: Context = request.scope[SCOPE_KEY]
    return context


Service = Annotated[Context, Depends(context_of)]
