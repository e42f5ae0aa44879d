"""Batches of pages: match, missing, read, write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from typing import Any

from fastapi import Request, Response

from l3store.backend import NewObject
from l3store.errors import L3Error, RefusedError, TooLargeError, WrongLengthError
from l3store.index import PageBytes, PageQuery
from l3store.layout import Range
from l3store.layout.sums import SUM_BYTES, Buffer
from l3store.service.context import Context, Service
from l3store.service.manifest import LENGTH_BYTES, MEDIA_TYPE, Item, read_manifest
from l3store.service.receiving import received
from l3store.service.responses import MEDIA_TYPE as BINARY
from l3store.service.responses import BytesResponse
from l3store.service.routing import WireRoute, resource_router
from l3store.service.shapes import Matched, Missing, PagesBody, ReadBody, WriteResult, WriteResults
from l3store.service.wire import BodyReader

router = resource_router("/v1/pages", "pages", WireRoute)

_WRITE_BATCH_BYTES = 8 << 20
_WRITE_SHARE = 8
"""Bodies of a write are handed to the backend together up to this size, or share of the memory, while the next come."""


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
        _body(service, found, with_sums=body.sums),
        status=200,
        length=length,
        headers={"L3-Pages": str(found.pages)},
        done=found.close,
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
    results = await _Writing(service, body).run(items)
    service.store.refresh([item.key for item in items if item.key is not None])
    return WriteResults(results=results)


class _Writing:
    """Receives the bodies of one write and stores them in batches, one batch being stored while the next arrives."""

    def __init__(self, service: Context, body: BodyReader) -> None:
        self._service = service
        self._body = body

    async def run(self, items: list[Item]) -> list[WriteResult]:
        results: list[WriteResult] = []
        storing: asyncio.Task[list[WriteResult]] | None = None
        try:
            for batch in _batches(items, min(_WRITE_BATCH_BYTES, self._service.pool.total // _WRITE_SHARE)):
                with ExitStack() as held:
                    bodies = [await self._receive(item, held) for item in batch]
                    if storing is not None:
                        results += await storing
                    storing = asyncio.create_task(self._store(batch, bodies, held.pop_all()))
        finally:
            # What was received whole is stored, even where its sender went away in the middle of the next.
            if storing is not None:
                results += await storing
        return results

    async def _receive(self, item: Item, held: ExitStack) -> NewObject | L3Error | None:
        """One body, verified; None where it is not needed, an error where bytes and sums disagree."""
        if item.key is None or self._service.store.has(item.key):
            await self._body.skip(item.length)
            return None
        buffer = held.enter_context(await self._service.pool.acquire(item.length))
        await self._body.read_into(buffer.view)
        self._service.metrics.received.inc(item.length)
        try:
            return await received(item.key, buffer, item.cell_bytes, item.sums)
        except L3Error as error:
            return error

    async def _store(
        self, batch: list[Item], bodies: list[NewObject | L3Error | None], held: ExitStack
    ) -> list[WriteResult]:
        with held:
            stored = iter(await self._service.store.put([made for made in bodies if isinstance(made, NewObject)]))
        return [
            _result(item, next(stored) if isinstance(made, NewObject) else made)
            for item, made in zip(batch, bodies, strict=True)
        ]


def _result(item: Item, outcome: bool | L3Error | None) -> WriteResult:
    if item.error is not None:
        return WriteResult(key=item.text, status="error", detail=item.error)
    if isinstance(outcome, L3Error):
        return WriteResult(key=item.text, status="error", detail=outcome.detail)
    return WriteResult(key=item.text, status="created" if outcome else "exists")


def _batches(items: list[Item], most: int) -> list[list[Item]]:
    batches: list[list[Item]] = []
    size = 0
    for item in items:
        if size + _held_bytes(item) > most or not batches:
            batches.append([])
            size = 0
        batches[-1].append(item)
        size += _held_bytes(item)
    return batches


def _held_bytes(item: Item) -> int:
    """What a body takes in memory: one with an error is dropped as it comes."""
    return 0 if item.key is None else item.length


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


async def _body(service: Context, found: PageBytes, *, with_sums: bool) -> AsyncIterator[Sequence[Buffer]]:
    sums = []
    async for cells in found:
        yield cells.views
        service.metrics.sent.inc(cells.length)
        if with_sums:
            sums.append(cells.sums.packed)
    if sums:
        yield sums
