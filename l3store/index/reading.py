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
    return None if pieces is None else [_run(entry, key.page_hash, group, piece) for piece in pieces]


def page_runs(
    index: PageIndex, entry: NamespaceIndex, page_hashes: Sequence[str], need: Need, order: Order
) -> Iterator[CellRun]:
    """The runs of pages that are all present. What is stored is looked up now, the runs are made as they are taken."""
    stored = [index.runs(entry, page_hash) for page_hash in page_hashes]
    make = _by_page if order is Order.PAGE else _by_layer
    return make(entry, page_hashes, stored, need)


def _by_page(
    entry: NamespaceIndex, page_hashes: Sequence[str], stored: Sequence[RunSet], need: Need
) -> Iterator[CellRun]:
    for page_hash, runs in zip(page_hashes, stored, strict=True):
        for group in need.groups:
            for piece in _present(runs, need, group):
                yield _run(entry, page_hash, group, piece)


def _by_layer(
    entry: NamespaceIndex, page_hashes: Sequence[str], stored: Sequence[RunSet], need: Need
) -> Iterator[CellRun]:
    # Pages that are stored alike share a RunSet, so the object of each layer is looked up once for all of them.
    sources: dict[RunSet, list[list[Piece]]] = {}
    for runs in stored:
        if runs not in sources:
            sources[runs] = [[p for p in _present(runs, need, g) for _ in p.taken] for g in need.groups]
    for offset, layer in enumerate(need.layers):
        for page_hash, runs in zip(page_hashes, stored, strict=True):
            for group, by_layer in zip(need.groups, sources[runs], strict=True):
                source = by_layer[offset].source
                yield CellRun(
                    _key(entry, page_hash, group, source.start, source.end),
                    layer - source.start,
                    1,
                    entry.namespace.cell_bytes,
                )


def _present(runs: RunSet, need: Need, group: int) -> list[Piece]:
    pieces = runs.pieces(need.layers, group)
    assert pieces is not None, "pages are matched before they are read"
    return pieces


def _run(entry: NamespaceIndex, page_hash: str, group: int, piece: Piece) -> CellRun:
    key = _key(entry, page_hash, group, piece.source.start, piece.source.end)
    return CellRun(key, piece.taken.start - piece.source.start, len(piece.taken), entry.namespace.cell_bytes)


def _key(entry: NamespaceIndex, page_hash: str, group: int, start: int, end: int) -> Key:
    head_group = None if entry.namespace.fields.rank_replicated else group
    return Key(page_hash, entry.digest, Coordinate(start, end, head_group))
