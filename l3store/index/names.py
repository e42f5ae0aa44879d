"""What is stored, from the names of objects: a million at a start, so none is looked at alone where that can be.

Nearly all pages are stored alike: what follows the page hash in the names of one page is the same in the next. It is
read once, and the hashes of all pages that have it are taken together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from l3store.layout import Coordinate, InvalidKeyError, parse_key

HASH_BYTES = 32

_DIGITS = 2 * HASH_BYTES
_HASH = re.compile(rf"[0-9a-f]{{{_DIGITS}}}")


class Alike(NamedTuple):
    """Pages of one namespace that are stored alike: their hashes back to back, and what is stored of each."""

    digest: str
    coordinates: frozenset[Coordinate]
    page_hashes: bytes

    @property
    def pages(self) -> int:
        return len(self.page_hashes) // HASH_BYTES


def pages_alike(names: Sequence[str]) -> Iterator[Alike]:
    """Read sorted names. What is no key is passed over."""
    for suffixes, page_hashes in _grouped(names).items():
        raw = _packed(page_hashes)
        for digest, coordinates in _stored(suffixes).items():
            yield Alike(digest, frozenset(coordinates), raw)


def _grouped(names: Sequence[str]) -> dict[tuple[str, ...], list[str]]:
    """By all that the names of a page have behind its hash: the hashes of those pages."""
    groups: dict[tuple[str, ...], list[str]] = {}
    heads = [name[:_DIGITS] for name in names]
    heads.append("")
    tails = [name[_DIGITS:] for name in names]
    # Those of the page before, which the next one is first compared with.
    suffixes: list[str] = []
    page_hashes: list[str] = []
    at = 0
    while page_hash := heads[at]:
        end = at + len(suffixes)
        # Sorted: where the last is of this page and the next is not, all between are all of it.
        if tails[at:end] != suffixes or heads[end - 1] != page_hash or heads[end] == page_hash:
            end = at + 1
            while heads[end] == page_hash:
                end += 1
            suffixes = tails[at:end]
            page_hashes = groups.setdefault(tuple(suffixes), [])
        page_hashes.append(page_hash)
        at = end
    return groups


def _packed(page_hashes: list[str]) -> bytes:
    digits = "".join(page_hashes)
    try:
        raw = bytes.fromhex(digits)
    except ValueError:
        raw = b""
    # Python also takes capitals and spaces.
    if raw.hex() != digits:
        raw = bytes.fromhex("".join(filter(_HASH.fullmatch, page_hashes)))
    return raw


def _stored(suffixes: Sequence[str]) -> dict[str, list[Coordinate]]:
    """By namespace: the coordinates that the names of a page say."""
    stored: dict[str, list[Coordinate]] = {}
    for suffix in suffixes:
        try:
            key = parse_key("0" * _DIGITS + suffix)
        except InvalidKeyError:
            continue
        stored.setdefault(key.digest, []).append(key.coordinate)
    return stored
