"""Installing the client changes no package of an engine's environment, and the oldest packages we claim are enough.

The environment holds every package that we share with engines at the lowest version that pyproject.toml allows: the
furthest that an installer could be tempted to move one.
"""

from __future__ import annotations

import re
import socket
import subprocess
import tomllib
import venv
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HEAVY = ("torch", "triton", "numpy", "nvidia", "cuda", "sglang")

pytestmark = [pytest.mark.install, pytest.mark.timeout(400)]


def run(*command: str | Path) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def installed(python: Path) -> set[str]:
    return set(run(python, "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check").split())


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with our dependencies at their lowest."""
    folder = tmp_path_factory.mktemp("engine")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    lowest = [requirement.replace(">=", "==") for requirement in PROJECT["dependencies"]]
    assert all("==" in pinned for pinned in lowest), "a dependency without a lower bound"
    run(python, "-m", "pip", "install", "--quiet", *lowest)
    return python


def test_the_client_extra_moves_nothing_and_brings_no_torch(engine: Path) -> None:
    assert PROJECT["optional-dependencies"]["client"] == []
    before = installed(engine)
    run(engine, "-m", "pip", "install", "--quiet", f"{ROOT}[client]")
    after = installed(engine)
    assert before <= after, f"changed: {before - after}"
    assert {line.split("==")[0].split("@")[0].strip() for line in after - before} == {"l3store"}
    assert not [line for line in after if line.startswith(HEAVY)]

    # The lowest versions also work: both packages import, and the service answers.
    run(engine, "-c", "import l3client.transport, l3store.cli")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command: list[str | Path] = [
        engine,
        "-m",
        "l3store",
        "serve",
        "--port",
        str(port),
        "--data-dir",
        str(engine.parent.parent / "data"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert f":{port}," in process.stdout.readline()
            assert httpx.get(f"http://127.0.0.1:{port}/readyz").json() == {"status": "ok"}
            body = {"namespace": "ukv1-" + "0" * 16, "page_hashes": ["0" * 64]}
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/pages/match", json=body)
            assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")
        finally:
            process.terminate()


def test_only_the_demo_and_development_bring_torch() -> None:
    extras = PROJECT["optional-dependencies"]
    with_torch = {name for name, needs in extras.items() if any(re.match("torch|triton", need) for need in needs)}
    assert with_torch == {"demo", "dev"}
    assert not any(need.startswith(HEAVY) for need in PROJECT["dependencies"])
