"""Keys: ``{page_hash}_{digest}_{coordinate}``, the coordinate being ``L{a}-{b}`` or ``L{a}-{b}_H{group}``."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from l3store.layout.errors import InvalidKeyError
from l3store.layout.namespace import DIGEST_PATTERN
from l3store.layout.shape import Range

MAX_KEY = 160
"""No key is longer, in characters."""

# ASCII digits without leading zeros: one coordinate has one spelling.
_NUMBER = r"(0|[1-9][0-9]{0,4})"
_COORDINATE = re.compile(rf"L{_NUMBER}-{_NUMBER}(?:_H{_NUMBER})?")
_KEY = re.compile(rf"([0-9a-f]{{64}})_({DIGEST_PATTERN})_(L.*)")


# Named tuples: both are made, hashed and compared for every run of every page that is read.
class Coordinate(NamedTuple):
    """Layers ``[start_layer, end_layer)`` of one head group; ``head_group`` is None for MLA. Absolute and global.

    Sorts as SGLang orders a rank's objects: by layers, then by head group.
    """

    start_layer: int
    end_layer: int
    head_group: int | None = None

    @property
    def layers(self) -> Range:
        return _range(self.start_layer, self.end_layer)

    def __str__(self) -> str:
        layers = f"L{self.start_layer}-{self.end_layer}"
        return layers if self.head_group is None else f"{layers}_H{self.head_group}"


class Key(NamedTuple):
    """The name of one object: of bytes, not of a file. ``page_hash`` is 64 lowercase hex digits."""

    page_hash: str
    digest: str
    coordinate: Coordinate

    def __str__(self) -> str:
        return f"{self.page_hash}_{self.digest}_{self.coordinate}"


# A fleet asks for few different ones.
@functools.lru_cache(4096)
def parse_coordinate(text: str) -> Coordinate:
    """Read ``L{a}-{b}[_H{group}]``. Raises `InvalidKeyError`."""
    match = _COORDINATE.fullmatch(text)
    if match is None:
        raise InvalidKeyError(f"{_shown(text)} is not a coordinate: it looks like L0-30 or L0-30_H2")
    start, end = int(match[1]), int(match[2])
    if start >= end:
        raise InvalidKeyError(
            f"{_shown(text)} has no layers: the first must be below the second, which is not included"
        )
    return Coordinate(start, end, None if match[3] is None else int(match[3]))


def parse_key(text: str) -> Key:
    """Read a key. Raises `InvalidKeyError` for anything that `str` of a `Key` would not give."""
    if len(text) > MAX_KEY:
        raise InvalidKeyError(
            f"{_shown(text)} is not a key: it has {len(text)} characters, a key has {MAX_KEY} at most"
        )
    match = _KEY.fullmatch(text)
    if match is None:
        raise InvalidKeyError(
            f"{_shown(text)} is not a key: it looks like {{page_hash}}_{{digest}}_L0-30_H2, "
            "with 64 lowercase hex digits of page hash"
        )
    return Key(match[1], match[2], parse_coordinate(match[3]))


@functools.lru_cache(4096)
def _range(start: int, end: int) -> Range:
    return Range(start, end)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 120 else text[:117] + "...")
