"""Sums: xxh3-64 of one cell, 8 bytes little-endian each, base64 in headers and manifests."""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Sequence

import xxhash

SUM_BYTES = 8

Buffer = bytes | bytearray | memoryview


def cell_sum(cell: Buffer) -> int:
    """The sum of one cell."""
    return xxhash.xxh3_64_intdigest(cell)


def sum_cells(data: Buffer, cell_bytes: int) -> bytes:
    """The packed sums of consecutive cells. ``data`` is a whole number of cells."""
    view = memoryview(data).cast("B")
    if len(view) % cell_bytes:
        raise ValueError(f"{len(view)} bytes are not whole cells of {cell_bytes}")
    return pack_sums([cell_sum(view[at : at + cell_bytes]) for at in range(0, len(view), cell_bytes)])


def pack_sums(sums: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(sums)}Q", *sums)


def unpack_sums(packed: Buffer) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // SUM_BYTES}Q", packed)


def encode_sums(packed: Buffer) -> str:
    """Packed sums as header text."""
    return base64.b64encode(packed).decode("ascii")


def decode_sums(text: str, cells: int) -> bytes:
    """Header text as packed sums. Raises ValueError where it is not base64 of ``cells`` sums."""
    try:
        packed = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"sums are not base64: {text[:80]!r}") from error
    if len(packed) != cells * SUM_BYTES:
        raise ValueError(f"{len(packed)} bytes of sums, but {cells} cells need {cells * SUM_BYTES}")
    return packed


def content_tag(packed: Buffer) -> str:
    """A name for bytes by their sums: equal for equal bytes, as a strong ETag must be."""
    return xxhash.xxh3_128_hexdigest(packed)
