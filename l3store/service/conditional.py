"""Conditional requests (RFC 9110, 13): the ETag of what a key names, and whether a header has it."""

from __future__ import annotations

from l3store.backend import Sums
from l3store.layout.sums import content_tag


def etag(sums: Sums) -> str:
    """A strong ETag: equal for equal bytes, and different for different ones."""
    return f'"{content_tag(sums.packed)}"'


def matches(if_none_match: str | None, tag: str) -> bool:
    """Whether an If-None-Match header has the tag. It compares weakly, as the RFC says."""
    if if_none_match is None:
        return False
    return if_none_match.strip() == "*" or tag in (t.strip().removeprefix("W/") for t in if_none_match.split(","))
