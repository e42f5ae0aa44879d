"""The documentation's commands, run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from l3store.layout import Topology, hash_pages

ROOT = Path(__file__).parents[2]


class Service(Protocol):
    url: str


def test_the_session_with_curl(service: Service, tmp_path: Path) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / "docs" / "wire.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 6
    script = "\n".join(["set -euo pipefail", f"L3={service.url}", *blocks])
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


def test_scripts_that_are_named_exist() -> None:
    text = "".join((ROOT / page).read_text() for page in ("README.md", "CONTRIBUTING.md", ".ci/run"))
    for script in re.findall(r"scripts/([a-z-]+)", text):
        assert (ROOT / "scripts" / script).exists(), script


def python_of(page: str, service: Service) -> list[str]:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    return [block.replace("http://127.0.0.1:9460", service.url) for block in blocks]


@pytest.mark.parametrize("stage", [0, 1])
def test_the_python_of_the_documentation(service: Service, stage: int) -> None:
    """On both pipeline stages of the example: absolute layers are the easiest thing to get wrong in a snippet."""
    rank, use = python_of("docs/client.md", service)
    [readme] = python_of("README.md", service)
    token_ids = list(range(stage, stage + 4 * 64))
    k, v = ([torch.zeros(4 * 64, 2, 128, dtype=torch.bfloat16) for _ in range(30)] for _ in range(2))
    names: dict[str, Any] = {
        "k": k, "v": v, "token_ids": token_ids, "page_ids": [3, 0, 1, 2], "page_hashes": hash_pages(token_ids, 64),
    }  # fmt: skip
    exec(rank, names)
    topology: Topology = names["Topology"].even(tp=4, pp=2, num_layers=60)
    names["shard"] = topology.shard(names["namespace"], stage=stage, tp_rank=1)
    for source, hits in ((readme, (0, 0)), (readme, (4, 4))):
        exec(source, names)
        assert (names["hit"], names["pages"]) == hits
        names["connector"].close()
        names["connector"]._client.close()
    exec(use, names)
    assert names["restore"].done
    names["connector"].close()
    names["client"].close()
