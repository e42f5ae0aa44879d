"""Batches of pages: match, missing, read, write."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import Request, Response

from l3store.errors import RefusedError, TooLargeError, WrongLengthError
from l3store.index import PageBytes, PageQuery
from l3store.layout import Range
from l3store.layout.sums import SUM_BYTES, Buffer
from l3store.service.context import Context, Service
from l3store.service.manifest import LENGTH_BYTES, MEDIA_TYPE, read_manifest
from l3store.service.responses import MEDIA_TYPE as BINARY
from l3store.service.responses import BytesResponse
from l3store.service.routing import resource_router
from l3store.service.shapes import Matched, Missing, PagesBody, ReadBody, WriteResults
from l3store.service.wire import BodyReader
from l3store.service.writing import Writing

router = resource_router("/v1/pages", "pages")


@router.post("/match")
async def match_pages(body: PagesBody, service: Service) -> Matched:
    """How many leading pages are present, every cell that is asked of each."""
    return Matched(pages=service.reader.match(_query(service, body)))


@router.post("/missing")
async def missing_pages(body: PagesBody, service: Service) -> Missing:
    """What a writer still has to send."""
    missing = service.reader.missing(_query(service, body))
    return Missing(missing=[(position, str(coordinate)) for position, coordinate in missing])


@router.post(
    "/read",
    response_class=Response,
    responses={
        200: {
            "description": "exactly `L3-Pages` pages of bytes, then their sums where asked",
            "headers": {"L3-Pages": {"schema": {"type": "integer"}}},
            "content": {BINARY: {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def read_pages(body: ReadBody, service: Service) -> Response:
    """The leading pages that are present. Page order is (page, head group, layer), layer order (layer, page, group)."""
    query = _query(service, body)
    asked = len(query.page_hashes) * query.page_bytes
    if asked > service.limits.max_read_bytes:
        fits = service.limits.max_read_bytes // query.page_bytes
        raise TooLargeError(
            f"{asked} bytes in one read; ask for {fits} pages of {query.page_bytes} bytes at most, or for fewer layers",
            limit=service.limits.max_read_bytes,
        )
    # Bytes leave with their sums, or verified.
    found = await service.reader.read_pages(query, body.order, verify=not body.sums)
    length = found.length
    if body.sums:
        length += found.length // query.entry.namespace.cell_bytes * SUM_BYTES
    return BytesResponse(
        _body(found, with_sums=body.sums),
        status=200,
        length=length,
        headers=[(b"l3-pages", b"%d" % found.pages)],
        done=found.close,
        metrics=service.metrics,
    )


_WRITE_BODY: dict[str, Any] = {
    "required": True,
    "description": "4 bytes little-endian length of a JSON manifest `[{key, length, sums}, ...]`, it, and the bodies",
    "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
}


@router.post("/write", openapi_extra={"requestBody": _WRITE_BODY}, response_model_exclude_none=True)
async def write_pages(request: Request, service: Service) -> WriteResults:
    """Store many objects. Each is created, exists or has an error of its own; the others are stored all the same."""
    declared: int = request.scope["l3store.content_length"]
    body = BodyReader(request)
    if declared < LENGTH_BYTES:
        raise WrongLengthError("a body begins with 4 bytes: the length of its manifest")
    size = int.from_bytes(await body.read(LENGTH_BYTES), "little")
    bodies = declared - LENGTH_BYTES - size
    if size > service.limits.max_json_bytes:
        most = service.limits.max_json_bytes
        raise TooLargeError(f"a manifest of {size} bytes; {most} at most: write fewer objects at once", limit=most)
    if bodies < 0:
        raise WrongLengthError(f"a manifest of {size} bytes in a body of {declared}")
    with await service.pool.acquire(size) as held:
        await body.read_into(held.view)
        items = read_manifest(bytes(held.view), service.store, body_bytes=bodies, limits=service.limits)
    results = await Writing(service, body).run(items)
    service.store.refresh([item.body.key for item in items if item.body is not None])
    return WriteResults(results=results)


def _query(service: Context, body: PagesBody) -> PageQuery:
    hashes = body.page_hashes
    if not hashes:
        raise RefusedError("page_hashes is empty: ask for at least one page")
    if len(hashes) > service.limits.max_pages:
        raise TooLargeError(
            f"{len(hashes)} pages in one request; {service.limits.max_pages} at most", limit=service.limits.max_pages
        )
    if len(set(hashes)) != len(hashes):
        first: dict[str, int] = {}
        twice = next(i for i, page_hash in enumerate(hashes) if first.setdefault(page_hash, i) != i)
        raise RefusedError(f"pages {first[hashes[twice]]} and {twice} are the same: no prefix has a page twice")
    return service.reader.query(body.namespace, hashes, _range(body.layers), _range(body.heads))


def _range(pair: tuple[int, int] | None) -> Range | None:
    return None if pair is None else Range(*pair)


async def _body(found: PageBytes, *, with_sums: bool) -> AsyncIterator[Sequence[Buffer]]:
    sums: list[Buffer] = []
    left = found.length
    async for cells in found:
        if not with_sums:
            yield cells.views
            continue
        sums.append(cells.sums.packed)
        left -= cells.length
        yield cells.views if left else [*cells.views, *sums]
