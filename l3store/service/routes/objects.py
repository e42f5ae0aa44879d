"""One object: put, get, head, delete, suspect."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response

from l3store.backend import Cells
from l3store.errors import (
    L3Error,
    MissError,
    PreconditionError,
    TooLargeError,
    UnsatisfiableError,
    WrongLengthError,
    WrongSumsError,
)
from l3store.layout import Coordinate, Key, Span, parse_key
from l3store.layout.sums import decode_sums, encode_sums
from l3store.service.conditional import etag, matches
from l3store.service.context import Context, Service
from l3store.service.ranges import cut, query_span, wanted_span
from l3store.service.receiving import Announced, Arrivals
from l3store.service.responses import MEDIA_TYPE, BytesResponse, RawHeaders, described
from l3store.service.routing import resource_router
from l3store.service.shapes import ObjectStatus, Suspected
from l3store.service.wire import BodyReader

router = resource_router("/v1/objects", "objects")

_BINARY: dict[str, Any] = {"content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}}


def _parameter(where: str, name: str, description: str, kind: str = "string") -> dict[str, Any]:
    """A parameter as OpenAPI describes it."""
    required = where == "path"
    return {"in": where, "name": name, "required": required, "description": description, "schema": {"type": kind}}


_KEY = _parameter("path", "key", "`{page_hash}_{digest}_L{a}-{b}`, and `_H{group}` where there are head groups")
_SELECTIVE = {b"range", b"if-range", b"if-none-match"}
"""Headers of a GET that may make its answer other than the whole."""

_SUMS_HEADER = "base64 of xxh3-64 of every cell, 8 bytes little-endian each"


@router.get(
    "/{key:path}",
    response_class=Response,
    responses={
        200: {"description": "all of it, with L3-Sums", **_BINARY},
        206: {"description": "a part of it; with L3-Sums where it is whole cells", **_BINARY},
        304: {"description": "If-None-Match has its ETag"},
    },
    openapi_extra={
        "parameters": [
            _KEY,
            _parameter("query", "offset", "bytes; strict: beyond the end is 416", "integer"),
            _parameter("query", "length", "bytes; strict: beyond the end, or zero, is 416", "integer"),
            _parameter("header", "Range", "one byte range, RFC 9110"),
            _parameter("header", "If-Range", "an ETag: the range of that, else all of it"),
            _parameter("header", "If-None-Match", "an ETag: 304 where it is that still"),
        ]
    },
)
async def get_object(request: Request, service: Service) -> Response:
    """The bytes that a key names, or one range of them, however what is stored was cut."""
    name = parse_key(request.path_params["key"])
    cell_bytes, size = _sizes(service, name)
    scope = request.scope
    if not scope["query_string"] and _SELECTIVE.isdisjoint(dict(scope["headers"])):
        _check_answer(service, size)
        return await _whole(service, name, size)
    range_header = request.headers.get("range")
    if "if-none-match" in request.headers or "if-range" in request.headers:
        tag = etag(await service.reader.read_sums(name))
        if matches(request.headers.get("if-none-match"), tag):
            return Response(status_code=304, headers={"ETag": tag})
        if request.headers.get("if-range", tag) != tag:
            range_header = None
    offset, length = query_span(request.query_params)
    try:
        span = wanted_span(size=size, header=range_header, offset=offset, length=length)
    except UnsatisfiableError:
        # A range of what is not there is a miss, whatever the range.
        if not service.store.has(name):
            raise _miss(name) from None
        raise
    _check_answer(service, size if span is None else span.length)
    if span is None:
        return await _whole(service, name, size)
    return await _part(service, name, span, size=size, cell_bytes=cell_bytes)


@router.put(
    "/{key:path}",
    status_code=201,
    response_class=Response,
    responses={
        200: {"model": ObjectStatus, "description": "already there, nothing stored"},
        201: {"model": ObjectStatus, "description": "created"},
    },
    openapi_extra={
        "parameters": [
            _KEY,
            _parameter("header", "L3-Sums", _SUMS_HEADER),
            _parameter("header", "If-None-Match", "`*`: 412 where it is already there"),
        ],
        "requestBody": {"required": True, **_BINARY},
    },
)
async def put_object(request: Request, service: Service) -> Response:
    """Store the bytes that a key names. The first writer wins; nothing is ever overwritten."""
    name = parse_key(request.path_params["key"])
    cell_bytes, length = _sizes(service, name)
    declared = request.scope["l3store.content_length"]
    if declared != length:
        raise WrongLengthError(f"a body of {declared} bytes, but {name} has {length}", expected=length)
    header = request.headers.get("l3-sums")
    sums = None if header is None else _sums(header, length // cell_bytes)
    created = False
    if not service.store.has(name):
        with await service.pool.acquire(length) as held:
            arrivals = Arrivals([Announced(name, length, cell_bytes, sums)], held.view, held)
            await BodyReader(request).read_into(held.view, arrivals.arrived)
            service.metrics.received_bytes += length
            [made] = arrivals.objects()
            [result] = [made] if isinstance(made, L3Error) else await service.store.put([made])
            if isinstance(result, L3Error):
                raise result
            created = result
    if not created and request.headers.get("if-none-match") == "*":
        raise PreconditionError(f"{name} is already stored")
    # An `ObjectStatus`: no character of a key has to be escaped, and building the model takes longer than all the rest.
    status = f'{{"key":"{name}","status":"{"created" if created else "exists"}"}}'
    return Response(status, 201 if created else 200, media_type="application/json")


@router.head("/{key:path}", response_class=Response)
async def head_object(key: str, service: Service) -> Response:
    """What GET would say of all of it, without the bytes."""
    name = parse_key(key)
    _, size = _sizes(service, name)
    sums = await service.reader.read_sums(name)
    headers = {name.decode(): value.decode() for name, value in described(sums)}
    return Response(headers={**headers, "content-length": str(size)}, media_type=MEDIA_TYPE)


@router.delete("/{key:path}", status_code=204, response_model=None)
async def delete_object(key: str, service: Service) -> None:
    """Delete every stored object that holds any of the cells a key names."""
    name = parse_key(key)
    if not await service.store.delete(name):
        raise _miss(name)


@router.post("/{key}/suspect")
async def suspect_object(key: str, service: Service) -> Suspected:
    """A reader saw a bad sum: check our own copy, and quarantine it where it is bad."""
    name = parse_key(key)
    return Suspected(key=key, corrupt=await service.reader.suspect(name))


def _miss(key: Key) -> MissError:
    return MissError(f"{key} is not stored")


def _sizes(service: Context, key: Key) -> tuple[int, int]:
    """Bytes of a cell and of the whole object."""
    cell_bytes = service.store.entry_of(key).namespace.cell_bytes
    return cell_bytes, len(key.coordinate.layers) * cell_bytes


def _sums(header: str, cells: int) -> bytes:
    try:
        return decode_sums(header, cells)
    except ValueError as error:
        raise WrongSumsError(f"L3-Sums: {error}") from error


def _check_answer(service: Context, length: int) -> None:
    most = service.limits.max_object_bytes
    if length > most:
        raise TooLargeError(
            f"{length} bytes in one answer; {most} at most: ask for fewer layers or a range", limit=most
        )


async def _whole(service: Context, key: Key, size: int) -> Response:
    cells = await service.reader.read_object(key, verify=False)
    return _answer(service, 200, cells.views, cells, size, described(cells.sums))


async def _part(service: Context, key: Key, span: Span, *, size: int, cell_bytes: int) -> Response:
    """A range. The cells that it touches are read whole; those it cuts are verified here, as its reader cannot."""
    tag = etag(await service.reader.read_sums(key))
    first, end = span.offset // cell_bytes, -(-span.end // cell_bytes)
    at = key.coordinate
    part = Coordinate(at.start_layer + first, at.start_layer + end, at.head_group)
    whole = span.offset % cell_bytes == 0 and span.end % cell_bytes == 0
    headers = [
        (b"content-range", b"bytes %d-%d/%d" % (span.offset, span.end - 1, size)),
        (b"etag", tag.encode()),
        (b"accept-ranges", b"bytes"),
    ]
    cells = await service.reader.read_object(Key(key.page_hash, key.digest, part), verify=not whole)
    if whole:
        headers.append((b"l3-sums", encode_sums(cells.sums.packed).encode()))
    views = cut(cells.views, span.offset - first * cell_bytes, span.length)
    return _answer(service, 206, views, cells, span.length, headers)


def _answer(
    service: Context, status: int, views: list[memoryview], cells: Cells, length: int, headers: RawHeaders
) -> Response:
    return BytesResponse(
        views, status=status, length=length, headers=headers, done=cells.release, metrics=service.metrics
    )
