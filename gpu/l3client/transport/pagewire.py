"""The bodies of calls about many pages: their JSON, where the bytes lie in memory, and which cell is which."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from l3store.layout import Coordinate, Key, PageShape, Range

JSON_HEADER = "Content-Type: application/json\r\n"

_encode = json.JSONEncoder(separators=(",", ":")).encode


class Order(StrEnum):
    """How the bytes of several pages arrive: page by page, or layer 0 of all pages first."""

    PAGE = "page"
    LAYER = "layer"


@dataclass(frozen=True, slots=True)
class Part:
    """The part of every page that a call is about. ``heads`` on the group grid; None is all heads."""

    namespace: str
    layers: Range
    heads: Range | None

    def body(self, page_hashes: Sequence[str]) -> dict[str, Any]:
        """The JSON of match, missing and read."""
        body: dict[str, Any] = {
            "namespace": self.namespace,
            "page_hashes": list(page_hashes),
            "layers": [self.layers.start, self.layers.end],
        }
        if self.heads is not None:
            body["heads"] = [self.heads.start, self.heads.end]
        return body

    def cell(self, page_hash: str, layer: int, group: int, shape: PageShape) -> Key:
        """The key of one cell of a page. ``layer`` and ``group`` count from the first of this part."""
        at = self.layers.start + layer
        if self.heads is None:
            return Key(page_hash, self.namespace, Coordinate(at, at + 1))
        return Key(page_hash, self.namespace, Coordinate(at, at + 1, self.heads.start // shape.group_heads + group))


def as_json(value: Any) -> memoryview:
    """A body of JSON, without spaces."""
    return memoryview(_encode(value).encode())


def wire_views(pages: Sequence[memoryview], shape: PageShape, order: Order) -> Sequence[memoryview]:
    """The pieces of page-ordered views, in the order of the wire."""
    if order is Order.PAGE or shape.layers == 1:
        return pages
    # The cells of a group follow each other.
    starts = [shape.run_span(Range(0, 1), group).offset for group in range(shape.groups)]
    size = shape.cell_bytes
    layers = range(0, shape.layers * size, size)
    cells = [[slice(start + layer, start + layer + size) for start in starts] for layer in layers]
    return [page[cell] for groups in cells for page in pages for cell in groups]


def place(cell: int, pages: int, shape: PageShape, order: Order) -> tuple[int, int, int]:
    """Page, layer and head group of the cell that is so many-th on the wire."""
    if order is Order.PAGE:
        cell, layer = divmod(cell, shape.layers)
        page, group = divmod(cell, shape.groups)
    else:
        cell, group = divmod(cell, shape.groups)
        layer, page = divmod(cell, pages)
    return page, layer, group


def joined(cells: Sequence[Key]) -> list[Key]:
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
