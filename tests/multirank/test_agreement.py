"""Real processes that agree: eight ranks write, ranks of other deployments read, and all use the same prefix.

Each rank is a process of its own with its own pool, connector and connections; they talk to each other over
torch.distributed (gloo), as an engine's ranks do, and to the service over HTTP.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import Service, free_port

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("rank_process.py")


def run_ranks(world: int, *, seconds: float, **options: object) -> list[dict[str, int]]:
    """Run ``world`` rank processes to their end; what each of them reports."""
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), json.dumps({"rank": rank, "world": world, "port": port, **options})],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(world)
    ]
    reports = []
    try:
        for process in processes:
            out, error = process.communicate(timeout=seconds)
            assert process.returncode == 0, error[-3000:]
            reports.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.communicate()
    return reports


@pytest.mark.timeout(100)
def test_all_ranks_end_with_the_same_hit(start_service: Callable[..., Service], tmp_path: Path) -> None:
    """One rank comes late; then an object of one rank is deleted between the match and its restore."""
    service = start_service(tmp_path / "data")
    shared = {"url": service.url, "seconds": 60}
    written = run_ranks(8, tp=4, pp=2, role="write", **shared)
    assert [report["stored"] for report in written] == [10] * 8

    whole = run_ranks(2, tp=2, pp=1, role="read", delayed=1, **shared)
    assert whole == [{"matched": 10, "restored": 10, "agreed": 10, "equal": 1}] * 2

    # Rank 2 of 4 finds that page 6 went away after everybody had agreed on 10.
    smaller = run_ranks(4, tp=2, pp=2, role="read", delayed=0, losing=2, lost_page=6, **shared)
    assert [report["matched"] for report in smaller] == [10] * 4
    assert [report["restored"] for report in smaller] == [10, 10, 6, 10]
    assert [report["agreed"] for report in smaller] == [6] * 4
    assert [report["equal"] for report in smaller] == [1] * 4
