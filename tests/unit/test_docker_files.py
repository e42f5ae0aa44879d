"""docker/: what the files say agrees with what the service is. `scripts/docker-smoke` runs them on an engine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from l3store.config import DEFAULT_PORT, ENV_PREFIX, Settings, load_settings
from l3store.layout import Fields, Geometry, Namespace
from l3store.service import server

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text().replace("\\\n", "")
COMPOSE = (ROOT / "docker/compose.yaml").read_text()
SMOKE = (ROOT / "scripts/docker-smoke").read_text()
DOCS = (ROOT / "docs/docker.md").read_text()

IMAGE_ENV = dict(re.findall(rf"({ENV_PREFIX}\w+)=(\S+)", DOCKERFILE))
COMPOSE_ENV = {
    n: default for n, _, default in re.findall(rf"^ +({ENV_PREFIX}\w+): \$\{{(\w+):-(.*)\}}$", COMPOSE, re.M)
}


def instruction(name: str) -> str:
    found: list[str] = re.findall(rf"^{name} (.*)$", DOCKERFILE, re.M)
    assert len(found) == 1, f"{name}: {found}"
    return found[0]


def test_the_image_and_compose_set_only_what_is_a_setting() -> None:
    settings = {ENV_PREFIX + name.upper() for name in Settings.model_fields}
    for text in (DOCKERFILE, COMPOSE, SMOKE, DOCS):
        assert set(re.findall(rf"{ENV_PREFIX}\w+", text)) <= settings | {f"{ENV_PREFIX}CONFIG"}


def test_their_defaults_are_values_the_service_takes() -> None:
    assert len(COMPOSE_ENV) == COMPOSE.count(f"      {ENV_PREFIX}") > 0
    settings = load_settings({}, IMAGE_ENV | COMPOSE_ENV, None)
    assert (settings.host, settings.port) == ("0.0.0.0", DEFAULT_PORT)
    assert str(settings.data_dir) == instruction("VOLUME")
    assert settings.capacity


def test_a_compose_variable_is_named_as_its_setting() -> None:
    assert re.findall(rf"({ENV_PREFIX}\w+): \$\{{(?!\1:-)", COMPOSE) == []


def test_the_default_port_is_published_on_loopback() -> None:
    assert instruction("EXPOSE") == str(DEFAULT_PORT)
    assert re.findall(r'^ +- "(.*:\d+)"$', COMPOSE, re.M) == [
        f"${{L3_PUBLISH:-127.0.0.1:{DEFAULT_PORT}}}:{DEFAULT_PORT}"
    ]


def test_the_volume_is_where_the_data_is() -> None:
    assert f"- data:{IMAGE_ENV['L3STORE_DATA_DIR']}\n" in COMPOSE
    assert "\nvolumes:\n  data:" in COMPOSE


def test_the_container_runs_as_one_fixed_user_that_owns_the_data() -> None:
    uid, gid = instruction("USER").split(":")
    assert int(uid) > 0
    assert f"--uid {uid} --gid {gid}" in DOCKERFILE
    assert f"install -d -o {uid} -g {gid} " in DOCKERFILE
    assert f"chown {uid}:{gid}" in DOCS
    assert f'id -u)" = {uid} ]' in SMOKE


def test_compose_waits_for_what_is_in_flight() -> None:
    grace = re.search(r"stop_grace_period: (\d+)s", COMPOSE)
    assert grace
    assert int(grace[1]) > server._GRACE_SECONDS


def test_all_the_wheel_needs_is_copied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {
        "pyproject.toml",
        project["project"]["readme"],
        *project["project"]["license-files"],
        *project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"],
    }
    copied = {name for line in re.findall(r"^COPY (?!--)(.*)$", DOCKERFILE, re.M) for name in line.split()[:-1]}
    assert copied == needed
    ignored = (ROOT / "docker/Dockerfile.dockerignore").read_text().split()
    assert ignored[0] == "*"
    assert {name.split("/")[0] for name in needed} == {line[1:] for line in ignored if line.startswith("!")}


@contextmanager
def service_answering(status: int) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/readyz" else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name in the base class
            return

    stub = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=stub.serve_forever)
    thread.start()
    try:
        yield stub.server_port
    finally:
        stub.shutdown()
        thread.join()
        stub.server_close()


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_the_health_check_says_what_readyz_says(status: int, healthy: bool) -> None:
    interpreter, *arguments = json.loads(instruction("HEALTHCHECK").partition(" CMD ")[2])
    assert interpreter == "python"
    with service_answering(status) as port:
        done = subprocess.run(
            [sys.executable, *arguments],
            env={"L3STORE_PORT": str(port), "http_proxy": "http://127.0.0.1:1"},
            check=False,
        )
    assert (done.returncode == 0) == healthy


def test_the_command_is_the_service_itself() -> None:
    # In exec form: a shell in between would keep SIGTERM to itself.
    assert json.loads(instruction("ENTRYPOINT")) == ["l3store", "serve"]
    assert instruction("STOPSIGNAL") == "SIGTERM"


def test_the_namespace_of_the_smoke_has_its_digest() -> None:
    body = re.search(r"^namespace='(.*?)'$", SMOKE, re.M | re.S)
    digest = re.search(r"^digest=(\S+)$", SMOKE, re.M)
    assert body
    assert digest
    wire = json.loads(body[1])
    namespace = Namespace(fields=Fields(**wire["namespace"]), geometry=Geometry(**wire["geometry"]))
    assert namespace.digest == digest[1]
