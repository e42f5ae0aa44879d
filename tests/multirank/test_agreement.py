"""Real processes that agree: eight ranks write, eight of other deployments read, and all use the same prefix.

Each rank is a process of its own with its own pool, connector and connections; they talk to each other over
torch.distributed (gloo), as an engine's ranks do, and to the service over HTTP.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import Service, free_port

ROOT = Path(__file__).parents[2]
WORLD = 8


def run_ranks(url: str) -> list[dict[str, Any]]:
    """Run the rank processes to their end; what each of them reports."""
    port = free_port()
    command = [sys.executable, str(Path(__file__).with_name("rank_process.py"))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [*command, json.dumps({"rank": rank, "port": port, "url": url})],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(WORLD)
    ]
    reports = []
    try:
        for process in processes:
            out, error = process.communicate(timeout=90)
            assert process.returncode == 0, error[-3000:]
            reports.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return reports


@pytest.mark.timeout(110)
def test_all_ranks_end_with_the_same_hit(service: Service) -> None:
    """One rank comes late; then an object of one rank is deleted between the match of all and its own restore."""
    reports = run_ranks(service.url)
    assert [report["stored"] for report in reports] == [10] * WORLD
    assert [report["TP8"] for report in reports] == [{"matched": 10, "restored": 10, "hit": 10, "equal": 1}] * WORLD
    assert [report["TP2/PP4"] for report in reports] == [
        {"matched": 10, "restored": 6 if rank == 2 else 10, "hit": 6, "equal": 1} for rank in range(WORLD)
    ]
