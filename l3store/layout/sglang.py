"""What SGLang 0.5.23 itself derives for a rank, to the letter: its namespace, its objects, and what it refuses.

l3store accepts more (see `l3store.layout.plan`); this is the yardstick for being compatible, and where an adapter
starts, since SGLang hands over a rank's local view.
"""

from __future__ import annotations

from dataclasses import dataclass

from l3store.layout.errors import InvalidNamespaceError, LayoutError, SplitGroupError, UnsupportedTopologyError
from l3store.layout.key import Coordinate
from l3store.layout.namespace import Fields
from l3store.layout.plan import grid_objects
from l3store.layout.shape import PageShape, Range

_VECTOR_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """A rank as SGLang describes it. ``head_group`` None means all local heads, ``layer_partition`` None means 0."""

    model_id: str
    dtype: str
    page_size: int
    rank_replicated: bool
    local_kv_heads: int
    attn_tp_rank: int
    attn_tp_size: int
    start_layer: int
    end_layer: int
    is_final_stage: bool
    attn_cp_size: int = 1
    head_group: int | None = None
    layer_partition: int | None = None


@dataclass(frozen=True, slots=True)
class RankObjects:
    """A rank's namespace fields and its objects, layer-major, head-minor."""

    fields: Fields
    coordinates: tuple[Coordinate, ...]


def normalize_dtype(name: str) -> str:
    """``torch.bfloat16`` as the key scheme writes it: ``bfloat16``."""
    return name.removeprefix("torch.")


def plan_rank(rank: RankView) -> RankObjects:
    """The namespace and objects that SGLang's unified key scheme gives a rank.

    Raises what SGLang refuses: context parallelism and one head per rank without a head group
    (`UnsupportedTopologyError`, a NotImplementedError as there), layers off the grid, heads that split a group, an
    empty model id and an empty layer range (`LayoutError`, a ValueError as there).
    """
    if rank.attn_cp_size > 1:
        raise UnsupportedTopologyError("SGLang's unified key scheme has no context parallelism")
    if not rank.model_id:
        raise InvalidNamespaceError("model_id", "is empty: it would merge different models")
    layers = Range(rank.start_layer, rank.end_layer)
    partition = rank.layer_partition or 0
    if partition:
        if layers.start % partition:
            raise LayoutError(f"layers {layers} do not start on the grid of layer_partition {partition}")
        if layers.end % partition and not rank.is_final_stage:
            raise LayoutError(
                f"layers {layers} end off the grid of layer_partition {partition}; only the last stage may"
            )
    groups, head_group, total = _groups(rank)
    fields = Fields(
        model_id=rank.model_id,
        dtype=normalize_dtype(rank.dtype),
        page_size=rank.page_size,
        rank_replicated=rank.rank_replicated,
        total_kv_heads=total,
        layer_partition=partition,
        head_group=head_group,
    )
    return RankObjects(fields, tuple(grid_objects(layers, groups, partition)))


def check_page_unified(shape: PageShape) -> None:
    """Raise `LayoutError` where SGLang's page_unified kernels cannot move the rows: they take multiples of 16 bytes."""
    for row in shape.token_bytes:
        if row % _VECTOR_BYTES:
            raise LayoutError(f"one head group's token row is {row} bytes, not a multiple of {_VECTOR_BYTES}")


def _groups(rank: RankView) -> tuple[Range | None, int, int]:
    """The rank's head groups (global), the size of a group, and the model's KV heads as SGLang counts them."""
    if rank.rank_replicated:
        return None, 0, 0
    local = rank.local_kv_heads
    total = local * rank.attn_tp_size
    head_group = rank.head_group
    if head_group is None:
        if local == 1 and rank.attn_tp_size > 1:
            raise UnsupportedTopologyError("one KV head per rank needs a head_group to derive a namespace")
        head_group = local
    if head_group < 1 or local % head_group:
        raise SplitGroupError(f"head_group {head_group} does not divide this rank's {local} KV heads", fits=local)
    per_rank = local // head_group
    first = rank.attn_tp_rank * per_rank
    return Range(first, first + per_rank), head_group, total
