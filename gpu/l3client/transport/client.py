"""The client of one service: control calls, and object bytes straight between sockets and the caller's memory."""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from l3client.transport.connection import Address, Connection
from l3client.transport.control import Control
from l3client.transport.pagewire import JSON_HEADER, Order, Part, as_json, joined, place, wire_views
from l3client.transport.pool import ConnectionPool
from l3client.transport.scatter import Scatter
from l3client.transport.timeouts import Timeouts
from l3store.errors import ConnectError, CorruptError, L3Error, ProtocolError, TransportError
from l3store.layout import Coordinate, Key, Namespace, PageShape
from l3store.layout.sums import SUM_BYTES, decode_sums, encode_sums, sum_cells

_MAX_REPORTS = 16
_OBJECT_HEADER = "Content-Type: application/octet-stream\r\n"
_PAGES_HEADER = "Content-Type: application/vnd.l3store.pages\r\n"
_COUNT = re.compile(r"[0-9]{1,9}")


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

    ``connections`` bounds the byte path's connections, and so what is in flight. ``verify=False`` is for callers that
    verify what they read themselves: the sums that come with it are not looked at, and nothing read is found corrupt.
    Writes send sums all the same.
    """

    def __init__(
        self,
        url: str,
        *,
        connections: int = 8,
        timeouts: Timeouts | None = None,
        context: ssl.SSLContext | None = None,
        verify: bool = True,
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
        self._control = Control(self.url, address, timeouts=timeouts, limit=connections)
        self._verify = verify
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
        headers = f"L3-Sums: {encode_sums(sum_cells(data, cell_bytes))}\r\n{_OBJECT_HEADER}"

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
        count, rest = divmod(len(into), cell_bytes)
        if rest:
            raise ValueError(f"{len(into)} bytes are not whole cells of {cell_bytes}")

        def exchange(connection: Connection) -> list[int]:
            head = connection.request("GET", f"/v1/objects/{key}")
            if head.length != len(into):
                raise ProtocolError(f"{key} has {head.length} bytes, not {len(into)}")
            if not self._verify:
                connection.receive(Scatter([into]))
                return []
            expected = _sums(head.sums, count)
            scatter = Scatter([into], cell_bytes=cell_bytes)
            connection.receive(scatter)
            return scatter.differing(expected)

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
        if len(views) != len(page_hashes) or not set(map(len, views)) <= {shape.page_bytes}:
            raise ValueError(f"{len(page_hashes)} pages need as many views of {shape.page_bytes} bytes")
        if not views:
            return PagesRead(0, 0)
        # Sums are asked for whether we verify or not: without them, the service verifies what it sends.
        body = as_json({**part.body(page_hashes), "order": order, "sums": True})
        cell_bytes = shape.cell_bytes
        begun = False

        def exchange(connection: Connection) -> tuple[int, list[int]]:
            nonlocal begun
            head = connection.request("POST", "/v1/pages/read", JSON_HEADER, [body])
            begun = True
            pages = _page_count(head.pages, len(page_hashes))
            cells = pages * shape.groups * shape.layers
            if head.length != cells * (cell_bytes + SUM_BYTES):
                raise ProtocolError(f"{pages} pages in {head.length} bytes, expected cells of {cell_bytes}")
            scatter = Scatter(wire_views(views[:pages], shape, order), cell_bytes=cell_bytes if self._verify else None)
            connection.receive(scatter)
            expected = connection.read(cells * SUM_BYTES)
            return pages, scatter.differing(expected) if self._verify else []

        try:
            pages, bad = self._pool.run(exchange)
        except ConnectError:
            if not begun:
                raise
            pages, bad = self._pool.run(exchange)
        if not bad:
            return PagesRead(pages, pages)
        places = [place(cell, pages, shape, order) for cell in bad]
        corrupt = tuple(part.cell(page_hashes[page], layer, group, shape) for page, layer, group in places)
        self._report(corrupt)
        return PagesRead(pages, min(page for page, _, _ in places), corrupt)

    def write_pages(self, bodies: Sequence[Body], *, cell_bytes: int) -> list[Written]:
        """Write many objects in one call, with their sums. For each, in order, what became of it."""
        if not bodies:
            return []
        keys = [str(body.key) for body in bodies]
        views = [body.data.cast("B") for body in bodies]
        manifest = as_json(
            [
                {"key": key, "length": len(view), "sums": encode_sums(sum_cells(view, cell_bytes))}
                for key, view in zip(keys, views, strict=True)
            ]
        )
        length = memoryview(len(manifest).to_bytes(4, "little"))

        def exchange(connection: Connection) -> list[Written]:
            answer = connection.request("POST", "/v1/pages/write", _PAGES_HEADER, [length, manifest, *views])
            return _written(connection.read(answer.length), keys)

        return self._pool.run(exchange)

    def register(self, namespace: Namespace, labels: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """See `Control.register`."""
        return self._control.register(namespace, labels)

    def _report(self, cells: Sequence[Key]) -> None:
        """Tell the service what arrived damaged. The damage is already known here; a failed report changes nothing."""
        for key in joined(cells)[:_MAX_REPORTS]:
            try:
                self._control.suspect(key)
            except TransportError:
                # Nobody hears us, and the caller waits.
                self.failed_reports += 1
                return
            except L3Error:
                self.failed_reports += 1


def _page_count(header: str, asked: int) -> int:
    if not _COUNT.fullmatch(header) or int(header) > asked:
        raise ProtocolError(f"L3-Pages is {header!r} where {asked} pages were asked")
    return int(header)


def _sums(header: str, cells: int) -> bytes:
    try:
        return decode_sums(header, cells)
    except ValueError as error:
        raise ProtocolError(f"L3-Sums: {error}") from error


def _written(answer: bytes | bytearray, keys: Sequence[str]) -> list[Written]:
    try:
        results = json.loads(answer)["results"]
        written = [Written(r["key"], r["status"] == "created", _error_of(r)) for r in results]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"write gave what cannot be read: {error}") from error
    if [w.key for w in written] != keys:
        raise ProtocolError("write answered for other keys than were sent")
    return written


def _error_of(result: dict[str, Any]) -> str | None:
    return str(result.get("detail")) if result["status"] not in {"created", "exists"} else None
