"""The connector over pools on a GPU: Triton kernels, pinned staging, streams and events of the device."""

from __future__ import annotations

from typing import Protocol

import pytest
import torch

from l3client.connector import Connector, StagingOptions
from l3client.pools import MHAPool
from l3client.streams import CUDAStream
from l3client.transport import L3Client
from l3store.layout import Fields, Geometry, Namespace, Topology, hash_pages

PAGES = 24
PAGE_SIZE = 16
LAYERS = 6

# Meant: there is no CUDA without a GPU; scripts/gpu-check runs this where there is one.
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


class Service(Protocol):
    url: str


def pool(heads: int, layers: int, device: str) -> MHAPool:
    shape = (PAGES * PAGE_SIZE, heads, 64)
    tensors = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(2 * layers)]
    return MHAPool(tensors[:layers], tensors[layers:], page_size=PAGE_SIZE)


def test_gpu_pools_share_with_another_cut_and_with_the_cpu(service: Service) -> None:
    fields = Fields(
        model_id="cuda", dtype="bfloat16", page_size=PAGE_SIZE, rank_replicated=False,
        total_kv_heads=8, layer_partition=3, head_group=2,
    )  # fmt: skip
    namespace = Namespace(fields=fields, geometry=Geometry(num_layers=LAYERS, head_dim=64, itemsize=2))
    hashes = hash_pages(list(range(PAGES * PAGE_SIZE)), PAGE_SIZE)
    truth = torch.randint(0, 256, (LAYERS, 2, PAGES * PAGE_SIZE, 8, 128), dtype=torch.uint8)
    ids = torch.randperm(PAGES).tolist()
    slots = (torch.tensor(ids)[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()

    with L3Client(service.url) as client:
        for device, topology, writes in (
            ("cuda", Topology.even(tp=4, pp=2, num_layers=LAYERS), True),
            ("cuda", Topology.even(tp=8, pp=1, num_layers=LAYERS), False),
            ("cpu", Topology.even(tp=2, pp=3, num_layers=LAYERS), False),
        ):
            for stage, layers in enumerate(topology.stages):
                for rank in range(topology.tp):
                    shard = topology.shard(namespace, stage=stage, tp_rank=rank)
                    assert shard.heads is not None
                    held = pool(len(shard.heads), len(layers), device)
                    part = truth[layers.start : layers.end, :, :, shard.heads.start : shard.heads.end]
                    staging = StagingOptions(buffer_bytes=1 << 18, buffers=2)
                    with Connector(client, namespace, shard, held, read_only=not writes, staging=staging) as connector:
                        connector.attach()
                        if writes:
                            for layer in range(len(layers)):
                                for component, tensor in enumerate(held.layer(layer)):
                                    tensor[slots.to(device)] = part[layer, component].to(device)
                            assert connector.backup(hashes, ids).wait(60) == PAGES
                            continue
                        assert connector.match(hashes) == PAGES
                        restore = connector.restore(hashes, ids)
                        assert restore.wait_layer(layers.start, 60) == PAGES
                        assert restore.wait(60) == PAGES
                        for layer in range(len(layers)):
                            for component, tensor in enumerate(held.layer(layer)):
                                assert torch.equal(tensor.cpu()[slots], part[layer, component])


def test_copies_are_ordered_with_the_engines_stream(service: Service) -> None:
    """A long kernel is still running on the caller's stream when it backs up, restores and computes with the result."""
    fields = Fields(
        model_id="cuda/ordered", dtype="bfloat16", page_size=PAGE_SIZE, rank_replicated=False,
        total_kv_heads=2, layer_partition=LAYERS, head_group=2,
    )  # fmt: skip
    namespace = Namespace(fields=fields, geometry=Geometry(num_layers=LAYERS, head_dim=64, itemsize=2))
    shard = Topology.even(tp=1, pp=1, num_layers=LAYERS).shard(namespace, stage=0, tp_rank=0)
    hashes = hash_pages(list(range(PAGES * PAGE_SIZE)), PAGE_SIZE)
    ids = list(range(PAGES))
    held = pool(2, LAYERS, "cuda")
    engine = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    long = 500_000_000  # cycles: a quarter of a second

    def fill(value: int) -> None:
        for layer in range(LAYERS):
            for tensor in held.layer(layer):
                tensor.fill_(value)

    def holds(value: int) -> bool:
        return all(bool((tensor == value).all()) for layer in range(LAYERS) for tensor in held.layer(layer))

    staging = StagingOptions(buffer_bytes=1 << 18, buffers=2)
    with (
        L3Client(service.url) as client,
        Connector(client, namespace, shard, held, staging=staging) as connector,
        torch.cuda.stream(engine),
    ):
        connector.attach()
        # Without the order the pages would be packed before they are computed ...
        torch.cuda._sleep(long)  # type: ignore[no-untyped-call]
        fill(7)
        assert connector.backup(hashes, ids).wait(60) == PAGES
        # ... and what still writes to a page of the pool would write over what was restored,
        torch.cuda._sleep(long)  # type: ignore[no-untyped-call]
        fill(9)
        assert connector.restore(hashes, ids).wait(60) == PAGES
        engine.synchronize()
        assert holds(7)
        # with an event of another stream as with the caller's own.
        other = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(other):
            torch.cuda._sleep(long)  # type: ignore[no-untyped-call]
            fill(9)
            written = torch.cuda.Event()  # type: ignore[no-untyped-call]
            written.record(other)
        restore = connector.restore(hashes, ids, after=written)
        # The engine's kernels wait for a layer on the device.
        sums = []
        for layer in range(LAYERS):
            assert restore.wait_layer_on(CUDAStream(engine), layer, 60) == PAGES
            sums.append(held.layer(layer)[0].sum(dtype=torch.int64))
        assert restore.wait(60) == PAGES
        engine.synchronize()
        assert [int(total) for total in sums] == [7 * held.layer(0)[0].numel()] * LAYERS
