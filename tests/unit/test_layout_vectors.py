"""Every vector computed with SGLang 0.5.23 (schemas/sglang_vectors.json) against our arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from l3store.layout import (
    Coordinate,
    Extension,
    Geometry,
    Key,
    Namespace,
    PageShape,
    Range,
    Shard,
    chain_seed,
    hash_pages,
    parse_key,
    plan_writes,
)
from l3store.layout.sglang import RankView, check_page_unified, normalize_dtype, plan_rank

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[2] / "schemas" / "sglang_vectors.json").read_text())
PLANS = {plan["name"]: plan for plan in VECTORS["plans"]}
REJECTIONS = {case["name"]: case for case in VECTORS["rejections"]}
HASHES = {case["name"]: case for case in VECTORS["page_hash"]["cases"]}
ERRORS = {"ValueError": ValueError, "NotImplementedError": NotImplementedError}


def _suffix(digest: str, coordinate: Coordinate) -> str:
    return f"{digest}_{coordinate}"


def _namespace(plan: dict[str, Any]) -> Namespace:
    layout = plan["layout"]
    last = max(p["kwargs"]["end_layer"] for p in PLANS.values() if p["digest"] == plan["digest"])
    geometry = Geometry(num_layers=last, head_dim=layout["head_dim"], itemsize=layout["itemsize"])
    return Namespace(fields=plan_rank(RankView(**plan["kwargs"])).fields, geometry=geometry, extension=Extension())


def test_all_vectors_are_here() -> None:
    assert (len(PLANS), len(REJECTIONS), len(HASHES)) == (18, 9, 13)


@pytest.mark.parametrize("name", PLANS)
def test_fields_digest_and_suffixes(name: str) -> None:
    plan = PLANS[name]
    objects = plan_rank(RankView(**plan["kwargs"]))
    namespace = _namespace(plan)
    assert objects.fields.to_dict() == plan["namespace"]
    assert list(objects.fields.to_dict()) == plan["namespace_field_order"]
    assert namespace.packed_fields().hex() == plan["namespace_msgpack_hex"]
    assert namespace.digest == plan["digest"]
    assert [_suffix(namespace.digest, c) for c in objects.coordinates] == plan["suffixes"]


@pytest.mark.parametrize("name", PLANS)
def test_spans(name: str) -> None:
    plan = PLANS[name]
    kwargs, layout = plan["kwargs"], plan["layout"]
    namespace = _namespace(plan)
    heads = None
    if not kwargs["rank_replicated"]:
        first = kwargs["attn_tp_rank"] * kwargs["local_kv_heads"]
        heads = Range(first, first + kwargs["local_kv_heads"])
    layers = Range(kwargs["start_layer"], kwargs["end_layer"])
    shard = plan_writes(namespace, Shard(layers=layers, heads=heads))
    shape = shard.shape

    assert shape.token_bytes[0] == layout["group_bytes"]
    assert shape.cell_bytes == layout["layer_bytes"]
    assert shape.group_bytes == layout["head_group_bytes"]
    assert shape.page_bytes == layout["bytes_per_page"]
    if kwargs["rank_replicated"]:
        dims = [1, shape.layers, shape.page_size, layout["head_dim"]]
    else:
        dims = [1, shape.groups, shape.layers, 2, shape.page_size, shape.group_heads, layout["head_dim"]]
    assert dims == layout["page_dims_for_1_page"]
    assert [
        {
            "suffix": _suffix(namespace.digest, o.coordinate),
            "layer_range": [o.coordinate.start_layer - layers.start, o.coordinate.end_layer - layers.start],
            "head_group_index": (o.coordinate.head_group or 0) - (shard.groups.start if heads else 0),
            "offset": o.span.offset,
            "length": o.span.length,
        }
        for o in shard.objects
    ] == layout["chunks"]
    runs = layers.cut(namespace.fields.layer_partition)
    assert [[r.start - layers.start, r.end - layers.start] for r in runs] == plan["layer_ranges"]
    group = shape.group_heads
    assert [[g * group, (g + 1) * group] for g in range(shape.groups)] == plan["head_ranges"]


@pytest.mark.parametrize("name", [n for n, c in REJECTIONS.items() if "kwargs" in c])
def test_rejections(name: str) -> None:
    case = REJECTIONS[name]
    with pytest.raises(ERRORS[case["error_type"]]) as caught:
        plan_rank(RankView(**case["kwargs"]))
    assert isinstance(caught.value, NotImplementedError) == (case["error_type"] == "NotImplementedError")


def test_rejection_of_rows_that_no_vector_moves() -> None:
    assert REJECTIONS["group_bytes_8"]["error_type"] == "ValueError"
    shape = PageShape(groups=1, layers=1, page_size=4, group_heads=1, row_bytes=(8, 8))
    with pytest.raises(ValueError, match="8 bytes"):
        check_page_unified(shape)
    check_page_unified(PageShape(groups=1, layers=1, page_size=4, group_heads=2, row_bytes=(8, 8)))


@pytest.mark.parametrize("name", HASHES)
def test_page_hashes(name: str) -> None:
    case = HASHES[name]
    seed = chain_seed(case["extra_key"], case["cache_salt"])
    assert seed == case["seed"]
    prior = case["prior_hash"] if seed is None else seed
    hashes = hash_pages(case["token_ids"], case["page_size"], prior=prior, bigram=case["is_bigram"], tail=True)
    assert hashes == case["page_hashes"]


def test_hash_of_one_page() -> None:
    case = VECTORS["page_hash"]["get_hash_str_without_page_size"]
    assert hash_pages(case["token_ids"], len(case["token_ids"])) == [case["result"]]


@pytest.mark.parametrize("index", range(len(VECTORS["full_key_examples"])))
def test_full_keys(index: int) -> None:
    example = VECTORS["full_key_examples"][index]
    plan = PLANS[example["plan"]]
    digest = _namespace(plan).digest
    objects = plan_rank(RankView(**plan["kwargs"])).coordinates
    keys = [Key(example["page_hash"], digest, c) for c in objects]
    assert [str(key) for key in keys] == example["keys"]
    assert [parse_key(text) for text in example["keys"]] == keys
    assert sorted(keys) == keys


@pytest.mark.parametrize("dtype", VECTORS["normalize_dtype"])
def test_dtype_names(dtype: str) -> None:
    assert normalize_dtype(dtype) == VECTORS["normalize_dtype"][dtype]


def test_deployments_share_objects() -> None:
    expected = VECTORS["invariant_mha_objects_per_page"]
    unions = {
        cut: {s for name, plan in PLANS.items() if name.startswith(f"mha60x8_{cut}_t") for s in plan_suffixes(plan)}
        for cut in ("TP4PP2", "TP2PP1")
    }
    whole = plan_suffixes(PLANS["mha60x8_TP1PP1"])
    assert len(unions["TP4PP2"]) == expected["TP4PP2_union"]
    assert len(whole) == expected["TP1PP1"]
    assert unions["TP4PP2"] == unions["TP2PP1"] == whole


def plan_suffixes(plan: dict[str, Any]) -> set[str]:
    digest = _namespace(plan).digest
    return {_suffix(digest, c) for c in plan_rank(RankView(**plan["kwargs"])).coordinates}
