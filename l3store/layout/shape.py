"""Where the bytes of one page lie: spans, and the shape that gives them.

Byte order (SGLang's ``page-unified-v1``):

    MHA/GQA page: (head_group, layer, K/V, token_in_page, head_in_group, head_dim)
    MLA page:     (layer, token_in_page, dim)

Both are one shape here: (group, layer, component, token, head, row), where MHA has the components K and V and
MLA has one component, one group and one head.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from l3store.layout.errors import LayoutError


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """``length`` bytes from ``offset``, inside something. Both in bytes, ``end`` exclusive."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """A half-open range of layers or heads, absolute in the model: ``[start, end)``, never empty."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise LayoutError(f"[{self.start}, {self.end}) is not a range: it needs 0 <= start < end")

    def __len__(self) -> int:
        return self.end - self.start

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int) and self.start <= value < self.end

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))

    def __str__(self) -> str:
        return f"[{self.start}, {self.end})"

    def contains(self, other: Range) -> bool:
        """Whether ``other`` lies wholly inside."""
        return self.start <= other.start and other.end <= self.end

    def aligned(self, unit: int) -> bool:
        """Whether both ends are multiples of ``unit``."""
        return self.start % unit == 0 and self.end % unit == 0

    def widened(self, unit: int) -> Range:
        """The smallest range of whole units that contains this one."""
        return Range(self.start // unit * unit, -(-self.end // unit) * unit)

    def cut(self, unit: int) -> list[Range]:
        """The pieces left by cutting at every multiple of ``unit``; 0 does not cut."""
        if unit <= 0:
            return [self]
        bounds = [self.start, *range((self.start // unit + 1) * unit, self.end, unit), self.end]
        return [Range(a, b) for a, b in itertools.pairwise(bounds)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageShape:
    """The axes of one page, as a whole model or one shard holds it.

    groups       head groups (1 for MLA)
    layers       layers
    page_size    tokens in a page
    group_heads  KV heads in one group (1 for MLA)
    row_bytes    bytes of one head's row of one token, for each component: (K, V), or (latent,) for MLA
    """

    groups: int
    layers: int
    page_size: int
    group_heads: int
    row_bytes: tuple[int, ...]

    @property
    def components(self) -> int:
        """Tensors of a layer: 2 for MHA (K and V), 1 for MLA."""
        return len(self.row_bytes)

    @property
    def token_bytes(self) -> tuple[int, ...]:
        """Bytes of one group's row of one token, for each component."""
        return tuple(self.group_heads * row for row in self.row_bytes)

    @property
    def component_offsets(self) -> tuple[int, ...]:
        """Where each component starts inside a cell."""
        sizes = [self.page_size * token for token in self.token_bytes]
        return tuple(sum(sizes[:i]) for i in range(len(sizes)))

    @property
    def cell_bytes(self) -> int:
        """One layer of one head group of one page, all components."""
        return self.page_size * sum(self.token_bytes)

    @property
    def group_bytes(self) -> int:
        """All layers of one head group."""
        return self.layers * self.cell_bytes

    @property
    def page_bytes(self) -> int:
        return self.groups * self.group_bytes

    @property
    def vector_bytes(self) -> int:
        """The widest power of two, 16 at most, that divides every row: what a copy can move at once."""
        return math.gcd(16, *self.row_bytes)

    def run_span(self, layers: Range, group: int) -> Span:
        """The bytes of a run of layers of one group; ``layers`` and ``group`` count from this shape's own first."""
        if layers.end > self.layers or not 0 <= group < self.groups:
            raise LayoutError(f"layers {layers} of group {group} are not in a page of {self.layers} x {self.groups}")
        return Span(group * self.group_bytes + layers.start * self.cell_bytes, len(layers) * self.cell_bytes)
