"""The head of an answer: what matters of it to the wire, and nothing that could be read in two ways."""

from __future__ import annotations

import re
from typing import NamedTuple

_OK = b"HTTP/1.1 200 OK"
_STATUS = re.compile(rb"HTTP/1\.1 ([1-9][0-9]{2})(?: .*)?")
_MAX_DIGITS = 18
_LENGTH = b"content-length"
_CODING = b"transfer-encoding"
_CONNECTION = b"connection"
_SUMS = b"l3-sums"
_PAGES = b"l3-pages"
_FIELDS = frozenset({_LENGTH, _CODING, _CONNECTION, _SUMS, _PAGES})


class Head(NamedTuple):
    """Status of an answer, bytes of its body, whether the connection is kept after it, and the fields of our own.

    A field that is absent is empty.
    """

    status: int
    length: int
    kept: bool
    sums: str
    pages: str


def parse_head(head: bytes) -> Head:
    """Read a head without its empty line. Raises ValueError where it is no HTTP/1.1, or its body's end unclear."""
    status_line, *lines = head.split(b"\r\n")
    fields: dict[bytes, bytes] = {}
    for line in lines:
        name, _, value = line.partition(b":")
        name = name.strip().lower()
        if name in _FIELDS:
            value = value.strip()
            # Joined by a comma as lists are; what is no list, a length above all, is then not valid any more.
            fields[name] = value if fields.get(name, value) == value else fields[name] + b"," + value
    length = fields.get(_LENGTH, b"0")
    if _CODING in fields or not length.isdigit() or len(length) > _MAX_DIGITS:
        raise ValueError("the end of its body is not known from a Content-Length")
    kept = _LENGTH in fields
    if _CONNECTION in fields:
        kept = kept and b"close" not in map(bytes.strip, fields[_CONNECTION].lower().split(b","))
    sums, pages = fields.get(_SUMS, b""), fields.get(_PAGES, b"")
    return Head(_status(status_line), int(length), kept, sums.decode("latin-1"), pages.decode("latin-1"))


def _status(line: bytes) -> int:
    if line == _OK:
        return 200
    status = _STATUS.fullmatch(line)
    if status is None:
        raise ValueError(f"{line[:80]!r} is not a status line of HTTP/1.1")
    return int(status[1])
