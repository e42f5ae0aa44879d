"""Shard plans: the objects that a rank writes and the reads that it needs, in order.

A shard need not lie on the grid. Layers are cut where the grid has its bounds, so that a shard on the grid writes grid
objects and a shard off it writes the parts that it holds. Reads of heads that split a group take the whole group and
cut after the read; writes cannot, and say which grid would fit.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from l3store.layout.errors import OutOfModelError, SplitGroupError, UnsupportedTopologyError
from l3store.layout.key import Coordinate
from l3store.layout.namespace import Namespace
from l3store.layout.shape import PageShape, Range, Span

MAX_RANKS = 4096
"""Tensor-parallel ranks of one stage; more is a typing error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The part of every page that one rank holds. ``heads`` is None for MLA; ``writer`` is False for a replica."""

    layers: Range
    heads: Range | None
    writer: bool = True


@dataclass(frozen=True, slots=True)
class PlannedObject:
    """One object and where it lies in the page as the plan's shape has it."""

    coordinate: Coordinate
    span: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """How a shard's part of a page is staged and cut.

    shape       of the staged page: the shard's layers, and every head group that it touches, whole
    groups      those head groups, global
    first_head  the shard's first head, counted inside the staged groups; 0 on the group grid
    objects     the grid's objects and parts of objects in it, layer-major, head-minor
    """

    layers: Range
    groups: Range
    heads: Range | None
    first_head: int
    shape: PageShape
    objects: tuple[PlannedObject, ...]

    def span(self, coordinate: Coordinate) -> Span:
        """Where a run of the plan's layers of one of its head groups lies in the staged page."""
        return _span(self.shape, coordinate, self.layers, self.groups)


def grid_objects(layers: Range, groups: Range | None, layer_partition: int) -> list[Coordinate]:
    """The objects of a run of layers and head groups: layer-major, head-minor. ``groups`` None is MLA."""
    runs = layers.cut(layer_partition)
    if groups is None:
        return [Coordinate(run.start, run.end) for run in runs]
    return [Coordinate(run.start, run.end, group) for run in runs for group in groups]


def plan_reads(namespace: Namespace, shard: Shard) -> ShardPlan:
    """What a rank reads for its shard. Any layers and any heads of the model; raises `OutOfModelError` beyond it."""
    namespace.check_layers(shard.layers)
    if shard.heads is None:
        heads = namespace.heads
        first_head = 0
    else:
        if namespace.fields.rank_replicated:
            raise OutOfModelError(f"heads {shard.heads} of an MLA model, which has none")
        heads = shard.heads.widened(namespace.fields.head_group)
        first_head = shard.heads.start - heads.start
    groups = namespace.groups_of(heads)
    shape = namespace.shape(layers=shard.layers, groups=groups)
    coordinates = grid_objects(
        shard.layers, None if namespace.fields.rank_replicated else groups, namespace.fields.layer_partition
    )
    return ShardPlan(
        layers=shard.layers,
        groups=groups,
        heads=heads,
        first_head=first_head,
        shape=shape,
        objects=tuple(PlannedObject(c, _span(shape, c, shard.layers, groups)) for c in coordinates),
    )


def plan_writes(namespace: Namespace, shard: Shard) -> ShardPlan:
    """What a rank writes for its shard; a replica's plan has no objects.

    Raises `SplitGroupError` where the shard's heads split a head group: its ``fits`` is the ``head_group`` that all of
    them would fill, and `OutOfModelError` beyond the model.
    """
    plan = plan_reads(namespace, shard)
    if shard.heads is not None and shard.heads != plan.heads:
        fits = math.gcd(namespace.fields.total_kv_heads, shard.heads.start, shard.heads.end)
        raise SplitGroupError(
            f"heads {shard.heads} split a group of head_group {namespace.fields.head_group}, so this rank cannot write "
            f"that grid: a namespace with head_group {fits} would fit (or let ranks with whole groups write)",
            fits=fits,
        )
    if shard.writer:
        return plan
    return ShardPlan(
        layers=plan.layers,
        groups=plan.groups,
        heads=plan.heads,
        first_head=plan.first_head,
        shape=plan.shape,
        objects=(),
    )


def _span(shape: PageShape, coordinate: Coordinate, layers: Range, groups: Range) -> Span:
    local = Range(coordinate.start_layer - layers.start, coordinate.end_layer - layers.start)
    return shape.run_span(local, 0 if coordinate.head_group is None else coordinate.head_group - groups.start)


@dataclass(frozen=True, slots=True)
class Topology:
    """How a deployment cuts a model: ``tp`` tensor-parallel ranks in each pipeline stage, and the stages' layers."""

    tp: int
    stages: tuple[Range, ...]

    def __post_init__(self) -> None:
        if not 1 <= self.tp <= MAX_RANKS or not self.stages or self.stages[0].start != 0:
            raise UnsupportedTopologyError(f"TP{self.tp}: needs 1 to {MAX_RANKS} ranks, and stages from layer 0 on")
        for before, after in zip(self.stages, self.stages[1:], strict=False):
            if before.end != after.start:
                raise UnsupportedTopologyError(f"stage {after} does not begin where the one before ends, {before.end}")

    @classmethod
    def even(cls, *, tp: int, pp: int, num_layers: int) -> Topology:
        """Stages as equal as can be, the first ones longer where the layers do not divide."""
        if not 1 <= pp <= num_layers:
            raise UnsupportedTopologyError(f"{pp} pipeline stages for {num_layers} layers")
        base, longer = divmod(num_layers, pp)
        starts = [stage * base + min(stage, longer) for stage in range(pp + 1)]
        return cls(tp, tuple(Range(a, b) for a, b in itertools.pairwise(starts)))

    def __str__(self) -> str:
        lengths = [len(stage) for stage in self.stages]
        uneven = f" ({'+'.join(map(str, lengths))} layers)" if len(set(lengths)) > 1 else ""
        return f"TP{self.tp}/PP{len(self.stages)}{uneven}"

    def shard(self, namespace: Namespace, *, stage: int, tp_rank: int) -> Shard:
        """What one rank holds, and whether it is the one that writes it.

        Ranks beyond the number of KV heads replicate heads, as engines do: the same head is the same key on all of
        them, and the first is its writer. MLA is replicated on all ranks. Raises `UnsupportedTopologyError` where
        heads and ranks do not divide.
        """
        layers = self.stages[stage]
        if namespace.fields.rank_replicated:
            return Shard(layers=layers, heads=None, writer=tp_rank == 0)
        heads, replica = heads_of_rank(namespace.fields.total_kv_heads, tp=self.tp, tp_rank=tp_rank)
        return Shard(layers=layers, heads=heads, writer=replica == 0)

    def shards(self, namespace: Namespace) -> list[Shard]:
        """All ranks' shards, stage by stage."""
        return [
            self.shard(namespace, stage=stage, tp_rank=rank)
            for stage in range(len(self.stages))
            for rank in range(self.tp)
        ]


def heads_of_rank(total_kv_heads: int, *, tp: int, tp_rank: int) -> tuple[Range, int]:
    """The KV heads of one tensor-parallel rank, and which replica of them it is (0 is the writer)."""
    if not 0 <= tp_rank < tp:
        raise UnsupportedTopologyError(f"tensor-parallel rank {tp_rank} of {tp}")
    if total_kv_heads % tp == 0:
        local = total_kv_heads // tp
        return Range(tp_rank * local, (tp_rank + 1) * local), 0
    if tp % total_kv_heads == 0:
        replicas = tp // total_kv_heads
        head, replica = divmod(tp_rank, replicas)
        return Range(head, head + 1), replica
    raise UnsupportedTopologyError(f"{total_kv_heads} KV heads and {tp} tensor-parallel ranks do not divide")
