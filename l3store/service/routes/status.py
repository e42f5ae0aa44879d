"""How the service is: alive, ready, measured, which version."""

from __future__ import annotations

from fastapi import Response

from l3store import __version__
from l3store.service.context import Service
from l3store.service.metrics import CONTENT_TYPE
from l3store.service.routing import resource_router
from l3store.service.shapes import Health, Version

router = resource_router("", "status")


@router.get("/healthz")
async def alive() -> Health:
    """The process answers."""
    return Health()


@router.get("/readyz")
async def ready(service: Service) -> Health:
    """The index is complete and the disk takes writes; else 503 that says why."""
    await service.store.check_health()
    return Health()


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(service: Service) -> Response:
    """Prometheus metrics."""
    return Response(service.metrics.exposition(), media_type=CONTENT_TYPE)


@router.get("/version")
async def version(service: Service) -> Version:
    """What this is, and what one request may ask."""
    return Version(version=__version__, limits=service.limits.public())
