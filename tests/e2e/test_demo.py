"""`l3store demo` passes over a sound service and never over one that gives other bytes than were written."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from l3client.demo.service import own_service
from l3client.transport import L3Client
from l3store.cli import main
from l3store.errors import ConnectError
from tests.client_support import Proxy
from tests.support import Service

SMALL = ("--tokens", "200", "--generate", "4")
FULL_PAGES = 3  # of 64 tokens
HIT = FULL_PAGES * 64


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.out)["rows"]
        return found


Demo = Callable[..., Done]


@pytest.fixture
def demo(capsys: pytest.CaptureFixture[str]) -> Demo:
    """The command, in this process: importing torch takes longer than what it does."""

    def run(*args: str) -> Done:
        status = main(["demo", *SMALL, *args])
        return Done(status, *capsys.readouterr())

    return run


def test_it_passes_and_prints_a_table() -> None:
    """With a service of its own, as a newcomer runs it."""
    command = [sys.executable, "-m", "l3store", "demo", *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    table = [line.split() for line in lines[2:-1]]
    assert [line[:3] for line in table] == [
        [model, who, deployment]
        for model in ("gqa", "mla")
        for who, deployment in (("wrote", "TP4/PP2"), ("read", "TP2/PP1"), ("read", "TP8/PP1"), ("read", "TP1/PP3"))
    ]
    assert all("DIFFER" not in line for line in lines)
    assert all(str(HIT) in line for line in lines[2:-1] if " read " in line)
    assert lines[-1].startswith("Every deployment restored what one had written, byte for byte")


def test_json_says_what_was_proven(service: Service, demo: Demo) -> None:
    """Twice against one service: the second run must not live on what the first wrote."""
    for _ in range(2):
        done = demo("--json", "--url", service.url, "--model", "gqa")
        assert (done.status, done.err) == (0, "")
        assert json.loads(done.out)["passed"] is True
        [wrote, *read] = done.rows
        # 10 layers in 2 stages, 8 heads in groups of 2: 8 objects a page; K and V of 8 heads x 32 floats.
        assert (wrote["role"], wrote["objects"]) == ("wrote", FULL_PAGES * 8)
        assert wrote["bytes"] == HIT * 10 * 2 * 8 * 32 * 4
        assert [(r["hit_tokens"], r["kv_equal"], r["tokens_equal"]) for r in read] == [(HIT, True, True)] * 3
        assert all(0 <= r["difference"] <= 1e-3 for r in (wrote, *read))


@contextmanager
def damaged(service: Service, damage: Callable[[list[Path]], None]) -> Iterator[str]:
    """When the first reader matches, the files that the writer made are damaged."""
    before = set(service.files())

    def act(count: int, _head: str) -> None:
        if count == 0:
            damage(sorted(set(service.files()) - before))

    with Proxy(service, counting="POST /v1/pages/match", on_request=act) as proxy:
        yield proxy.url


def flip(path: Path, offset: int = 100) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x40
    path.write_bytes(data)


def check_not_passed(done: Done) -> None:
    """It failed in its own words, over a smaller hit; what was restored was right, what was not was computed."""
    assert (done.status, done.err) == (1, "")
    assert json.loads(done.out)["passed"] is False
    assert all(row["tokens_equal"] for row in done.rows)
    assert any(row["kv_equal"] is False and row["hit_tokens"] < HIT for row in done.rows)


def test_one_flipped_byte_is_a_smaller_hit_and_a_failed_proof(service: Service, demo: Demo) -> None:
    with damaged(service, lambda files: flip(files[0])) as url:
        check_not_passed(demo("--json", "--url", url, "--model", "gqa"))


def test_everything_lost_is_no_hit_and_a_failed_proof(service: Service, demo: Demo) -> None:
    def lose(files: list[Path]) -> None:
        for path in files:
            path.unlink()

    with damaged(service, lose) as url:
        done = demo("--json", "--url", url, "--model", "mla")
    check_not_passed(done)
    assert [row["hit_tokens"] for row in done.rows[1:]] == [0, 0, 0]


def test_the_bytes_of_two_pages_exchanged_with_their_sums_fail_the_proof(service: Service, demo: Demo) -> None:
    """No sum shows it: the bytes are sound, at another page's place. The comparison of bytes does."""

    def exchange(files: list[Path]) -> None:
        suffix = files[0].name.partition("_")[2]
        first, second = [path for path in files if path.name.endswith(suffix)][:2]
        data = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(data)

    with damaged(service, exchange) as url:
        done = demo("--json", "--url", url, "--model", "gqa")
    assert (done.status, done.err) == (1, "")
    assert any(row["kv_equal"] is False and row["hit_tokens"] == HIT for row in done.rows)


def test_a_failed_proof_is_said_in_the_table(service: Service, demo: Demo) -> None:
    """Here one sum is damaged on the way."""

    def damage(count: int, data: bytes) -> bytes:
        return data[:-1] + bytes([data[-1] ^ 1]) if count == 1 else data

    with Proxy(service, on_answer=damage) as proxy:
        done = demo("--url", proxy.url, "--model", "mla")
    assert (done.status, done.err) == (1, "")
    assert "DIFFER" in done.out
    assert done.out.splitlines()[-1].startswith("FAILED")


def test_a_service_that_goes_away_is_a_failure_in_words(
    start_service: Callable[..., Service], tmp_path: Path, demo: Demo
) -> None:
    running = start_service(tmp_path / "data")

    def kill(count: int, _head: str) -> None:
        if count == 0:
            running.process.kill()
            running.process.wait(10)

    with Proxy(running, counting="POST /v1/pages/write", on_request=kill) as proxy:
        done = demo("--json", "--url", proxy.url, "--model", "mla")
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith("l3store demo: TP4/PP2 stored 0 of 3 pages")


@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        (("--tokens", "64"), 2, "more than 64 tokens"),
        (("--generate", "0"), 2, "at least 1 to generate"),
        (("--url", "nowhere"), 1, "is not the address of a service"),
        (("--url", "http://127.0.0.1:1", "--model", "mla"), 1, "refused"),
    ],
)
def test_what_cannot_be_done_is_said(demo: Demo, args: tuple[str, ...], status: int, says: str) -> None:
    done = demo(*args)
    assert (done.status, done.out) == (status, "")
    assert done.err.startswith("l3store demo: ")
    assert says in done.err


def test_its_own_service_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with own_service() as url, L3Client(url) as client:
        assert client.control.namespaces() == []
        assert len(list(tmp_path.iterdir())) == 1
    with L3Client(url) as client, pytest.raises(ConnectError):
        client.control.namespaces()
    assert list(tmp_path.iterdir()) == []


def test_a_service_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("L3STORE_CAPACITY", "a lot")
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="did not start") as failed, own_service():
        pass
    assert "a lot" in str(failed.value)
    assert time.monotonic() - began < 20
