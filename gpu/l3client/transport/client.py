"""The client of one service: control calls, and object bytes straight between sockets and the caller's memory."""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from l3client.transport.connection import Address, Connection
from l3client.transport.control import Control, Part
from l3client.transport.pool import ConnectionPool
from l3client.transport.scatter import Scatter
from l3client.transport.timeouts import Timeouts
from l3store.errors import ConnectError, CorruptError, L3Error, ProtocolError, TransportError
from l3store.layout import Coordinate, Key, Namespace, PageShape, Range
from l3store.layout.sums import SUM_BYTES, decode_sums, encode_sums, sum_cells, unpack_sums

_MAX_REPORTS = 16
_PAGES = "application/vnd.l3store.pages"
_COUNT = re.compile(r"[0-9]{1,9}")


class Order(StrEnum):
    """How the bytes of several pages arrive: page by page, or layer 0 of all pages first."""

    PAGE = "page"
    LAYER = "layer"


@dataclass(frozen=True, slots=True)
class Body:
    """Bytes to write under a key: whole cells, in the caller's memory."""

    key: Key
    data: memoryview


@dataclass(frozen=True, slots=True)
class Written:
    """What became of one body. ``error`` is None where it is stored now, by us or by another."""

    key: str
    created: bool
    error: str | None = None


@dataclass(frozen=True, slots=True)
class PagesRead:
    """``present`` leading pages were sent; the first ``good`` of them have every cell's sum right.

    ``corrupt`` names the cells that do not.
    """

    present: int
    good: int
    corrupt: tuple[Key, ...] = field(default=())


class L3Client:
    """One service. Thread-safe; every call raises an error of `l3store.errors` or returns.

    ``connections`` bounds the byte path's connections, and so what is in flight.
    """

    def __init__(
        self,
        url: str,
        *,
        connections: int = 8,
        timeouts: Timeouts | None = None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.path.strip("/"):
            raise ValueError(f"{url!r} is not the address of a service: it looks like http://host:9460")
        if parts.scheme == "https" and context is None:
            context = ssl.create_default_context()
        timeouts = timeouts or Timeouts()
        default_port = 443 if parts.scheme == "https" else 80
        address = Address(parts.hostname, parts.port or default_port, context if parts.scheme == "https" else None)
        self.url = url.rstrip("/")
        self._control = Control(self.url, timeouts=timeouts, limit=connections, context=address.context)
        self.failed_reports = 0
        self._pool = ConnectionPool(address, limit=connections, timeouts=timeouts)

    def close(self) -> None:
        """End all calls, those under way as well: they raise `ConnectError`."""
        self._pool.close()
        self._control.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def control(self) -> Control:
        """Calls that carry no object bytes."""
        return self._control

    def put(self, key: Key, data: memoryview, *, cell_bytes: int) -> bool:
        """Write one object with its sums; False where it was there already."""
        data = data.cast("B")
        headers = {"L3-Sums": encode_sums(sum_cells(data, cell_bytes)), "Content-Type": "application/octet-stream"}

        def exchange(connection: Connection) -> bool:
            head = connection.request("PUT", f"/v1/objects/{key}", headers, [data])
            connection.read(head.length)
            return head.status == 201

        return self._pool.run(exchange)

    def get(self, key: Key, into: memoryview, *, cell_bytes: int) -> None:
        """Read one object into ``into``, of exactly its length. Raises `CorruptError` where a cell fails its sum.

        What fails is reported to the service as suspect; ``into`` is then not to be used.
        """
        into = into.cast("B")
        count = len(into) // cell_bytes

        def exchange(connection: Connection) -> list[int]:
            head = connection.request("GET", f"/v1/objects/{key}", {}, [])
            if head.length != len(into):
                raise ProtocolError(f"{key} has {head.length} bytes, not {len(into)}")
            scatter = Scatter([into], cell_bytes=cell_bytes)
            expected = _sums(head.headers.get("l3-sums", ""), count)
            connection.receive(scatter)
            return [i for i in range(count) if scatter.sums[i] != expected[i]]

        if bad := self._pool.run(exchange):
            first, group = key.coordinate.start_layer, key.coordinate.head_group
            cells = [Key(key.page_hash, key.digest, Coordinate(first + i, first + i + 1, group)) for i in bad]
            self._report(cells)
            raise CorruptError(f"{len(bad)} cells of {key} fail their sums", keys=[str(cell) for cell in cells])

    def read_pages(
        self, part: Part, page_hashes: Sequence[str], shape: PageShape, into: Sequence[memoryview], *, order: Order
    ) -> PagesRead:
        """Read the leading pages that are present into ``into``, one view of ``shape.page_bytes`` for each page asked.

        The views are filled in page order whatever the order of the wire. Every cell is verified against its sum; what
        fails is reported to the service, and ends the good pages before it. What a view holds beyond the good pages is
        anything. An answer that breaks off is asked for once more: a page got lost while it was being sent, and the
        service, which cannot say so in the middle of a body, knows it by then.
        """
        views = [view.cast("B") for view in into]
        if [len(view) for view in views] != [shape.page_bytes] * len(page_hashes):
            raise ValueError(f"{len(page_hashes)} pages need as many views of {shape.page_bytes} bytes")
        if not views:
            return PagesRead(0, 0)
        body = json.dumps({**part.body(page_hashes), "order": order, "sums": True}).encode()

        begun = False

        def exchange(connection: Connection) -> tuple[int, list[int], Sequence[int]]:
            nonlocal begun
            head = connection.request(
                "POST", "/v1/pages/read", {"Content-Type": "application/json"}, [memoryview(body)]
            )
            begun = True
            pages = _page_count(head.headers.get("l3-pages"), len(page_hashes))
            cells = pages * shape.groups * shape.layers
            if head.length != cells * (shape.cell_bytes + SUM_BYTES):
                raise ProtocolError(f"{pages} pages in {head.length} bytes, expected cells of {shape.cell_bytes}")
            scatter = Scatter(_wire_views(views[:pages], shape, order), cell_bytes=shape.cell_bytes)
            connection.receive(scatter)
            return pages, scatter.sums, unpack_sums(connection.read(cells * SUM_BYTES))

        try:
            pages, got, expected = self._pool.run(exchange)
        except ConnectError:
            if not begun:
                raise
            pages, got, expected = self._pool.run(exchange)
        if tuple(got) == tuple(expected):
            return PagesRead(pages, pages)
        names = _cell_order(pages, shape, order)
        bad = [cell for cell, a, b in zip(names, got, expected, strict=True) if a != b]
        first_group = 0 if part.heads is None else part.heads.start // shape.group_heads
        corrupt = tuple(_cell_key(part, page_hashes[p], layer, g + first_group, part.heads) for p, g, layer in bad)
        self._report(corrupt)
        return PagesRead(pages, min(p for p, _, _ in bad), corrupt)

    def write_pages(self, bodies: Sequence[Body], *, cell_bytes: int) -> list[Written]:
        """Write many objects in one call, with their sums. For each, in order, what became of it."""
        if not bodies:
            return []
        views = [body.data.cast("B") for body in bodies]
        manifest = json.dumps(
            [
                {"key": str(body.key), "length": len(view), "sums": encode_sums(sum_cells(view, cell_bytes))}
                for body, view in zip(bodies, views, strict=True)
            ]
        ).encode()
        views.insert(0, memoryview(len(manifest).to_bytes(4, "little") + manifest))

        def exchange(connection: Connection) -> list[Written]:
            answer = connection.request("POST", "/v1/pages/write", {"Content-Type": _PAGES}, views)
            return _written(connection.read(answer.length), bodies)

        return self._pool.run(exchange)

    def register(self, namespace: Namespace, labels: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """See `Control.register`."""
        return self._control.register(namespace, labels)

    def _report(self, cells: Iterable[Key]) -> None:
        """Tell the service what arrived damaged. The damage is already known here; a failed report changes nothing."""
        for key in _joined(cells)[:_MAX_REPORTS]:
            try:
                self._control.suspect(key)
            except TransportError:
                # Nobody hears us, and the caller waits.
                self.failed_reports += 1
                return
            except L3Error:
                self.failed_reports += 1


def _joined(cells: Iterable[Key]) -> list[Key]:
    """The same cells in as few keys as can be: the layers of one head group of one page that follow each other."""
    runs: list[Key] = []
    for cell in sorted(cells, key=lambda k: (k.page_hash, k.coordinate.head_group or 0, k.coordinate.start_layer)):
        at = cell.coordinate
        if runs and (runs[-1].page_hash, runs[-1].coordinate.head_group) == (cell.page_hash, at.head_group):
            last = runs[-1].coordinate
            if last.end_layer == at.start_layer:
                runs[-1] = Key(cell.page_hash, cell.digest, Coordinate(last.start_layer, at.end_layer, at.head_group))
                continue
        runs.append(cell)
    return runs


def _wire_views(pages: Sequence[memoryview], shape: PageShape, order: Order) -> list[memoryview]:
    """The pieces of page-ordered views, in the order of the wire."""
    if order is Order.PAGE:
        return list(pages)
    spans = [[shape.run_span(Range(layer, layer + 1), g) for g in range(shape.groups)] for layer in range(shape.layers)]
    return [page[span.offset : span.end] for groups in spans for page in pages for span in groups]


def _cell_order(pages: int, shape: PageShape, order: Order) -> list[tuple[int, int, int]]:
    """(page, group, layer) of every cell in the order of the wire."""
    if order is Order.PAGE:
        return [(p, g, layer) for p in range(pages) for g in range(shape.groups) for layer in range(shape.layers)]
    return [(p, g, layer) for layer in range(shape.layers) for p in range(pages) for g in range(shape.groups)]


def _cell_key(part: Part, page_hash: str, layer: int, group: int, heads: Range | None) -> Key:
    at = part.layers.start + layer
    return Key(page_hash, part.namespace, Coordinate(at, at + 1, None if heads is None else group))


def _page_count(header: str | None, asked: int) -> int:
    if header is None or not _COUNT.fullmatch(header) or int(header) > asked:
        raise ProtocolError(f"L3-Pages is {header!r} where {asked} pages were asked")
    return int(header)


def _sums(header: str, cells: int) -> Sequence[int]:
    try:
        return unpack_sums(decode_sums(header, cells))
    except ValueError as error:
        raise ProtocolError(f"L3-Sums: {error}") from error


def _written(answer: bytearray, bodies: Sequence[Body]) -> list[Written]:
    try:
        results = json.loads(answer)["results"]
        written = [Written(r["key"], r["status"] == "created", _error_of(r)) for r in results]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"write gave what cannot be read: {error}") from error
    if [w.key for w in written] != [str(b.key) for b in bodies]:
        raise ProtocolError("write answered for other keys than were sent")
    return written


def _error_of(result: dict[str, Any]) -> str | None:
    return str(result.get("detail")) if result["status"] not in {"created", "exists"} else None
