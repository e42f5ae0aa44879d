"""Namespaces: everything two deployments must agree on for their bytes to be interchangeable, and its digest.

The nine fields, their order and the digest ``ukv1-`` + first 16 hex digits of SHA-256 over their msgpack map are
those of SGLang's unified key scheme. What that scheme leaves out goes into the ``Extension``; a namespace that has
one is named by a digest of its own kind, ``l3x1-`` + 32 hex digits over the nine fields and the extension's set
fields. An empty extension changes nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import msgpack

from l3store.layout.errors import InvalidNamespaceError, OffGridError, OutOfModelError
from l3store.layout.shape import PageShape, Range

OBJECT_LAYOUT = "page-unified-v1"
DIGEST_PATTERN = r"(?:ukv1-[0-9a-f]{16}|l3x1-[0-9a-f]{32})"

MAX_TEXT = 512
MAX_LAYERS = 4096
MAX_HEADS = 4096
MAX_PAGE_SIZE = 65536
MAX_ROW_BYTES = 1 << 20

_DTYPE = re.compile(r"[a-z][a-z0-9_]{0,63}")
# Bytes of one element of the dtypes whose name fixes it; packed formats are not here, their rows are given in bytes.
_ITEMSIZE = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1,
}  # fmt: skip


def _whole(field: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise InvalidNamespaceError(field, f"{value!r} is not a whole number from {low} to {high}")


def _text(field: str, value: object) -> None:
    if not isinstance(value, str) or not value or len(value) > MAX_TEXT:
        raise InvalidNamespaceError(field, f"needs 1 to {MAX_TEXT} characters; it keeps different owners' bytes apart")
    if any(ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0 or 0xD800 <= ord(c) < 0xE000 for c in value):
        raise InvalidNamespaceError(field, f"{value!r} has control characters or lone surrogates")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """The nine fields of the unified key scheme, in digest order. MLA: ``total_kv_heads`` and ``head_group`` are 0.

    ``layer_partition`` 0 means that no layer grid is agreed: each writer's run of layers is one object.
    """

    schema_version: int = 1
    model_id: str
    dtype: str
    page_size: int
    rank_replicated: bool
    total_kv_heads: int
    layer_partition: int
    head_group: int
    object_layout: str = OBJECT_LAYOUT

    def __post_init__(self) -> None:
        _whole("schema_version", self.schema_version, 1, 255)
        _text("model_id", self.model_id)
        if not isinstance(self.dtype, str) or not _DTYPE.fullmatch(self.dtype):
            raise InvalidNamespaceError("dtype", f"{self.dtype!r} is not a dtype name such as bfloat16 (no 'torch.')")
        _whole("page_size", self.page_size, 1, MAX_PAGE_SIZE)
        if type(self.rank_replicated) is not bool:
            raise InvalidNamespaceError("rank_replicated", f"{self.rank_replicated!r} is not true or false")
        _whole("layer_partition", self.layer_partition, 0, MAX_LAYERS)
        _text("object_layout", self.object_layout)
        if self.rank_replicated:
            for field in ("total_kv_heads", "head_group"):
                if getattr(self, field) != 0 or type(getattr(self, field)) is not int:
                    raise InvalidNamespaceError(field, "must be 0 where every rank holds the same rows (MLA)")
            return
        _whole("total_kv_heads", self.total_kv_heads, 1, MAX_HEADS)
        _whole("head_group", self.head_group, 1, MAX_HEADS)
        if self.total_kv_heads % self.head_group:
            raise InvalidNamespaceError(
                "head_group", f"{self.head_group} does not divide the model's {self.total_kv_heads} KV heads"
            )

    def to_dict(self) -> dict[str, Any]:
        """The fields as a mapping, in digest order."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes that turn coordinates into bytes. ``head_dim`` is the width of the latent row for MLA."""

    num_layers: int
    head_dim: int
    itemsize: int

    def __post_init__(self) -> None:
        _whole("num_layers", self.num_layers, 1, MAX_LAYERS)
        _whole("head_dim", self.head_dim, 1, MAX_ROW_BYTES)
        _whole("itemsize", self.itemsize, 1, 16)

    def to_dict(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """What the nine fields leave out. Absent (None) changes nothing; present is part of the digest.

    model_revision  which weights
    pool            which KV of the model, such as ``draft``; absent is the target's
    tenant          whose bytes
    v_head_dim      width of a V row where it differs from K's
    row_bytes       bytes of one head's row of one token where head_dim x itemsize does not say it (packed formats)
    """

    model_revision: str | None = None
    pool: str | None = None
    tenant: str | None = None
    v_head_dim: int | None = None
    row_bytes: int | None = None

    def __post_init__(self) -> None:
        for field in ("model_revision", "pool", "tenant"):
            if getattr(self, field) is not None:
                _text(field, getattr(self, field))
        for field in ("v_head_dim", "row_bytes"):
            if getattr(self, field) is not None:
                _whole(field, getattr(self, field), 1, MAX_ROW_BYTES)
        if self.v_head_dim is not None and self.row_bytes is not None:
            raise InvalidNamespaceError("row_bytes", "cannot stand beside v_head_dim: it says the width of both rows")

    def to_dict(self) -> dict[str, str | int]:
        """The fields that are set, in digest order."""
        values = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {name: value for name, value in values if value is not None}


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """Fields, geometry and extension: enough to name every object of a model and to know its length in bytes."""

    fields: Fields
    geometry: Geometry
    extension: Extension = Extension()

    def __post_init__(self) -> None:
        known = _ITEMSIZE.get(self.fields.dtype)
        if known is not None and known != self.geometry.itemsize:
            raise InvalidNamespaceError("itemsize", f"{self.geometry.itemsize}, but {self.fields.dtype} has {known}")
        if self.extension.v_head_dim is not None and self.fields.rank_replicated:
            raise InvalidNamespaceError("v_head_dim", "has no meaning for MLA, whose rows hold K and V together")
        if max(self._row_bytes) > MAX_ROW_BYTES:
            raise InvalidNamespaceError(
                "head_dim", f"makes a row of {max(self._row_bytes)} bytes; {MAX_ROW_BYTES} at most"
            )

    @cached_property
    def digest(self) -> str:
        """The namespace's name: ``ukv1-...`` as SGLang derives it, or ``l3x1-...`` where an extension is set."""
        extension = self.extension.to_dict()
        if not extension:
            return "ukv1-" + hashlib.sha256(self.packed_fields()).hexdigest()[:16]
        packed: bytes = msgpack.packb({**self.fields.to_dict(), "extension": extension})
        return "l3x1-" + hashlib.sha256(packed).hexdigest()[:32]

    def packed_fields(self) -> bytes:
        """The msgpack map that SGLang hashes."""
        packed: bytes = msgpack.packb(self.fields.to_dict())
        return packed

    @property
    def layers(self) -> Range:
        """All layers of the model."""
        return Range(0, self.geometry.num_layers)

    @property
    def heads(self) -> Range | None:
        """All KV heads of the model; None for MLA."""
        return None if self.fields.rank_replicated else Range(0, self.fields.total_kv_heads)

    @property
    def num_groups(self) -> int:
        """Head groups of the model; MLA counts as one."""
        return 1 if self.fields.rank_replicated else self.fields.total_kv_heads // self.fields.head_group

    @cached_property
    def cell_bytes(self) -> int:
        return self.shape(layers=Range(0, 1), groups=Range(0, 1)).cell_bytes

    @property
    def _row_bytes(self) -> tuple[int, ...]:
        row = self.extension.row_bytes or self.geometry.head_dim * self.geometry.itemsize
        if self.fields.rank_replicated:
            return (row,)
        v_row = row if self.extension.v_head_dim is None else self.extension.v_head_dim * self.geometry.itemsize
        return (row, v_row)

    def shape(self, *, layers: Range | None = None, groups: Range | None = None) -> PageShape:
        """The shape of a page, or of the part of it that a run of layers and head groups has."""
        return PageShape(
            groups=self.num_groups if groups is None else len(groups),
            layers=self.geometry.num_layers if layers is None else len(layers),
            page_size=self.fields.page_size,
            group_heads=self.fields.head_group or 1,
            row_bytes=self._row_bytes,
        )

    def check_layers(self, layers: Range) -> None:
        """Raise `OutOfModelError` for layers that the model does not have."""
        if layers.end > self.geometry.num_layers:
            raise OutOfModelError(f"layers {layers} end beyond the model's {self.geometry.num_layers} layers")

    def groups_of(self, heads: Range | None) -> Range:
        """The head groups of a head range on the group grid; None means all heads.

        Raises `OffGridError`, naming the range to ask for, where the heads split a group, and `OutOfModelError`.
        """
        if heads is None:
            return Range(0, self.num_groups)
        if self.fields.rank_replicated:
            raise OutOfModelError(f"heads {heads} of an MLA model, which has none: leave heads out")
        if heads.end > self.fields.total_kv_heads:
            raise OutOfModelError(f"heads {heads} end beyond the model's {self.fields.total_kv_heads} KV heads")
        group = self.fields.head_group
        if not heads.aligned(group):
            raise OffGridError(
                f"heads {heads} are off the grid of head_group {group}: "
                f"ask for heads {heads.widened(group)} and cut after the read"
            )
        return Range(heads.start // group, heads.end // group)

    def to_wire(self) -> dict[str, Any]:
        """The body of a registration, without labels."""
        wire: dict[str, Any] = {"namespace": self.fields.to_dict(), "geometry": self.geometry.to_dict()}
        if extension := self.extension.to_dict():
            wire["extension"] = extension
        return wire

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Namespace:
        """Read what `to_wire` writes. Raises `InvalidNamespaceError` naming the field that is missing or unknown."""
        return cls(
            fields=_read(Fields, "namespace", wire.get("namespace")),
            geometry=_read(Geometry, "geometry", wire.get("geometry")),
            extension=_read(Extension, "extension", wire.get("extension") or {}),
        )


_Part = TypeVar("_Part", Fields, Geometry, Extension)


def _read(kind: type[_Part], name: str, values: object) -> _Part:
    if not isinstance(values, Mapping):
        raise InvalidNamespaceError(name, "is missing or not an object")
    known = {f.name: f.default is dataclasses.MISSING for f in dataclasses.fields(kind)}
    for field in values:
        if field not in known:
            raise InvalidNamespaceError(f"{name}.{field}", f"is not a field of it; the fields are {', '.join(known)}")
    for field, required in known.items():
        if required and field not in values:
            raise InvalidNamespaceError(f"{name}.{field}", "is missing")
    return kind(**values)


def parse_digest(text: str) -> str:
    """Check a namespace digest. Raises `InvalidNamespaceError`."""
    if not _DIGEST.fullmatch(text):
        raise InvalidNamespaceError("digest", f"{text[:80]!r} is neither ukv1- and 16 nor l3x1- and 32 hex digits")
    return text


_DIGEST = re.compile(DIGEST_PATTERN)
