"""Where the bytes of a pool lie inside a staged page."""

from __future__ import annotations

from dataclasses import dataclass

from l3client.pools import KVPool
from l3store.layout.shape import PageShape, Range


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCut:
    """Heads ``heads`` of each of the groups ``groups`` of the staged page are the heads ``pool`` of the pool.

    Either whole groups, or a part of one.
    """

    groups: Range
    heads: Range
    pool: Range


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the bytes of a pool lie inside a staged page.

    shape        axes of one staged page, which may hold a run of the pool's layers and more heads than the pool
    first_head   the head of the staged page that is head 0 of the pool, counted through all groups
    first_layer  the layer of the pool that is layer 0 of the staged page
    """

    shape: PageShape
    first_head: int = 0
    first_layer: int = 0

    def __post_init__(self) -> None:
        if self.first_head < 0 or self.first_layer < 0:
            raise ValueError(f"first_head {self.first_head} and first_layer {self.first_layer} count from 0")

    @property
    def heads(self) -> int:
        """Heads of the staged page, all groups."""
        return self.shape.groups * self.shape.group_heads

    def resolve(self, pool: KVPool, layers: Range | None) -> Range:
        """The layers of the staged page to move: ``layers``, or all; checks that ``pool`` fits this placement.

        Raises ValueError that names the field.
        """
        for name in ("page_size", "row_bytes"):
            if getattr(pool, name) != getattr(self.shape, name):
                raise ValueError(
                    f"the pool has {name} {getattr(pool, name)} and the staged page {getattr(self.shape, name)}: "
                    "these bytes are not this pool's"
                )
        if self.first_head + pool.heads > self.heads:
            raise ValueError(
                f"heads [{self.first_head}, {self.first_head + pool.heads}) are not in a staged page of {self.heads}: "
                "stage every head group that the pool holds a part of"
            )
        layers = layers or Range(0, self.shape.layers)
        if layers.end > self.shape.layers or self.first_layer + layers.end > pool.num_layers:
            raise ValueError(
                f"layers {layers} of the staged page, which has {self.shape.layers}, are layers "
                f"[{self.first_layer + layers.start}, {self.first_layer + layers.end}) of the pool, "
                f"which has {pool.num_layers}"
            )
        return layers

    def require_whole(self, pool: KVPool) -> None:
        """Raises ValueError unless the pool, which fits, holds every head of the staged page."""
        if pool.heads != self.heads:
            raise ValueError(
                f"the pool holds heads [{self.first_head}, {self.first_head + pool.heads}) of a staged page of "
                f"{self.heads}: the others would be written as whatever the buffer held before; stage only head "
                "groups that the pool fills, and write a grid whose head_group divides the pool's heads"
            )

    def head_cuts(self, pool: KVPool) -> tuple[HeadCut, ...]:
        """The pool's heads, in order, as whole groups and parts of groups: three pieces at most."""
        size = self.shape.group_heads
        start, end = self.first_head, self.first_head + pool.heads
        head_end = min(-(-start // size) * size, end)
        tail_start = max(end // size * size, head_end)
        bounds = ((start, head_end), (head_end, tail_start), (tail_start, end))
        return tuple(self._cut(Range(a, b)) for a, b in bounds if a < b)

    def _cut(self, heads: Range) -> HeadCut:
        size = self.shape.group_heads
        group = heads.start // size
        inside = Range(0, size) if heads.aligned(size) else Range(heads.start - group * size, heads.end - group * size)
        return HeadCut(
            groups=Range(group, -(-heads.end // size)),
            heads=inside,
            pool=Range(heads.start - self.first_head, heads.end - self.first_head),
        )
