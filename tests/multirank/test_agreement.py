"""Real processes that agree: eight ranks write, eight of other deployments read, and all use the same prefix.

Each rank is a process of its own with its own pool, connector and connections; they talk to each other over
torch.distributed (gloo), as an engine's ranks do, and to the service over HTTP.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.multirank import rank_process
from tests.multirank.rank_process import WORLD, Report
from tests.support import Service, free_port


def run_ranks(url: str) -> list[Report]:
    """Run the rank processes to their end; what each of them reports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([rank_process.__name__])  # torch is imported once, not by every rank
    port = free_port()
    # As many tasks as processes, and each waits for all others: every rank gets a process of its own.
    with ProcessPoolExecutor(WORLD, mp_context=context) as ranks:
        running = [ranks.submit(rank_process.run, rank, port, url) for rank in range(WORLD)]
        return [rank.result(90) for rank in running]


@pytest.mark.timeout(110)
def test_all_ranks_end_with_the_same_hit(service: Service) -> None:
    """One rank comes late; then an object of one rank is deleted between the match of all and its own restore."""
    reports = run_ranks(service.url)
    assert len({report.process for report in reports}) == WORLD
    assert [report.stored for report in reports] == [10] * WORLD
    assert [report.late for report in reports] == [{"matched": 10, "restored": 10, "hit": 10, "equal": 1}] * WORLD
    assert [report.lost for report in reports] == [
        {"matched": 10, "restored": 6 if rank == 2 else 10, "hit": 6, "equal": 1} for rank in range(WORLD)
    ]
