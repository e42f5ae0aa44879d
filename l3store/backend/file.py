"""One object as a file: its cells, then their sums, then a footer.

    cells x cell_bytes | cells x 8 bytes of sums | b"L3C1", 1 byte (1: sums by the writer), 3 zero bytes

The cells come first so that an offset in the object is an offset in the file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from l3store.backend.protocol import CellRun, NewObject, Sums
from l3store.errors import CorruptError
from l3store.layout.sums import SUM_BYTES

_MAGIC = b"L3C1"
FOOTER_BYTES = 8
_BLOCK_BYTES = 4096


def overhead(cells: int) -> int:
    """Bytes that a file has beyond its object's."""
    return cells * SUM_BYTES + FOOTER_BYTES


def footprint(cells: int, cell_bytes: int) -> int:
    """What an object's file takes from its disk: file systems give whole blocks."""
    return -(-(cells * cell_bytes + overhead(cells)) // _BLOCK_BYTES) * _BLOCK_BYTES


def write_object(fd: int, new: NewObject) -> None:
    """Write a whole object at the start of an empty file. Raises OSError."""
    footer = _MAGIC + bytes([new.sums.by_writer, 0, 0, 0])
    _write_all(fd, [memoryview(new.body).cast("B"), memoryview(new.sums.packed), memoryview(footer)])


def read_run(fd: int, run: CellRun, into: memoryview) -> Sums:
    """Read a run's cells and sums. Raises `CorruptError` where the file ends early or its footer is not ours."""
    sums = read_run_sums(fd, run)
    _read_all(fd, into, run.first * run.cell_bytes, run)
    return sums


def read_run_sums(fd: int, run: CellRun) -> Sums:
    trailer = bytearray(overhead(run.stored_cells))
    _read_all(fd, memoryview(trailer), run.stored_cells * run.cell_bytes, run)
    footer = trailer[-FOOTER_BYTES:]
    if footer[:4] != _MAGIC or footer[4] > 1:
        raise CorruptError(f"the file of {run.key} does not end with a footer of ours", key=str(run.key))
    start = run.first * SUM_BYTES
    return Sums(bytes(trailer[start : start + run.count * SUM_BYTES]), bool(footer[4]))


def join(parts: Sequence[Sums]) -> Sums:
    return Sums(b"".join(part.packed for part in parts), all(part.by_writer for part in parts))


def _write_all(fd: int, buffers: list[memoryview]) -> None:
    while buffers:
        written = os.writev(fd, buffers)
        while buffers and written >= len(buffers[0]):
            written -= len(buffers.pop(0))
        if buffers and written:
            buffers[0] = buffers[0][written:]


def _read_all(fd: int, into: memoryview, offset: int, run: CellRun) -> None:
    done = 0
    while done < len(into):
        got = os.preadv(fd, [into[done:]], offset + done)
        if not got:
            raise CorruptError(f"the file of {run.key} ends after {offset + done} bytes", key=str(run.key))
        done += got
