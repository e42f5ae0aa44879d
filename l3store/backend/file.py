"""One object as a file: its cells, then their sums, then a footer.

    cells x cell_bytes | cells x 8 bytes of sums | b"L3C1", 1 byte (1: sums by the writer), 3 zero bytes

The cells come first so that an offset in the object is an offset in the file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from l3store.backend.protocol import CellRun, NewObject
from l3store.errors import CorruptError
from l3store.layout import Key
from l3store.layout.sums import SUM_BYTES

FOOTER_BYTES = 8
_FOOTERS = (b"L3C1\0\0\0\0", b"L3C1\1\0\0\0")
"""By whether the sums are the writer's."""

_BLOCK_BYTES = 4096
# The system takes 1,024 in one call, and the trailer is one.
_MOST_VIEWS = 1000


class Trailer(NamedTuple):
    """What is behind an object's cells: all of their sums, and whether the writer made them."""

    packed: bytes
    by_writer: bool


def overhead(cells: int) -> int:
    """Bytes that a file has beyond its object's."""
    return cells * SUM_BYTES + FOOTER_BYTES


def footprint(cells: int, cell_bytes: int) -> int:
    """What an object's file takes from its disk: file systems give whole blocks."""
    return -(-(cells * cell_bytes + overhead(cells)) // _BLOCK_BYTES) * _BLOCK_BYTES


def write_object(fd: int, new: NewObject) -> None:
    """Write a whole object at the start of an empty file. Raises OSError."""
    left = [memoryview(new.body).cast("B"), memoryview(new.sums.packed), memoryview(_FOOTERS[new.sums.by_writer])]
    while left:
        left = _beyond(left, os.writev(fd, left))


def read_runs(fd: int, runs: Sequence[tuple[CellRun, memoryview]], trailer: Trailer | None = None) -> Trailer:
    """Read runs of one object, each into its memory. Its trailer is read with them, unless it is given.

    Raises `CorruptError` where the file ends early or its footer is not ours.
    """
    key, cell_bytes = runs[0][0].key, runs[0][0].cell_bytes
    views: list[memoryview] = []
    first = end = runs[0][0].first
    for run, into in runs:
        if run.first != end or len(views) == _MOST_VIEWS:
            _read_all(fd, views, first * cell_bytes, key)
            views = []
            first = run.first
        views.append(into)
        end = run.first + run.cells
    if trailer is not None:
        _read_all(fd, views, first * cell_bytes, key)
        return trailer
    stored = runs[0][0].stored_cells
    packed = bytearray(overhead(stored))
    if end == stored:
        # It follows: one call reads both.
        _read_all(fd, [*views, memoryview(packed)], first * cell_bytes, key)
    else:
        _read_all(fd, views, first * cell_bytes, key)
        _read_all(fd, [memoryview(packed)], stored * cell_bytes, key)
    return _parsed(packed, key)


def read_trailer(fd: int, run: CellRun) -> Trailer:
    """The trailer of the object that a run is of. Raises `CorruptError` as `read_runs` does."""
    packed = bytearray(overhead(run.stored_cells))
    _read_all(fd, [memoryview(packed)], run.stored_cells * run.cell_bytes, run.key)
    return _parsed(packed, run.key)


def _parsed(packed: bytearray, key: Key) -> Trailer:
    footer = packed[-FOOTER_BYTES:]
    if footer[:4] != _FOOTERS[0][:4] or footer[4] > 1:
        raise CorruptError(f"the file of {key} does not end with a footer of ours", key=str(key))
    return Trailer(bytes(packed[:-FOOTER_BYTES]), bool(footer[4]))


def _read_all(fd: int, into: list[memoryview], offset: int, key: Key) -> None:
    while into:
        got = os.preadv(fd, into, offset)
        if not got:
            raise CorruptError(f"the file of {key} ends after {offset} bytes", key=str(key))
        offset += got
        into = _beyond(into, got)


def _beyond(views: list[memoryview], done: int) -> list[memoryview]:
    """What is left of memory that follows each other, after its first ``done`` bytes."""
    for position, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[position + 1 :]]
        done -= len(view)
    return []
