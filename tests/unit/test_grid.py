"""Which grid is recommended: no crumbs for one odd deployment, no objects that a service refuses."""

from __future__ import annotations

import pytest

from l3store.cli.plan import read_topology
from l3store.layout import Fields, Geometry, Namespace, recommend_grid
from l3store.layout.grid import MAX_OBJECT_BYTES, MIN_OBJECT_BYTES


def namespace(layers: int, heads: int, head_dim: int = 128, page_size: int = 64) -> Namespace:
    fields = Fields(
        model_id="m", dtype="bfloat16", page_size=page_size, rank_replicated=heads == 0,
        total_kv_heads=heads, layer_partition=0, head_group=1 if heads else 0,
    )  # fmt: skip
    return Namespace(fields=fields, geometry=Geometry(num_layers=layers, head_dim=head_dim, itemsize=2))


@pytest.mark.parametrize(
    ("layers", "heads", "head_dim", "fleet", "grid"),
    [
        (80, 8, 128, "tp4/pp2 tp2 tp8", (40, 1)),
        (80, 8, 128, "tp16 tp8/pp4", (20, 1)),
        (80, 8, 128, "tp2 tp4", (80, 2)),
        (80, 8, 128, "tp8/pp3:1+40+39 tp8/pp2 tp8", (40, 1)),
        (80, 8, 128, "tp4/pp2:3+77 tp8 tp8/pp2", (40, 1)),
        (94, 4, 128, "tp4 tp8/pp2", (47, 1)),
        (61, 0, 576, "tp8 tp4/pp2", (31, 0)),
        (60, 8, 128, "tp4/pp2 tp2/pp3:19+22+19", (30, 2)),
    ],
)
def test_what_an_expert_would_choose(layers: int, heads: int, head_dim: int, fleet: str, grid: tuple[int, int]) -> None:
    found = recommend_grid(namespace(layers, heads, head_dim), [read_topology(t, layers) for t in fleet.split()])
    assert (found.namespace.fields.layer_partition, found.namespace.fields.head_group) == grid
    assert MIN_OBJECT_BYTES <= found.object_bytes <= MAX_OBJECT_BYTES


def test_pages_so_large_that_an_object_of_all_layers_would_be_refused() -> None:
    found = recommend_grid(namespace(80, 8, page_size=1024), [read_topology("tp1", 80)])
    assert found.object_bytes <= MAX_OBJECT_BYTES
    assert found.namespace.fields.layer_partition == 16
