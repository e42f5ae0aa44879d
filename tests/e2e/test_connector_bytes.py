"""What a TP4/PP2 deployment stores is, byte for byte and name for name, what SGLang's unified layout says.

The keys come from vectors that SGLang itself computed. The bytes come from a transposition of the pools in numpy that
shares nothing with our layout, and are fetched with a plain HTTP client.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from l3client.connector import Connector, StagingOptions
from l3client.pools import MHAPool, MLAPool
from l3client.transport import L3Client
from l3store.layout import Fields, Geometry, Namespace, Range, Topology
from tests.client_support import Truth as KV
from tests.client_support import back_up, deployment, restore
from tests.support import Service, page_hashes

VECTORS = json.loads((Path(__file__).parents[2] / "schemas" / "sglang_vectors.json").read_text())["plans"]
LAYERS, HEADS, PAGE_SIZE, HEAD_DIM, GROUP = 60, 8, 64, 8, 2
PAGES = 2


def suffixes(prefix: str) -> dict[tuple[int, int], list[str]]:
    """SGLang's names of a rank's objects without the page hash, by (TP rank, first layer)."""
    plans = [plan for plan in VECTORS if plan["name"].startswith(prefix)]
    return {(p["kwargs"]["attn_tp_rank"], p["kwargs"]["start_layer"]): p["suffixes"] for p in plans}


def namespace(*, head_dim: int) -> Namespace:
    [plan] = [p for p in VECTORS if p["name"] == "mha60x8_TP4PP2_tp0_pp0"]
    fields: dict[str, Any] = plan["namespace"]
    made = Namespace(fields=Fields(**fields), geometry=Geometry(num_layers=LAYERS, head_dim=head_dim, itemsize=2))
    assert made.digest == plan["digest"] == "ukv1-0242df3ccc914fa4"
    return made


def test_tp4_pp2_objects_are_what_the_layout_says(start_service: Callable[..., Service], tmp_path: Path) -> None:
    service = start_service(tmp_path / "data")
    shared = namespace(head_dim=HEAD_DIM)
    hashes = page_hashes("bytes", PAGES)
    ids = [3, 1]
    # One array per component, as a model on one GPU without paging would have it: [layer, token, head, dim].
    random = np.random.default_rng(1)
    k, v = random.integers(0, 1 << 16, (2, LAYERS, PAGES * PAGE_SIZE, HEADS, HEAD_DIM), dtype=np.uint16)

    names: dict[tuple[int, int], list[str]] = {}
    with L3Client(service.url) as client:
        for stage in range(2):
            for rank in range(4):
                shard = Topology.even(tp=4, pp=2, num_layers=LAYERS).shard(shared, stage=stage, tp_rank=rank)
                pools = [
                    [
                        paged(whole[layer, :, 2 * rank : 2 * rank + 2], ids)
                        for layer in range(30 * stage, 30 * stage + 30)
                    ]
                    for whole in (k, v)
                ]
                pool = MHAPool(pools[0], pools[1], page_size=PAGE_SIZE)
                with Connector(client, shared, shard, pool, staging=StagingOptions(buffer_bytes=1 << 20)) as connector:
                    connector.attach()
                    assert connector.backup(hashes, ids).wait(30) == PAGES
                    names[rank, 30 * stage] = [f"{shared.digest}_{o.coordinate}" for o in connector.plan.objects]

    assert names == suffixes("mha60x8_TP4PP2_")
    files = {path.name for path in service.files()}
    assert files == {f"{page}_{suffix}" for page in hashes for rank in names.values() for suffix in rank}
    with httpx.Client(base_url=service.url, trust_env=False) as plain:
        for page, page_hash in enumerate(hashes):
            tokens = slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
            # (K/V, layer, token, group, head in group, dim) to (group, layer, K/V, token, head in group, dim)
            both = np.stack([k, v])[:, :, tokens].reshape(2, LAYERS, PAGE_SIZE, HEADS // GROUP, GROUP, HEAD_DIM)
            unified = both.transpose(3, 1, 0, 2, 4, 5)
            for group in range(HEADS // GROUP):
                for first in (0, 30):
                    key = f"{page_hash}_{shared.digest}_L{first}-{first + 30}_H{group}"
                    answer = plain.get(f"/v1/objects/{key}")
                    assert answer.status_code == 200
                    assert answer.content == unified[group, first : first + 30].tobytes()


def paged(rows: np.ndarray[Any, np.dtype[np.uint16]], ids: list[int]) -> torch.Tensor:
    """The rows of all tokens in a pool of 5 pages, page ``i`` of them at ``ids[i]``: bfloat16 [slots, heads, dim]."""
    pool = np.zeros((5, PAGE_SIZE, *rows.shape[1:]), dtype=np.uint16)
    for page, at in enumerate(ids):
        pool[at] = rows[page * PAGE_SIZE : (page + 1) * PAGE_SIZE]
    return torch.from_numpy(pool.reshape(-1, *rows.shape[1:])).view(torch.bfloat16)


def test_mla_objects_are_what_the_layout_says(start_service: Callable[..., Service], tmp_path: Path) -> None:
    """61 layers in parts of 16: the last object is shorter."""
    service = start_service(tmp_path / "data")
    [plan] = [p for p in VECTORS if p["name"] == "mla61_TP8_lp16_ragged"]
    geometry = Geometry(num_layers=61, head_dim=12, itemsize=2)
    shared = Namespace(fields=Fields(**plan["namespace"]), geometry=geometry)
    size = shared.fields.page_size
    [page_hash] = page_hashes("mla bytes", 1)
    rows = np.random.default_rng(2).integers(0, 1 << 16, (61, 2 * size, 12), dtype=np.uint16)
    pool = MLAPool([torch.from_numpy(layer).view(torch.bfloat16) for layer in rows], page_size=size)
    shard = Topology.even(tp=8, pp=1, num_layers=61).shard(shared, stage=0, tp_rank=0)
    with L3Client(service.url) as client, Connector(client, shared, shard, pool) as connector:
        connector.attach()
        assert connector.backup([page_hash], [1]).wait(30) == 1
        assert [f"{shared.digest}_{o.coordinate}" for o in connector.plan.objects] == plan["suffixes"]
    with httpx.Client(base_url=service.url, trust_env=False) as plain:
        for suffix, (first, end) in zip(plan["suffixes"], plan["layer_ranges"], strict=True):
            answer = plain.get(f"/v1/objects/{page_hash}_{suffix}")
            assert answer.content == rows[first:end, size:].tobytes()


def test_the_articles_two_buckets_share_everything(start_service: Callable[..., Service], tmp_path: Path) -> None:
    """A long-context bucket at TP4/PP2 and a short-context one at TP2/PP1, either way."""
    service = start_service(tmp_path / "data")
    shared = namespace(head_dim=HEAD_DIM)
    long, short = (Topology.even(tp=tp, pp=pp, num_layers=LAYERS) for tp, pp in ((4, 2), (2, 1)))
    with L3Client(service.url) as client:
        for writer, reader in ((long, short), (short, long)):
            truth = KV(shared, f"by {writer}", 3)
            with deployment(client, shared, writer, num_pages=3) as workers:
                assert back_up(workers, truth, range(3)) == 3
            with deployment(client, shared, reader, num_pages=3) as workers:
                assert restore(workers, truth, [2, 0, 1]) == 3
                assert all(worker.holds(truth, [2, 0, 1]) for worker in workers)
    assert len(service.files()) == 2 * 3 * 2 * HEADS // GROUP
    assert shared.layers == Range(0, 60)
