"""One rank of a deployment, as a process. Its options are one JSON argument; its report is the last line it prints."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2])]

import torch
import torch.distributed as dist

from l3client.transport import L3Client
from l3store.layout import Key, Topology
from tests.client_support import Truth, Worker
from tests.support import tiny

PAGES = 10


def agreed(value: int) -> int:
    """The smallest of all ranks."""
    smallest = torch.tensor([value])
    dist.all_reduce(smallest, dist.ReduceOp.MIN)
    return int(smallest)


@contextlib.contextmanager
def group(options: dict[str, Any]) -> Iterator[None]:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{options['port']}",
        rank=options["rank"],
        world_size=options["world"],
        timeout=timedelta(seconds=30),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def main(options: dict[str, Any]) -> dict[str, int]:
    torch.set_num_threads(1)
    rank = options["rank"]
    namespace = tiny("multirank", layers=12, heads=8, head_group=2, partition=6)
    topology = Topology.even(tp=options["tp"], pp=options["pp"], num_layers=12)
    shard = topology.shard(namespace, stage=rank // options["tp"], tp_rank=rank % options["tp"])
    truth = Truth(namespace, "multirank", PAGES)
    with (
        group(options),
        L3Client(options["url"]) as client,
        Worker(client, namespace, shard, num_pages=PAGES) as worker,
    ):
        worker.connector.attach()
        if options["role"] == "write":
            worker.fill(truth, range(PAGES))
            return {"stored": worker.connector.backup(truth.hashes, range(PAGES)).wait(30)}
        if rank == options.get("delayed"):
            time.sleep(0.5)
        matched = agreed(worker.connector.match(truth.hashes))
        if rank == options.get("losing"):
            coordinate = worker.connector.plan.objects[0].coordinate
            client.control.delete(Key(truth.hashes[options["lost_page"]], namespace.digest, coordinate))
        ids = [(7 * i + rank) % PAGES for i in range(matched)]
        restored = worker.connector.restore(truth.hashes[:matched], ids).wait(30)
        hit = agreed(restored)
        equal = int(worker.holds(truth, ids[:hit]))
        return {"matched": matched, "restored": restored, "agreed": hit, "equal": equal}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
