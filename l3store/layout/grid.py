"""Which grid to agree on, for a fleet whose deployments cut a model differently."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from l3store.layout.errors import OutOfModelError, SplitGroupError
from l3store.layout.namespace import Namespace
from l3store.layout.plan import Topology, plan_reads, plan_writes

MIN_OBJECT_BYTES = 256 << 10
"""Below this, what an object costs beside its bytes (a name, a file, an index entry) begins to show."""

MAX_OBJECT_BYTES = 64 << 20
"""Above this, an object is long in the way of others: on the wire, in memory, and when one bad cell costs all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How one topology meets a grid.

    writes       objects that the whole deployment writes for a page
    off_grid     of those, how many are parts of grid objects
    cuts_groups  whether readers take whole groups and keep a part
    """

    topology: Topology
    writes: int
    off_grid: int
    cuts_groups: bool
    refused: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    namespace: Namespace
    fits: tuple[Fit, ...]

    @property
    def objects_per_page(self) -> int:
        fields = self.namespace.fields
        return len(self.namespace.layers.cut(fields.layer_partition)) * self.namespace.num_groups

    @property
    def object_bytes(self) -> int:
        """Bytes of a full grid object."""
        layers = self.namespace.fields.layer_partition or self.namespace.geometry.num_layers
        return min(layers, self.namespace.geometry.num_layers) * self.namespace.cell_bytes


def recommend_grid(namespace: Namespace, topologies: Sequence[Topology]) -> Recommendation:
    """The grid that lets every topology write whole objects, and as few of them as that allows.

    ``head_group`` is the largest that divides every rank's heads. ``layer_partition`` is the largest unit that all
    stage bounds share; where that makes objects too small or too large, it is the unit that keeps the most
    topologies, then the most bounds, on the grid. Stages off it write parts of objects, which readers put together.
    """
    for topology in topologies:
        if topology.stages[-1].end != namespace.geometry.num_layers:
            raise OutOfModelError(
                f"{topology} ends at layer {topology.stages[-1].end}, the model at {namespace.geometry.num_layers}"
            )
    head_group = 0
    if not namespace.fields.rank_replicated:
        local = [len(shard.heads) for t in topologies for shard in t.shards(namespace) if shard.heads is not None]
        head_group = math.gcd(namespace.fields.total_kv_heads, *local)
    candidate = _with_grid(namespace, layer_partition=0, head_group=head_group)
    partition = _layer_partition(candidate, topologies)
    chosen = _with_grid(namespace, layer_partition=partition, head_group=head_group)
    return Recommendation(namespace=chosen, fits=tuple(meet(chosen, t) for t in topologies))


def meet(namespace: Namespace, topology: Topology) -> Fit:
    """How ``topology`` meets the grid of ``namespace``."""
    on_grid = {(r.start, r.end) for r in namespace.layers.cut(namespace.fields.layer_partition)}
    writes = off_grid = 0
    cuts = False
    refused = None
    for shard in topology.shards(namespace):
        reads = plan_reads(namespace, shard)
        cuts = cuts or (shard.heads is not None and shard.heads != reads.heads)
        try:
            objects = plan_writes(namespace, shard).objects
        except SplitGroupError as error:
            refused = str(error)
            continue
        writes += len(objects)
        off_grid += sum((o.coordinate.start_layer, o.coordinate.end_layer) not in on_grid for o in objects)
    return Fit(topology=topology, writes=writes, off_grid=off_grid, cuts_groups=cuts, refused=refused)


def _layer_partition(namespace: Namespace, topologies: Sequence[Topology]) -> int:
    num_layers = namespace.geometry.num_layers
    smallest = min(num_layers, -(-MIN_OBJECT_BYTES // namespace.cell_bytes))
    largest = max(smallest, min(num_layers, MAX_OBJECT_BYTES // namespace.cell_bytes))
    bounds = [stage.start for topology in topologies for stage in topology.stages[1:]]
    if not bounds:
        # As few objects as the largest allows, all of a size.
        return -(-num_layers // -(-num_layers // largest))
    shared = math.gcd(*bounds)
    if smallest <= shared <= largest:
        return shared

    def worth(unit: int) -> tuple[int, int, int]:
        whole = sum(all(stage.start % unit == 0 for stage in topology.stages) for topology in topologies)
        return whole, sum(bound % unit == 0 for bound in bounds), unit

    return max(range(smallest, largest + 1), key=worth)


def _with_grid(namespace: Namespace, *, layer_partition: int, head_group: int) -> Namespace:
    fields = dataclasses.replace(namespace.fields, layer_partition=layer_partition, head_group=head_group)
    return dataclasses.replace(namespace, fields=fields)
