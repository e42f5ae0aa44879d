"""Over random models, grids and topologies: writers cover each page exactly, readers get the tensor's bytes."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from l3store.layout import (
    Coordinate,
    Fields,
    Geometry,
    Namespace,
    Range,
    Shard,
    SplitGroupError,
    Topology,
    cover,
    plan_reads,
    plan_writes,
    recommend_grid,
    uncovered,
)


@dataclass(frozen=True)
class Model:
    """A namespace and one page of it as tensors: K/V or latent, (layer, component, token, head, byte)."""

    namespace: Namespace
    page: NDArray[np.uint8]


@st.composite
def models(draw: st.DrawFn) -> Model:
    layers = draw(st.integers(1, 12))
    mla = draw(st.booleans())
    group = draw(st.integers(1, 3))
    heads = 0 if mla else group * draw(st.integers(1, 4))
    fields = Fields(
        model_id="org/model",
        dtype="uint8",
        page_size=draw(st.integers(1, 3)),
        rank_replicated=mla,
        total_kv_heads=heads,
        layer_partition=draw(st.integers(0, layers + 1)),
        head_group=0 if mla else group,
    )
    row = draw(st.integers(1, 4))
    namespace = Namespace(fields=fields, geometry=Geometry(num_layers=layers, head_dim=row, itemsize=1))
    shape = (layers, 1 if mla else 2, fields.page_size, max(heads, 1), row)
    seed = draw(st.integers(0, 2**31))
    return Model(namespace, np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


@st.composite
def topologies(draw: st.DrawFn, namespace: Namespace) -> Topology:
    heads = namespace.fields.total_kv_heads
    if namespace.fields.rank_replicated:
        tp = draw(st.integers(1, 4))
    else:
        cuts = [n for n in range(1, heads + 1) if heads % n == 0]
        tp = draw(st.sampled_from([*cuts, heads * 2]))
    layers = namespace.geometry.num_layers
    bounds = sorted(draw(st.sets(st.integers(1, layers - 1), max_size=3))) if layers > 1 else []
    ends = [0, *bounds, layers]
    return Topology(tp, tuple(Range(a, b) for a, b in itertools.pairwise(ends)))


def page_bytes(model: Model, layers: Range, groups: Range) -> bytes:
    """The unified layout written out as a transpose: (group, layer, component, token, head in group, byte)."""
    size = model.namespace.fields.head_group or 1
    part = model.page[layers.start : layers.end, :, :, groups.start * size : groups.end * size]
    count, components, tokens, _, row = part.shape
    split = part.reshape(count, components, tokens, len(groups), size, row)
    return split.transpose(3, 0, 1, 2, 4, 5).tobytes()


def pool_bytes(model: Model, shard: Shard) -> bytes:
    heads = Range(0, model.page.shape[3]) if shard.heads is None else shard.heads
    return model.page[shard.layers.start : shard.layers.end, :, :, heads.start : heads.end].tobytes()


def written_by(model: Model, topology: Topology) -> dict[Coordinate, bytes]:
    """What all ranks of a deployment write for the page. Raises SplitGroupError as a rank would."""
    stored: dict[Coordinate, bytes] = {}
    for shard in topology.shards(model.namespace):
        plan = plan_writes(model.namespace, shard)
        staged = page_bytes(model, plan.layers, plan.groups)
        assert len(staged) == plan.shape.page_bytes
        for planned in plan.objects:
            body = staged[planned.span.offset : planned.span.end]
            assert planned.coordinate not in stored, "two writers of one object"
            stored[planned.coordinate] = body
    return stored


def cells(stored: dict[Coordinate, bytes]) -> list[tuple[int, int | None]]:
    return sorted((layer, c.head_group) for c in stored for layer in c.layers)


def read_run(stored: dict[Coordinate, bytes], wanted: Coordinate, cell: int) -> bytes:
    runs = [c.layers for c in stored if c.head_group == wanted.head_group]
    pieces = cover(runs, wanted.layers)
    assert pieces is not None
    assert uncovered(runs, wanted.layers) == []
    out = b""
    for piece in pieces:
        source = stored[Coordinate(piece.source.start, piece.source.end, wanted.head_group)]
        start = piece.taken.start - piece.source.start
        out += source[start * cell : (start + len(piece.taken)) * cell]
    return out


@given(st.data())
def test_writers_cover_each_page_exactly_and_every_reader_gets_the_tensor(data: st.DataObject) -> None:
    model = data.draw(models())
    namespace = model.namespace
    writer = data.draw(topologies(namespace))
    try:
        stored = written_by(model, writer)
    except SplitGroupError as error:
        # The refusal names a grid that this deployment can write, and so does the recommendation.
        fields = dataclasses.replace(namespace.fields, head_group=error.fits)
        for fitting in (dataclasses.replace(namespace, fields=fields), recommend_grid(namespace, [writer]).namespace):
            written_by(Model(fitting, model.page), writer)
        return
    groups = [None] if namespace.fields.rank_replicated else range(namespace.num_groups)
    assert cells(stored) == sorted(itertools.product(namespace.layers, groups))
    assert sum(map(len, stored.values())) == model.page.nbytes

    reader = data.draw(topologies(namespace))
    for shard in reader.shards(namespace):
        plan = plan_reads(namespace, shard)
        staged = bytearray(plan.shape.page_bytes)
        for planned in plan.objects:
            staged[planned.span.offset : planned.span.end] = read_run(stored, planned.coordinate, namespace.cell_bytes)
        # The strided cut after the read, written the other way round from page_bytes.
        shape = plan.shape
        axes = (shape.groups, shape.layers, shape.components, shape.page_size, shape.group_heads, shape.row_bytes[0])
        tensor = np.frombuffer(bytes(staged), np.uint8).reshape(axes).transpose(1, 2, 3, 0, 4, 5)
        heads = tensor.reshape(*tensor.shape[:3], shape.groups * shape.group_heads, shape.row_bytes[0])
        count = heads.shape[3] if shard.heads is None else len(shard.heads)
        cut = heads[:, :, :, plan.first_head : plan.first_head + count]
        assert cut.tobytes() == pool_bytes(model, shard)


@given(st.data())
def test_mixed_cuts_of_one_page(data: st.DataObject) -> None:
    """Several deployments write what is missing, each by its own cut: the page ends whole, without a cell twice."""
    model = data.draw(models())
    namespace = model.namespace
    stored: dict[Coordinate, bytes] = {}
    for topology in data.draw(st.lists(topologies(namespace), min_size=1, max_size=3)):
        for shard in data.draw(st.permutations(topology.shards(namespace))):
            if not data.draw(st.booleans()):
                continue
            try:
                plan = plan_writes(namespace, shard)
            except SplitGroupError:
                continue
            staged = page_bytes(model, plan.layers, plan.groups)
            for planned in plan.objects:
                runs = [c.layers for c in stored if c.head_group == planned.coordinate.head_group]
                for gap in uncovered(runs, planned.coordinate.layers):
                    start = planned.span.offset + (gap.start - planned.coordinate.start_layer) * namespace.cell_bytes
                    body = staged[start : start + len(gap) * namespace.cell_bytes]
                    stored[Coordinate(gap.start, gap.end, planned.coordinate.head_group)] = body
    assert len(set(cells(stored))) == len(cells(stored))
    wanted_groups = [None] if namespace.fields.rank_replicated else range(namespace.num_groups)
    for group in wanted_groups:
        runs = [c.layers for c in stored if c.head_group == group]
        for layer in namespace.layers:
            present = cover(runs, Range(layer, layer + 1)) is not None
            assert present == ((layer, group) in cells(stored))
            if present:
                index = 0 if group is None else group
                got = read_run(stored, Coordinate(layer, layer + 1, group), namespace.cell_bytes)
                assert got == page_bytes(model, Range(layer, layer + 1), Range(index, index + 1))


@given(
    st.lists(st.tuples(st.integers(0, 15), st.integers(1, 8)).map(lambda t: Range(t[0], t[0] + t[1])), max_size=8),
    st.tuples(st.integers(0, 15), st.integers(1, 8)).map(lambda t: Range(t[0], t[0] + t[1])),
)
def test_coverage_agrees_with_counting(stored: list[Range], wanted: Range) -> None:
    have = {layer for run in stored for layer in run}
    gaps = uncovered(stored, wanted)
    assert {layer for gap in gaps for layer in gap} == set(wanted) - have
    assert all(a.end < b.start for a, b in itertools.pairwise(gaps)), "gaps are maximal and in order"
    pieces = cover(stored, wanted)
    assert (pieces is None) == bool(gaps)
    if pieces is not None:
        assert [layer for piece in pieces for layer in piece.taken] == list(wanted)
        assert all(piece.source in stored and piece.source.contains(piece.taken) for piece in pieces)
        # No fewer runs would do: every set of stored runs that covers has at least as many.
        unique = set(stored)
        for size in range(1, len(pieces)):
            for chosen in itertools.combinations(unique, size):
                assert not set(wanted) <= {layer for run in chosen for layer in run}


@given(st.data())
def test_a_recommended_grid_lets_everybody_write(data: st.DataObject) -> None:
    model = data.draw(models())
    fleet = data.draw(st.lists(topologies(model.namespace), min_size=1, max_size=4))
    recommendation = recommend_grid(model.namespace, fleet)
    assert all(fit.refused is None for fit in recommendation.fits)
    for topology in fleet:
        written_by(Model(recommendation.namespace, model.page), topology)
