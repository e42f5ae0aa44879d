"""`l3store plan`: which grid a fleet should agree on."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from typing import Any

from l3store.cli._commands import Commands
from l3store.layout import Fields, Fit, Geometry, Namespace, Range, Recommendation, Topology, recommend_grid

_TOPOLOGY = re.compile(r"tp([0-9]+)(?:/?pp([0-9]+))?(?::([0-9]+(?:\+[0-9]+)*))?", re.IGNORECASE)


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "plan",
        help="recommend the grid for a list of topologies",
        description="Recommend head_group and layer_partition for deployments that cut one model differently.",
    )
    parser.add_argument("topology", nargs="+", help="tp4/pp2, tp2, or with the layers of each stage: tp2/pp3:19+22+19")
    parser.add_argument("--layers", type=int, required=True, help="layers of the model")
    heads = parser.add_mutually_exclusive_group(required=True)
    heads.add_argument("--kv-heads", type=int, help="KV heads of the model")
    heads.add_argument("--mla", action="store_true", help="the model has latent attention, and no KV heads")
    parser.add_argument("--head-dim", type=int, required=True, help="head_dim, or the width of the latent row for MLA")
    parser.add_argument("--dtype", default="bfloat16", help="logical KV dtype [bfloat16]")
    parser.add_argument("--itemsize", type=int, default=2, help="bytes of an element [2]")
    parser.add_argument("--page-size", type=int, default=64, help="tokens in a page [64]")
    parser.add_argument("--model-id", default="model", help="to show the digest [model]")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    mla = args.mla
    fields = Fields(
        model_id=args.model_id,
        dtype=args.dtype,
        page_size=args.page_size,
        rank_replicated=mla,
        total_kv_heads=args.kv_heads or 0,
        layer_partition=0,
        head_group=0 if mla else 1,
    )
    geometry = Geometry(num_layers=args.layers, head_dim=args.head_dim, itemsize=args.itemsize)
    try:
        topologies = [read_topology(text, args.layers) for text in args.topology]
    except ValueError as error:
        print(f"l3store plan: {error}", file=sys.stderr)
        return 2
    recommendation = recommend_grid(Namespace(fields=fields, geometry=geometry), topologies)
    print(json.dumps(_as_json(recommendation), indent=1) if args.json else _as_text(recommendation))
    return 0


def read_topology(text: str, num_layers: int) -> Topology:
    """Read ``tp4/pp2`` or ``tp2/pp3:19+22+19``. Raises ValueError."""
    match = _TOPOLOGY.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a topology: write tp4/pp2, or tp2/pp3:19+22+19 for uneven stages")
    tp, pp = int(match[1]), int(match[2] or 1)
    if match[3] is None:
        return Topology.even(tp=tp, pp=pp, num_layers=num_layers)
    lengths = [int(length) for length in match[3].split("+")]
    if match[2] and len(lengths) != pp:
        raise ValueError(f"{text!r}: {pp} stages, but layers for {len(lengths)}")
    bounds = [0, *itertools.accumulate(lengths)]
    return Topology(tp, tuple(Range(a, b) for a, b in itertools.pairwise(bounds)))


def _as_json(recommendation: Recommendation) -> dict[str, Any]:
    fields = recommendation.namespace.fields
    return {
        "layer_partition": fields.layer_partition,
        "head_group": fields.head_group,
        "digest": recommendation.namespace.digest,
        "objects_per_page": recommendation.objects_per_page,
        "object_bytes": recommendation.object_bytes,
        "topologies": [
            {
                "topology": str(fit.topology),
                "objects_written": fit.writes,
                "off_grid": fit.off_grid,
                "cuts_groups": fit.cuts_groups,
                "refused": fit.refused,
            }
            for fit in recommendation.fits
        ],
    }


def _as_text(recommendation: Recommendation) -> str:
    fields = recommendation.namespace.fields
    page = recommendation.namespace.shape().page_bytes
    head = (
        f"layer_partition {fields.layer_partition}, head_group {fields.head_group}: {recommendation.objects_per_page} "
        f"objects of up to {recommendation.object_bytes:,} bytes for a page of {page:,}"
    )
    return "\n".join([head, *(f"  {fit.topology!s:<28} {_verdict(fit)}" for fit in recommendation.fits)])


def _verdict(fit: Fit) -> str:
    if fit.refused:
        return f"cannot write: {fit.refused}"
    off = f", {fit.off_grid} of them parts of grid objects" if fit.off_grid else ", all on the grid"
    return f"writes {fit.writes} objects a page{off}"
