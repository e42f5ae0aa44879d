"""Namespaces and keys: what is told apart, what is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from l3store.layout import (
    Coordinate,
    Extension,
    Fields,
    Geometry,
    InvalidKeyError,
    InvalidNamespaceError,
    Key,
    LayoutError,
    Namespace,
    OffGridError,
    OutOfModelError,
    Range,
    SplitGroupError,
    Topology,
    UnsupportedTopologyError,
    chain_seed,
    hash_pages,
    parse_coordinate,
    parse_digest,
    parse_key,
    plan_reads,
    plan_writes,
    recommend_grid,
)

FIELDS = Fields(
    model_id="org/demo-60l-8h",
    dtype="bfloat16",
    page_size=64,
    rank_replicated=False,
    total_kv_heads=8,
    layer_partition=30,
    head_group=2,
)
GEOMETRY = Geometry(num_layers=60, head_dim=128, itemsize=2)
NAMESPACE = Namespace(fields=FIELDS, geometry=GEOMETRY)
HASH = "ab" * 32


def test_an_empty_extension_changes_nothing() -> None:
    assert dataclasses.replace(NAMESPACE, extension=Extension()).digest == "ukv1-0242df3ccc914fa4"
    assert "extension" not in NAMESPACE.to_wire()


EXTENSIONS: list[dict[str, Any]] = [
    {},
    {"model_revision": "a"},
    {"model_revision": "b"},
    {"pool": "a"},
    {"tenant": "a"},
    {"model_revision": "a", "pool": "draft"},
    {"v_head_dim": 64},
    {"row_bytes": 64},
    {"tenant": "ab", "pool": "c"},
    {"tenant": "a", "pool": "bc"},
]


def test_every_extension_has_a_digest_of_its_own() -> None:
    digests = [dataclasses.replace(NAMESPACE, extension=Extension(**e)).digest for e in EXTENSIONS]
    assert len(set(digests)) == len(digests)
    assert digests[0].startswith("ukv1-")
    assert all(d.startswith("l3x1-") for d in digests[1:])
    assert [parse_digest(d) for d in digests] == digests


def test_the_digests_of_extensions_never_change() -> None:
    """Stored objects are named by them. What is hashed is written out here once more, byte for byte."""
    vectors = json.loads((Path(__file__).parents[2] / "schemas" / "extension_vectors.json").read_text())
    assert [row["extension"] for row in vectors["digests"]] == EXTENSIONS
    for row in vectors["digests"]:
        assert dataclasses.replace(NAMESPACE, extension=Extension(**row["extension"])).digest == row["digest"]
    packed = NAMESPACE.packed_fields()
    assert packed[:1] == b"\x89"
    one_more = b"\x8a" + packed[1:] + b"\xa9extension\x81\xa6tenant\xa1a"
    assert vectors["digests"][4]["digest"] == "l3x1-" + hashlib.sha256(one_more).hexdigest()[:32]


def test_every_field_is_part_of_the_digest() -> None:
    others: dict[str, Any] = {
        "schema_version": 2,
        "model_id": "org/demo-60l_8h",
        "dtype": "float16",
        "page_size": 32,
        "total_kv_heads": 16,
        "layer_partition": 15,
        "head_group": 4,
        "object_layout": "page-unified-v2",
    }
    namespaces = [dataclasses.replace(FIELDS, **{k: v}) for k, v in others.items()]
    digests = {Namespace(fields=f, geometry=GEOMETRY).digest for f in [FIELDS, *namespaces]}
    assert len(digests) == len(others) + 1


def test_extension_sets_the_rows() -> None:
    wide_k = dataclasses.replace(NAMESPACE, extension=Extension(v_head_dim=64))
    assert wide_k.cell_bytes == 64 * 2 * (256 + 128)
    mla = Namespace(
        fields=dataclasses.replace(
            FIELDS, dtype="uint8", rank_replicated=True, total_kv_heads=0, head_group=0, layer_partition=0
        ),
        geometry=Geometry(num_layers=61, head_dim=576, itemsize=1),
        extension=Extension(row_bytes=656),
    )
    assert mla.cell_bytes == 64 * 656


def test_registration_reads_what_it_writes() -> None:
    for values in EXTENSIONS:
        namespace = dataclasses.replace(NAMESPACE, extension=Extension(**values))
        assert Namespace.from_wire(namespace.to_wire()) == namespace


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("namespace", "model_id", ""),
        ("namespace", "model_id", "a\x00b"),
        ("namespace", "model_id", "a" * 600),
        ("namespace", "dtype", "torch.bfloat16"),
        ("namespace", "page_size", 0),
        ("namespace", "page_size", True),
        ("namespace", "page_size", 64.0),
        ("namespace", "rank_replicated", 1),
        ("namespace", "head_group", 3),
        ("namespace", "head_group", 0),
        ("namespace", "total_kv_heads", -8),
        ("namespace", "layer_partition", -1),
        ("geometry", "num_layers", 0),
        ("geometry", "itemsize", 4),
        ("geometry", "head_dim", 1 << 40),
        ("extension", "tenant", ""),
        ("extension", "row_bytes", 0),
    ],
)
def test_a_wrong_field_is_named(part: str, field: str, value: object) -> None:
    wire = NAMESPACE.to_wire() | {"extension": {"pool": "draft"}}
    wire[part] = {**wire[part], field: value}
    with pytest.raises(InvalidNamespaceError) as caught:
        Namespace.from_wire(wire)
    assert field in str(caught.value)


@pytest.mark.parametrize("part", ["namespace", "geometry", "extension"])
def test_unknown_and_missing_fields_are_named(part: str) -> None:
    wire = NAMESPACE.to_wire() | {"extension": {"pool": "draft"}}
    with pytest.raises(InvalidNamespaceError, match=f"{part}.surprise"):
        Namespace.from_wire(wire | {part: {**wire[part], "surprise": 1}})
    if part != "extension":
        with pytest.raises(InvalidNamespaceError, match=part):
            Namespace.from_wire({k: v for k, v in wire.items() if k != part})
        with pytest.raises(InvalidNamespaceError, match="is missing"):
            Namespace.from_wire(wire | {part: {}})


coordinates = st.builds(
    lambda a, n, g: Coordinate(a, a + n, g),
    st.integers(0, 4000),
    st.integers(1, 96),
    st.none() | st.integers(0, 4096),
)


@given(st.binary(min_size=32, max_size=32).map(bytes.hex), st.sampled_from(EXTENSIONS), coordinates)
def test_keys_read_back(page_hash: str, extension: dict[str, Any], coordinate: Coordinate) -> None:
    digest = dataclasses.replace(NAMESPACE, extension=Extension(**extension)).digest
    key = Key(page_hash, digest, coordinate)
    assert parse_key(str(key)) == key


@given(st.text(max_size=200))
def test_any_text_is_a_key_or_refused(text: str) -> None:
    try:
        key = parse_key(text)
    except InvalidKeyError:
        return
    assert str(key) == text


GOOD = f"{HASH}_ukv1-0242df3ccc914fa4_L0-30_H2"


@pytest.mark.parametrize(
    "text",
    [
        "",
        GOOD.upper(),
        GOOD + "\n",
        " " + GOOD,
        GOOD.replace("L0-", "L00-"),
        GOOD.replace("L0-30", "L30-30"),
        GOOD.replace("L0-30", "L31-30"),
        GOOD.replace("L0-30", "L-1-30"),
        GOOD.replace("L0-30", "L0-999999999"),
        GOOD.replace("_H2", "_H+2"),
        GOOD.replace("_H2", "_H٢"),
        GOOD.replace("_H2", "_H2_H3"),
        GOOD.replace("ukv1", "ukv2"),
        GOOD.replace("0242", "024"),
        GOOD.replace("0242", "../2"),
        GOOD[1:],
        "../" + GOOD,
        GOOD + "/..",
        GOOD + "\x00",
        GOOD * 9,
    ],
)
def test_malformed_keys(text: str) -> None:
    with pytest.raises(InvalidKeyError):
        parse_key(text)


def test_a_coordinate_has_one_spelling() -> None:
    texts = [f"L{a}-{b}{h}" for a, b, h in itertools.product(["0", "00", "1"], ["2", "02"], ["", "_H0", "_H00"])]
    good = [t for t in texts if _reads(t)]
    assert good == ["L0-2", "L0-2_H0", "L1-2", "L1-2_H0"]


def _reads(text: str) -> bool:
    try:
        parse_coordinate(text)
    except InvalidKeyError:
        return False
    return True


def test_ranges() -> None:
    with pytest.raises(LayoutError):
        Range(3, 3)
    assert Range(10, 40).cut(30) == [Range(10, 30), Range(30, 40)]
    assert Range(10, 40).cut(0) == [Range(10, 40)]
    assert Range(3, 4).widened(2) == Range(2, 4)


def test_heads_off_the_grid_are_told_what_to_ask() -> None:
    with pytest.raises(OffGridError, match=r"ask for heads \[2, 4\)"):
        NAMESPACE.groups_of(Range(3, 4))
    with pytest.raises(OutOfModelError):
        NAMESPACE.groups_of(Range(6, 10))
    with pytest.raises(OutOfModelError):
        NAMESPACE.check_layers(Range(30, 61))


def test_a_writer_that_splits_a_group_learns_which_grid_fits() -> None:
    topology = Topology.even(tp=8, pp=1, num_layers=60)
    with pytest.raises(SplitGroupError, match="head_group 1 would fit") as caught:
        plan_writes(NAMESPACE, topology.shard(NAMESPACE, stage=0, tp_rank=3))
    assert caught.value.fits == 1
    reads = plan_reads(NAMESPACE, topology.shard(NAMESPACE, stage=0, tp_rank=3))
    assert (reads.heads, reads.first_head) == (Range(2, 4), 1)


def test_replicated_heads_share_keys_and_have_one_writer() -> None:
    grid = dataclasses.replace(NAMESPACE, fields=dataclasses.replace(FIELDS, head_group=1))
    shards = Topology.even(tp=16, pp=1, num_layers=60).shards(grid)
    assert shards[6].heads == shards[7].heads == Range(3, 4)
    assert [s.writer for s in shards[:4]] == [True, False, True, False]
    writes = [plan_writes(grid, s) for s in shards]
    assert [p.objects for p in writes[1::2]] == [()] * 8
    assert plan_reads(grid, shards[6]).objects == plan_reads(grid, shards[7]).objects


def test_topologies_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UnsupportedTopologyError):
        Topology.even(tp=3, pp=1, num_layers=60).shards(NAMESPACE)
    with pytest.raises(UnsupportedTopologyError):
        Topology.even(tp=1, pp=61, num_layers=60)
    with pytest.raises(UnsupportedTopologyError):
        Topology(1, (Range(0, 10), Range(20, 60)))


def test_the_recommended_grid_of_the_article() -> None:
    fleet = [Topology.even(tp=4, pp=2, num_layers=60), Topology.even(tp=2, pp=1, num_layers=60)]
    recommendation = recommend_grid(NAMESPACE, fleet)
    fields = recommendation.namespace.fields
    assert (fields.layer_partition, fields.head_group) == (30, 2)
    assert recommendation.objects_per_page == 8
    assert [fit.writes for fit in recommendation.fits] == [8, 8]
    assert all(fit.off_grid == 0 for fit in recommendation.fits)


def test_a_grid_is_not_cut_to_crumbs_for_one_uneven_deployment() -> None:
    uneven = Topology(2, (Range(0, 19), Range(19, 41), Range(41, 60)))
    fleet = [Topology.even(tp=4, pp=2, num_layers=60), uneven]
    recommendation = recommend_grid(NAMESPACE, fleet)
    assert recommendation.object_bytes >= 256 << 10
    assert recommendation.fits[1].refused is None
    assert recommendation.fits[1].off_grid > 0


def test_salts_do_not_alias() -> None:
    pairs = [("a", "bc"), ("ab", "c"), (None, "abc"), ("abc", None), ("", "abc"), ("abc", ""), (None, None), ("", "")]
    assert len({chain_seed(*pair) for pair in pairs}) == len(pairs)


def test_hashing_refuses_what_has_no_hash() -> None:
    with pytest.raises(ValueError, match="page_size"):
        hash_pages([1], 0)
    with pytest.raises(ValueError, match="below zero"):
        hash_pages([-1], 1)
    with pytest.raises(ValueError, match="64 bits"):
        hash_pages([1 << 64], 1)
    with pytest.raises(ValueError, match="prior"):
        hash_pages([1], 1, prior="ab")
    assert hash_pages([], 4) == []
    assert hash_pages([1, 2, 3], 4) == []
    assert hash_pages([1], 1, bigram=True) == []
