"""The manifest of a batch write: what its bodies are, checked before any of them is received."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, TypeAdapter, ValidationError

from l3store.errors import L3Error, RefusedError, TooLargeError, WrongLengthError, WrongSumsError
from l3store.index import Store
from l3store.layout import LayoutError, parse_key
from l3store.layout.sums import decode_sums
from l3store.service.limits import Limits
from l3store.service.receiving import Announced

MEDIA_TYPE = "application/vnd.l3store.pages"
LENGTH_BYTES = 4


class ManifestItem(BaseModel):
    model_config = ConfigDict(extra="forbid")

    key: StrictStr
    length: StrictInt = Field(ge=1, description="bytes")
    sums: StrictStr | None = Field(None, description="base64, as in L3-Sums")


_MANIFEST = TypeAdapter(Annotated[list[ManifestItem], Field(min_length=1)])


@dataclass(frozen=True, slots=True)
class Item:
    """One body of a batch: what it is, or the ``error`` for which it is dropped unread."""

    text: str
    length: int
    body: Announced | None = None
    error: str | None = None


def read_manifest(data: bytes | bytearray, store: Store, *, body_bytes: int, limits: Limits) -> list[Item]:
    """Check a manifest whose bodies have ``body_bytes`` in all.

    What is wrong with one item is that item's error. What makes the rest of the request unreadable or doubtful is
    raised: no JSON of this shape, lengths that do not add up, a key twice.
    """
    try:
        parsed = _MANIFEST.validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise RefusedError(f"the manifest is not a list of keys and lengths: {where}: {first['msg']}") from error
    if len(parsed) > limits.max_write_objects:
        most = limits.max_write_objects
        raise TooLargeError(f"{len(parsed)} objects in one write; {most} at most", limit=most)
    total = sum(item.length for item in parsed)
    if total != body_bytes:
        raise WrongLengthError(f"the manifest's lengths add up to {total} bytes, but {body_bytes} follow it")
    seen: dict[str, int] = {}
    for position, item in enumerate(parsed):
        if seen.setdefault(item.key, position) != position:
            raise RefusedError(f"items {seen[item.key]} and {position} have one key, {item.key}: send each once")
    return [_check(item, store, limits) for item in parsed]


def _check(item: ManifestItem, store: Store, limits: Limits) -> Item:
    try:
        key = parse_key(item.key)
        cell_bytes = store.entry_of(key).namespace.cell_bytes
        expected = len(key.coordinate.layers) * cell_bytes
        if item.length != expected:
            raise WrongLengthError(f"{item.length} bytes, but {key} has {expected}")
        if expected > limits.max_object_bytes:
            raise TooLargeError(
                f"{expected} bytes; an object has {limits.max_object_bytes} at most: write fewer layers"
            )
        sums = None if item.sums is None else _sums(item.sums, expected // cell_bytes)
    except (L3Error, LayoutError) as error:
        return Item(item.key, item.length, error=str(error))
    return Item(item.key, item.length, Announced(key, expected, cell_bytes, sums))


def _sums(text: str, cells: int) -> bytes:
    try:
        return decode_sums(text, cells)
    except ValueError as error:
        raise WrongSumsError(str(error)) from error
