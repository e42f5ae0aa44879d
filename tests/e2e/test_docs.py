"""The documentation's commands, run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Protocol

import pytest

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
