"""Page hashes: a SHA-256 chain over token ids that names every page by all tokens up to its end.

The chain, the escape for wide tokens, the bigram form (EAGLE) and the seed of an extra key or cache salt are those of
SGLang's HiCache. Model, dtype and page size are not in the hash: the namespace has them.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

_MAX_NARROW = 0xFFFFFFFF
_SEED_DOMAIN = b"sglang-cache-namespace-v1"


def chain_seed(extra_key: str | None = None, cache_salt: str | None = None) -> str | None:
    """What stands before the first page of a request that has an extra key or a cache salt; None where it has neither.

    The empty string is a value of its own, different from None.
    """
    if extra_key is None and cache_salt is None:
        return None
    return hashlib.sha256(_SEED_DOMAIN + _part(extra_key) + _part(cache_salt)).hexdigest()


def hash_pages(
    token_ids: Sequence[int],
    page_size: int,
    *,
    prior: str | None = None,
    bigram: bool = False,
    tail: bool = False,
) -> list[str]:
    """The page hashes of a prompt, 64 hex digits each, in order.

    ``prior`` is the hash of the page before, or a `chain_seed`. ``bigram`` hashes the pairs (token i, token i + 1),
    of which n + 1 tokens make n. ``tail`` also hashes a last page that is not full. Raises ValueError for a page size
    below 1, a token below zero or at least 2**64, and a prior that is not a hash.
    """
    if page_size < 1:
        raise ValueError(f"page_size {page_size} is not at least 1")
    digest = b"" if prior is None else bytes.fromhex(prior)
    if prior is not None and len(digest) != 32:
        raise ValueError(f"prior {prior[:80]!r} is not a page hash of 64 hex digits")
    units = max(0, len(token_ids) - 1) if bigram else len(token_ids)
    end = units if tail else units - units % page_size
    hashes = []
    for start in range(0, end, page_size):
        stop = min(start + page_size, units)
        if bigram:
            tokens: Sequence[int] = [t for i in range(start, stop) for t in (token_ids[i], token_ids[i + 1])]
        else:
            tokens = token_ids[start:stop]
        digest = hashlib.sha256(digest + _packed(tokens)).digest()
        hashes.append(digest.hex())
    return hashes


def _packed(tokens: Sequence[int]) -> bytes:
    """32-bit little-endian ids; a page with a wider id is marked with 0xFF and has 64-bit ones."""
    try:
        if max(tokens) <= _MAX_NARROW:
            return _little_endian(array("I", tokens))
        return b"\xff" + _little_endian(array("Q", tokens))
    except OverflowError as error:
        raise ValueError(
            f"a token id is below zero or does not fit 64 bits: {min(tokens)} ... {max(tokens)}"
        ) from error


def _little_endian(values: array[int]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _part(value: str | None) -> bytes:
    if value is None:
        return b"\x00"
    encoded = value.encode()
    return b"\x01" + len(encoded).to_bytes(8, "little") + encoded
