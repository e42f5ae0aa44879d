"""From what a reader asks to the runs of stored cells that answer it, in the order of the wire."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum

from l3store.backend import CellRun
from l3store.index.pages import NamespaceIndex, PageIndex
from l3store.index.runset import Need, RunSet
from l3store.layout import Coordinate, Key, Piece


class Order(StrEnum):
    """How the bytes of several pages follow each other."""

    PAGE = "page"
    LAYER = "layer"


def object_runs(index: PageIndex, entry: NamespaceIndex, key: Key) -> list[CellRun] | None:
    """The stored runs that make up the bytes a key names; None where a cell is missing."""
    runs = index.runs(entry, key.page_hash)
    group = key.coordinate.head_group or 0
    pieces = runs.pieces(key.coordinate.layers, group)
    if pieces is None:
        return None
    at = (_part(entry, group, piece) for piece in pieces)
    return [
        CellRun(Key(key.page_hash, entry.digest, c), first, count, entry.namespace.cell_bytes) for c, first, count in at
    ]


def page_runs(
    index: PageIndex, entry: NamespaceIndex, page_hashes: Sequence[str], need: Need, order: Order
) -> Iterator[CellRun]:
    """The runs of pages that are all present. What is stored is looked up now, the runs are made as they are taken."""
    stored = [index.runs(entry, page_hash) for page_hash in page_hashes]
    # Pages that are stored alike share a RunSet: what to read of them is worked out once.
    parts = {runs: _parts(entry, runs, need) for runs in set(stored)}
    pages = [(page_hash, parts[runs]) for page_hash, runs in zip(page_hashes, stored, strict=True)]
    return _by_page(entry, pages) if order is Order.PAGE else _by_layer(entry, pages, len(need.layers))


_Part = tuple[Coordinate, int, int]
"""Of the stored object of a coordinate: the first cell, and how many."""


def _parts(entry: NamespaceIndex, runs: RunSet, need: Need) -> list[list[_Part]]:
    """What to read of a page, by head group and then by layer."""
    parts = []
    for group in need.groups:
        pieces = runs.pieces(need.layers, group)
        assert pieces is not None, "pages are matched before they are read"
        parts.append([_part(entry, group, piece) for piece in pieces])
    return parts


def _part(entry: NamespaceIndex, group: int, piece: Piece) -> _Part:
    head_group = None if entry.namespace.fields.rank_replicated else group
    source = Coordinate(piece.source.start, piece.source.end, head_group)
    return source, piece.taken.start - piece.source.start, len(piece.taken)


def _by_page(entry: NamespaceIndex, pages: Sequence[tuple[str, list[list[_Part]]]]) -> Iterator[CellRun]:
    digest, cell_bytes = entry.digest, entry.namespace.cell_bytes
    for page_hash, groups in pages:
        for parts in groups:
            for coordinate, first, count in parts:
                yield CellRun(Key(page_hash, digest, coordinate), first, count, cell_bytes)


def _by_layer(entry: NamespaceIndex, pages: Sequence[tuple[str, list[list[_Part]]]], layers: int) -> Iterator[CellRun]:
    digest, cell_bytes = entry.digest, entry.namespace.cell_bytes
    cells = {id(groups): [_cells(parts) for parts in groups] for _, groups in pages}
    for layer in range(layers):
        for page_hash, groups in pages:
            for by_layer in cells[id(groups)]:
                coordinate, cell = by_layer[layer]
                yield CellRun(Key(page_hash, digest, coordinate), cell, 1, cell_bytes)


def _cells(parts: Sequence[_Part]) -> list[tuple[Coordinate, int]]:
    """The single cells of parts: of which object, and which of its cells."""
    return [(coordinate, cell) for coordinate, first, count in parts for cell in range(first, first + count)]
