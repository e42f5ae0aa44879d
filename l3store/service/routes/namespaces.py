"""Register, list and drop namespaces."""

from __future__ import annotations

from fastapi import Response

from l3store.errors import RefusedError
from l3store.layout import parse_digest
from l3store.service.context import Service
from l3store.service.routing import model_response, resource_router
from l3store.service.shapes import (
    Dropped,
    NamespaceBody,
    NamespaceInfo,
    NamespaceList,
    Registered,
    near_shapes,
)

router = resource_router("/v1/namespaces", "namespaces")


@router.put(
    "/{digest}",
    response_model=Registered,
    responses={200: {"description": "known"}, 201: {"model": Registered, "description": "new"}},
)
async def register_namespace(digest: str, body: NamespaceBody, service: Service) -> Response:
    """Register a namespace. `near` lists stored namespaces that almost match, with the fields that differ."""
    parse_digest(digest)
    namespace = body.to_namespace()
    if namespace.digest != digest:
        raise RefusedError(f"these fields have the digest {namespace.digest}, not {digest}", digest=namespace.digest)
    created, near = await service.store.register(namespace, body.labels)
    registration, usage = service.store.registration(digest)
    neighbours = near_shapes(near, {n.digest: service.store.registration(n.digest) for n in near})
    registered = Registered(**NamespaceInfo.of(registration, usage).model_dump(), near=neighbours)
    return model_response(registered, 201 if created else 200)


@router.get("", response_model_exclude_none=True)
async def list_namespaces(service: Service) -> NamespaceList:
    """All namespaces, with object and byte counts."""
    return NamespaceList(namespaces=[NamespaceInfo.of(*known) for known in service.store.registrations()])


@router.get("/{digest}", response_model_exclude_none=True)
async def get_namespace(digest: str, service: Service) -> NamespaceInfo:
    """One namespace, with object and byte counts."""
    return NamespaceInfo.of(*service.store.registration(parse_digest(digest)))


@router.delete("/{digest}")
async def drop_namespace(digest: str, service: Service) -> Dropped:
    """Forget a namespace and delete its objects."""
    return Dropped(digest=digest, objects=await service.store.drop(parse_digest(digest)))
