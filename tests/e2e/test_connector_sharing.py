"""What one deployment backs up, differently cut ones restore: bit for bit, at other places, and sent only once."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from l3client.connector import Connector, StagingOptions
from l3client.transport import L3Client
from l3store.layout import Coordinate, Key, Namespace, Range, Shard, SplitGroupError, Topology
from tests.client_support import Truth, Worker, back_up, deployment, make_pool, restore
from tests.support import Client, Service, counters, tiny

MODELS = {
    "gqa bf16": tiny("share/gqa", layers=10, heads=8, head_group=2, partition=5),
    "gqa fp8": tiny("share/fp8", layers=10, heads=8, head_group=2, partition=5, dtype="float8_e4m3fn", itemsize=1),
    "v narrower": tiny("share/v", layers=10, heads=8, head_group=2, partition=5, v_head_dim=4),
    "mla bf16": tiny("share/mla", layers=10, heads=0, partition=5),
    "no layer grid": tiny("share/lp0", layers=10, heads=8, head_group=2, partition=0),
    "mla, no layer grid": tiny("share/mla-lp0", layers=10, heads=0, partition=0),
    "a grid that stages do not meet": tiny("share/ragged", layers=10, heads=8, head_group=1, partition=4),
}
LAYERS = 10
TOPOLOGIES = {
    "TP4/PP2": Topology.even(tp=4, pp=2, num_layers=LAYERS),
    "TP1": Topology.even(tp=1, pp=1, num_layers=LAYERS),
    "TP2/PP1": Topology.even(tp=2, pp=1, num_layers=LAYERS),
    "TP8, inside a group": Topology.even(tp=8, pp=1, num_layers=LAYERS),
    "TP16, heads replicated": Topology.even(tp=16, pp=1, num_layers=LAYERS),
    "uneven PP3": Topology(1, (Range(0, 3), Range(3, 7), Range(7, 10))),
    "uneven TP2/PP4": Topology(2, (Range(0, 1), Range(1, 2), Range(2, 9), Range(9, 10))),
}
PAGES = 7


@pytest.fixture
def l3(service: Service) -> Iterator[L3Client]:
    with L3Client(service.url) as client:
        yield client


def scattered(count: int, num_pages: int, seed: str) -> list[int]:
    return random.Random(seed).sample(range(num_pages), count)


# Every model by the cuts that differ most, and every cut of one model.
CASES = [(model, reader) for model in MODELS for reader in ("TP8, inside a group", "uneven PP3")]
CASES += [
    (model, reader) for model in ("gqa bf16", "mla bf16") for reader in TOPOLOGIES if (model, reader) not in CASES
]


@pytest.mark.parametrize(("model", "reader"), CASES)
def test_every_cut_restores_what_tp4_pp2_wrote(l3: L3Client, model: str, reader: str) -> None:
    namespace = MODELS[model]
    truth = Truth(namespace, "share", PAGES)
    with deployment(l3, namespace, TOPOLOGIES["TP4/PP2"], num_pages=16) as workers:
        assert back_up(workers, truth, scattered(PAGES, 16, "write")) == PAGES
    ids = scattered(PAGES, 16, reader)
    with deployment(l3, namespace, TOPOLOGIES[reader], num_pages=16) as workers:
        assert {w.connector.match(truth.hashes) for w in workers} == {PAGES}
        assert restore(workers, truth, ids) == PAGES
        assert all(worker.holds(truth, ids) for worker in workers)
        assert all(worker.untouched(sorted(set(range(16)) - set(ids))) for worker in workers)
        assert not any(worker.connector.failures for worker in workers)


@pytest.mark.parametrize("writer", ["TP1", "uneven TP2/PP4"])
@pytest.mark.parametrize("model", ["gqa bf16", "mla bf16", "no layer grid", "a grid that stages do not meet"])
def test_tp4_pp2_restores_what_every_cut_wrote(l3: L3Client, model: str, writer: str) -> None:
    namespace = MODELS[model]
    truth = Truth(namespace, f"by {writer}", PAGES)
    with deployment(l3, namespace, TOPOLOGIES[writer], num_pages=PAGES) as workers:
        assert back_up(workers, truth, range(PAGES)) == PAGES
    with deployment(l3, namespace, TOPOLOGIES["TP4/PP2"], num_pages=PAGES) as workers:
        assert restore(workers, truth, range(PAGES)) == PAGES
        assert all(worker.holds(truth, range(PAGES)) for worker in workers)


@pytest.mark.parametrize("model", ["gqa bf16", "no layer grid", "mla bf16"])
def test_pages_written_in_part_by_two_deployments_are_put_together(l3: L3Client, model: str) -> None:
    """Of each page one stage comes from a deployment, the rest from another that was cut elsewhere."""
    namespace = MODELS[model]
    truth = Truth(namespace, "two writers", PAGES)
    with deployment(l3, namespace, TOPOLOGIES["uneven PP3"], num_pages=PAGES) as workers:
        assert back_up(workers[1:2], truth, range(PAGES)) == PAGES
        assert workers[1].connector.match(truth.hashes) == PAGES
        assert workers[0].connector.match(truth.hashes) == 0
    with deployment(l3, namespace, TOPOLOGIES["TP2/PP1"], num_pages=PAGES) as workers:
        assert {w.connector.match(truth.hashes) for w in workers} == {0}
        assert back_up(workers, truth, range(PAGES)) == PAGES
    with deployment(l3, namespace, TOPOLOGIES["TP4/PP2"], num_pages=PAGES) as workers:
        assert restore(workers, truth, range(PAGES)) == PAGES
        assert all(worker.holds(truth, range(PAGES)) for worker in workers)


def stored(client: Client, namespace: Namespace) -> tuple[int, int]:
    """Objects and bytes that the service has of a namespace."""
    info = client.http.get(f"/v1/namespaces/{namespace.digest}").json()
    return info["objects"], info["bytes"]


def received(client: Client) -> float:
    return counters(client)["l3store_received_bytes_total"]


def test_a_backup_sends_what_is_missing_and_the_next_one_nothing(l3: L3Client, client: Client) -> None:
    namespace = tiny("share/missing", layers=10, heads=8, head_group=2, partition=5)
    truth = Truth(namespace, "missing", 8)
    page = namespace.shape().page_bytes
    with deployment(l3, namespace, TOPOLOGIES["TP2/PP1"], num_pages=8) as workers:
        before = received(client)
        assert back_up(workers, truth, range(5)) == 5
        assert stored(client, namespace) == (5 * 8, 5 * page)
        assert received(client) - before == 5 * page

        before = received(client)
        transfers = [w.connector.backup(truth.hashes[:5], range(5)) for w in workers]
        assert [transfer.wait(30) for transfer in transfers] == [5, 5]
        assert [transfer.bytes for transfer in transfers] == [0, 0]
        assert received(client) == before

        # Of one page one object went away, three pages are new: that, and no more, is sent.
        l3.control.delete(Key(truth.hashes[2], namespace.digest, Coordinate(0, 5, 1)))
        assert back_up(workers, truth, range(8)) == 8
        assert stored(client, namespace) == (8 * 8, 8 * page)
        assert received(client) - before == 3 * page + page // 8


def test_of_replicas_only_one_writes(l3: L3Client, client: Client) -> None:
    """TP16 over 8 heads: two ranks hold the same head and derive the same keys."""
    namespace = tiny("share/replicas", layers=4, heads=8, head_group=1, partition=4)
    truth = Truth(namespace, "replicas", 3)
    topology = Topology.even(tp=16, pp=1, num_layers=4)
    before = received(client)
    with deployment(l3, namespace, topology, num_pages=3) as workers:
        for even, odd in zip(workers[::2], workers[1::2], strict=True):
            assert even.connector.plan.objects == odd.connector.plan.objects
        for worker in workers:
            worker.fill(truth, range(3))
        replicas = [w.connector.backup(truth.hashes, range(3)) for w in workers[1::2]]
        assert [(t.done, t.wait(), t.bytes) for t in replicas] == [(True, 3, 0)] * 8
        assert stored(client, namespace) == (0, 0)
        assert back_up(workers[::2], truth, range(3)) == 3
        assert stored(client, namespace) == (3 * 8, 3 * namespace.shape().page_bytes)
        assert received(client) - before == 3 * namespace.shape().page_bytes
        assert {w.connector.match(truth.hashes) for w in workers} == {3}


def test_of_mla_ranks_only_one_of_each_stage_writes(l3: L3Client, client: Client) -> None:
    namespace = tiny("share/mla-once", layers=4, heads=0, partition=2)
    truth = Truth(namespace, "mla once", 3)
    before = received(client)
    with deployment(l3, namespace, Topology.even(tp=4, pp=2, num_layers=4), num_pages=3) as workers:
        assert back_up(workers, truth, range(3)) == 3
    assert stored(client, namespace) == (3 * 2, 3 * namespace.shape().page_bytes)
    assert received(client) - before == 3 * namespace.shape().page_bytes


def test_a_writer_that_splits_a_group_is_refused_with_the_grid_that_fits(l3: L3Client) -> None:
    namespace = tiny("share/split", layers=4, heads=8, head_group=4, partition=4)
    shard = Shard(layers=Range(0, 4), heads=Range(2, 4))
    with pytest.raises(SplitGroupError, match="head_group 2 would fit") as refused:
        Worker(l3, namespace, shard, num_pages=2)
    assert refused.value.fits == 2


def test_a_reader_that_splits_a_group_reads_and_writes_nothing(l3: L3Client, client: Client) -> None:
    namespace = tiny("share/split-read", layers=4, heads=8, head_group=4, partition=4)
    truth = Truth(namespace, "split", 2)
    with Worker(l3, namespace, Shard(layers=Range(1, 3), heads=Range(3, 5)), num_pages=2, read_only=True) as reader:
        reader.connector.attach()
        reader.fill(truth, [0, 1])
        transfer = reader.connector.backup(truth.hashes, [0, 1])
        assert (transfer.done, transfer.wait()) == (True, 0)  # nothing of it is stored, by us or by anybody
        assert stored(client, namespace) == (0, 0)
        with Worker(l3, namespace, Shard(layers=Range(0, 4), heads=Range(0, 8)), num_pages=2) as writer:
            assert back_up([writer], truth, [1, 0]) == 2
        assert restore([reader], truth, [1, 0]) == 2
        assert reader.holds(truth, [1, 0])


@pytest.mark.parametrize("pages", [1, 300])
def test_one_page_and_three_hundred(l3: L3Client, pages: int) -> None:
    namespace = tiny(f"share/count-{pages}", layers=10, heads=8, head_group=2, partition=5)
    truth = Truth(namespace, "count", pages)
    ids = scattered(pages, 310, "count")
    with deployment(l3, namespace, TOPOLOGIES["TP2/PP1"], num_pages=310) as workers:
        assert back_up(workers, truth, ids) == pages
    with deployment(l3, namespace, TOPOLOGIES["uneven PP3"], num_pages=310) as workers:
        assert restore(workers, truth, ids) == pages
        assert all(worker.holds(truth, ids) for worker in workers)


@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize("model", ["gqa bf16", "mla bf16"])
def test_staging_of_one_page_moves_any_number(l3: L3Client, model: str, buffers: int) -> None:
    namespace = MODELS[model]
    truth = Truth(namespace, f"staging {buffers}", 40)
    staging = StagingOptions(buffer_bytes=1, buffers=buffers, timeout=5)
    ids = scattered(40, 50, "staging")
    with deployment(l3, namespace, TOPOLOGIES["TP4/PP2"], num_pages=50, staging=staging) as workers:
        assert back_up(workers, truth, ids) == 40
    with deployment(l3, namespace, TOPOLOGIES["TP2/PP1"], num_pages=50, staging=staging) as workers:
        assert restore(workers, truth, ids) == 40
        assert all(worker.holds(truth, ids) for worker in workers)
        assert not any(worker.connector.failures for worker in workers)


def test_nothing_asked_is_nothing_done(l3: L3Client) -> None:
    namespace = MODELS["gqa bf16"]
    with deployment(l3, namespace, TOPOLOGIES["TP1"], num_pages=2) as [worker]:
        assert worker.connector.match([]) == 0
        for transfer in (worker.connector.backup([], []), worker.connector.restore([], [])):
            assert (transfer.done, transfer.wait(), transfer.error, transfer.bytes) == (True, 0, None, 0)


@pytest.mark.parametrize("ids", [[0, 2], [-1, 0], [0], [0, 1, 1], [[0, 1]]])
def test_page_ids_that_cannot_be_are_refused_before_anything_moves(l3: L3Client, ids: list[int]) -> None:
    namespace = MODELS["gqa bf16"]
    truth = Truth(namespace, "ids", 2)
    with deployment(l3, namespace, TOPOLOGIES["TP1"], num_pages=2) as [worker]:
        for call in (worker.connector.backup, worker.connector.restore):
            with pytest.raises(ValueError, match="page ids"):
                call(truth.hashes, ids)
        assert worker.connector.match(truth.hashes) == 0
        assert worker.untouched([0, 1])


def test_lists_that_change_after_the_call_change_nothing(l3: L3Client) -> None:
    namespace = tiny("share/lists", layers=10, heads=8, head_group=2, partition=5)
    truth = Truth(namespace, "lists", 4)
    with deployment(l3, namespace, TOPOLOGIES["TP1"], num_pages=4) as [worker]:
        worker.fill(truth, [3, 2, 1, 0])
        hashes, ids = list(truth.hashes), torch.tensor([3, 2, 1, 0])
        transfer = worker.connector.backup(hashes, ids)  # type: ignore[arg-type]  # what has ids as a tensor gives it
        hashes.reverse()
        ids.zero_()
        assert transfer.wait(30) == 4
    with deployment(l3, namespace, TOPOLOGIES["TP1"], num_pages=4) as [worker]:
        assert restore([worker], truth, [0, 1, 2, 3]) == 4
        assert worker.holds(truth, [0, 1, 2, 3])


def test_a_pool_that_is_not_this_shard_is_refused(l3: L3Client) -> None:
    namespace = MODELS["gqa bf16"]
    shard = Shard(layers=Range(0, 5), heads=Range(0, 4))
    for other in (Shard(layers=Range(0, 4), heads=Range(0, 4)), Shard(layers=Range(0, 5), heads=Range(0, 2))):
        with pytest.raises(ValueError, match="the pool has"):
            Connector(l3, namespace, shard, make_pool(namespace, other, 2))
    for other_model, reason in (("v narrower", "row_bytes"), ("gqa fp8", "float8_e4m3fn and .* dtype bfloat16")):
        with pytest.raises(ValueError, match=reason):
            Connector(l3, namespace, shard, make_pool(MODELS[other_model], shard, 2))


def test_attach_tells_what_comes_close(l3: L3Client) -> None:
    namespace = tiny("share/near", layers=10, heads=8, head_group=2, partition=5)
    truth = Truth(namespace, "near", 1)
    with deployment(l3, namespace, TOPOLOGIES["TP1"], num_pages=1) as workers:
        back_up(workers, truth, [0])
    other = tiny("share/near", layers=10, heads=8, head_group=2, partition=5, page_size=8)
    with Worker(l3, other, Shard(layers=Range(0, 10), heads=Range(0, 8)), num_pages=1) as worker:
        near = worker.connector.attach({"engine": "test"})
        assert namespace.digest in [n["digest"] for n in near]
        assert worker.connector.attach() == worker.connector.attach()
