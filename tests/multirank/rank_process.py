"""One rank of a world of eight, as a process: what it stored, and what it and all agreed on when they read."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from l3client.transport import L3Client
from l3store.layout import Key, Namespace, SplitGroupError, Topology
from tests.client_support import Truth, Worker
from tests.support import tiny

WORLD, PAGES, LAYERS = 8, 10, 12


def smallest(value: int) -> int:
    """What all ranks can do."""
    agreed = torch.tensor([value])
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    return int(agreed)


@contextlib.contextmanager
def world(rank: int, port: int) -> Iterator[None]:
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    try:
        yield
    finally:
        dist.destroy_process_group()


class Rank:
    """This process as one rank of deployments, one after another."""

    def __init__(self, client: L3Client, namespace: Namespace, rank: int) -> None:
        self.client = client
        self.namespace = namespace
        self.rank = rank
        self.truth = Truth(namespace, "multirank", PAGES)

    def worker(self, *, tp: int, pp: int) -> Worker:
        topology = Topology.even(tp=tp, pp=pp, num_layers=LAYERS)
        shard = topology.shard(self.namespace, stage=self.rank // tp, tp_rank=self.rank % tp)
        try:
            return Worker(self.client, self.namespace, shard, num_pages=PAGES)
        except SplitGroupError:
            return Worker(self.client, self.namespace, shard, num_pages=PAGES, read_only=True)

    def write(self) -> int:
        """As TP4/PP2."""
        with self.worker(tp=4, pp=2) as worker:
            worker.connector.attach()
            worker.fill(self.truth, range(PAGES))
            stored = worker.connector.backup(self.truth.hashes, range(PAGES)).wait(60)
        dist.barrier()
        return stored

    def read(
        self, *, tp: int, pp: int, delayed: int | None = None, loses: tuple[int, int] | None = None
    ) -> dict[str, int]:
        """Match, agree, restore, agree. Rank ``delayed`` comes late; rank ``loses[0]`` finds page ``loses[1]`` gone."""
        with self.worker(tp=tp, pp=pp) as worker:
            if self.rank == delayed:
                time.sleep(0.5)
            matched = smallest(worker.connector.match(self.truth.hashes))
            ids = [(7 * page + self.rank) % PAGES for page in range(matched)]
            if loses is not None and self.rank == loses[0]:
                dist.barrier()  # all others have restored
                coordinate = worker.connector.plan.objects[0].coordinate
                self.client.control.delete(Key(self.truth.hashes[loses[1]], self.namespace.digest, coordinate))
            restored = worker.connector.restore(self.truth.hashes[:matched], ids).wait(60)
            if loses is not None and self.rank != loses[0]:
                dist.barrier()
            hit = smallest(restored)
            equal = worker.holds(self.truth, ids[:hit])
        return {"matched": matched, "restored": restored, "hit": hit, "equal": int(equal)}


@dataclass(frozen=True)
class Report:
    """The process it was, pages stored, and what it read with one rank late and with one rank's page lost."""

    process: int
    stored: int
    late: dict[str, int]
    lost: dict[str, int]


def run(rank: int, port: int, url: str) -> Report:
    """Be one rank of the world, from its beginning to its end."""
    torch.set_num_threads(1)
    namespace = tiny("multirank", layers=LAYERS, heads=8, head_group=2, partition=6)
    with world(rank, port), L3Client(url) as client:
        this = Rank(client, namespace, rank)
        return Report(
            os.getpid(), this.write(), this.read(tp=8, pp=1, delayed=5), this.read(tp=2, pp=4, delayed=0, loses=(2, 6))
        )
