"""Which part of an object a GET asks for: RFC 9110 ``Range``, or our strict ``offset`` and ``length``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from l3store.errors import RefusedError, UnsatisfiableError
from l3store.layout import Span

_DIGITS = re.compile(r"[0-9]{1,100}")
_RANGE = re.compile(r"bytes=[ \t]*(?:([0-9]{1,64})-([0-9]{0,64})|-([0-9]{1,64}))[ \t]*", re.IGNORECASE)


def wanted_span(*, size: int, header: str | None, offset: int | None, length: int | None) -> Span | None:
    """The span that is asked of an object of ``size`` bytes; None for all of it.

    As RFC 9110 says, a Range header that is no single byte range is ignored, and one that ends beyond the object is cut
    there. ``offset`` and ``length`` are strict. Raises `UnsatisfiableError` where nothing, or not all of it, can be
    given, and `RefusedError` where both are used.
    """
    if offset is not None or length is not None:
        if header is not None:
            raise RefusedError("a Range header and offset or length: give one of them")
        return _strict(size, offset or 0, length)
    if header is None:
        return None
    match = _RANGE.fullmatch(header)
    if match is None:
        return None
    if match[3] is not None:
        count = min(int(match[3]), size)
        if not count:
            raise _unsatisfiable("the last 0 bytes", size)
        return Span(size - count, count)
    first = int(match[1])
    last = int(match[2]) if match[2] else size - 1
    if match[2] and last < first:
        return None
    if first >= size:
        raise _unsatisfiable(f"bytes from {first}", size)
    return Span(first, min(last, size - 1) - first + 1)


def query_span(query: Mapping[str, str]) -> tuple[int | None, int | None]:
    """``offset`` and ``length`` of a query, None where not given. Raises `RefusedError` for other than digits."""
    values = [query.get(name) for name in ("offset", "length")]
    for value in values:
        if value is not None and not _DIGITS.fullmatch(value):
            raise RefusedError(f"offset and length are whole numbers of bytes, not {value[:40]!r}")
    offset, length = (None if value is None else int(value) for value in values)
    return offset, length


def _strict(size: int, offset: int, length: int | None) -> Span:
    if offset >= size:
        raise _unsatisfiable(f"offset {offset}", size)
    count = size - offset if length is None else length
    if count < 1 or offset + count > size:
        raise _unsatisfiable(f"{count} bytes from {offset}", size)
    return Span(offset, count)


def _unsatisfiable(what: str, size: int) -> UnsatisfiableError:
    return UnsatisfiableError(f"{what} of an object of {size} bytes", size=size)


def cut(views: Sequence[memoryview], offset: int, length: int) -> list[memoryview]:
    """``length`` bytes from ``offset`` of views in a row."""
    cut = []
    for view in views:
        piece = view[min(offset, len(view)) :][:length]
        offset -= min(offset, len(view))
        length -= len(piece)
        if len(piece):
            cut.append(piece)
    return cut
