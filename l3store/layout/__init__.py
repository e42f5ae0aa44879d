"""The unified layout: names, spans, coverage and plans. Pure arithmetic; imports nothing else of ours."""

from __future__ import annotations

from l3store.layout.coverage import Piece, cover, uncovered
from l3store.layout.errors import (
    InvalidKeyError,
    InvalidNamespaceError,
    LayoutError,
    OffGridError,
    OutOfModelError,
    SplitGroupError,
    UnsupportedTopologyError,
)
from l3store.layout.grid import Fit, Recommendation, meet, recommend_grid
from l3store.layout.key import Coordinate, Key, parse_coordinate, parse_key
from l3store.layout.namespace import Extension, Fields, Geometry, Namespace, parse_digest
from l3store.layout.pagehash import chain_seed, hash_pages
from l3store.layout.plan import (
    PlannedObject,
    Shard,
    ShardPlan,
    Topology,
    grid_objects,
    heads_of_rank,
    plan_reads,
    plan_writes,
)
from l3store.layout.shape import PageShape, Range, Span

__all__ = [
    "Coordinate",
    "Extension",
    "Fields",
    "Fit",
    "Geometry",
    "InvalidKeyError",
    "InvalidNamespaceError",
    "Key",
    "LayoutError",
    "Namespace",
    "OffGridError",
    "OutOfModelError",
    "PageShape",
    "Piece",
    "PlannedObject",
    "Range",
    "Recommendation",
    "Shard",
    "ShardPlan",
    "Span",
    "SplitGroupError",
    "Topology",
    "UnsupportedTopologyError",
    "chain_seed",
    "cover",
    "grid_objects",
    "hash_pages",
    "heads_of_rank",
    "meet",
    "parse_coordinate",
    "parse_digest",
    "parse_key",
    "plan_reads",
    "plan_writes",
    "recommend_grid",
    "uncovered",
]
