"""`l3store demo` passes over a sound service and never over one that gives other bytes than were written."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.client_support import Proxy
from tests.support import Service

SMALL = ("--tokens", "200", "--generate", "4")
FULL_PAGES = 3  # of 64 tokens


def demo(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "l3store", "demo", *SMALL, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


def rows(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    report: dict[str, Any] = json.loads(done.stdout)
    found: list[dict[str, Any]] = report["rows"]
    return found


def test_it_passes_and_prints_a_table() -> None:
    """With a service of its own, as a newcomer runs it."""
    done = demo()
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    table = [line.split() for line in lines[2:-1]]
    assert [line[:3] for line in table] == [
        [model, who, deployment]
        for model in ("gqa", "mla")
        for who, deployment in (("wrote", "TP4/PP2"), ("read", "TP2/PP1"), ("read", "TP8/PP1"), ("read", "TP1/PP3"))
    ]
    assert all("DIFFER" not in line for line in lines)
    assert all(str(FULL_PAGES * 64) in line for line in lines[2:-1] if " read " in line)
    assert lines[-1].startswith("Every deployment restored what one had written, byte for byte")


def test_json_says_what_was_proven(service: Service) -> None:
    """Twice against one service: the second run must not live on what the first wrote."""
    for _ in range(2):
        done = demo("--json", "--url", service.url, "--model", "gqa")
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(done.stdout)["passed"] is True
        [wrote, *read] = rows(done)
        # 10 layers in 2 stages, 8 heads in groups of 2: 8 objects a page; K and V of 8 heads x 32 floats.
        assert (wrote["role"], wrote["objects"]) == ("wrote", FULL_PAGES * 8)
        assert wrote["bytes"] == FULL_PAGES * 64 * 10 * 2 * 8 * 32 * 4
        assert [(r["hit_tokens"], r["kv_equal"], r["tokens_equal"]) for r in read] == [(192, True, True)] * 3
        assert all(0 <= r["difference"] <= 1e-3 for r in (wrote, *read))


def after_the_writer(service: Service, pages: int, damage: Callable[[list[Path]], None]) -> Callable[[int, str], None]:
    """When the first reader matches, what the writer stored is damaged on the disk."""
    before = set(service.files())

    def act(count: int, _head: str) -> None:
        if count == 0:
            damage(sorted(set(service.files()) - before))

    return act


@contextmanager
def damaged(service: Service, damage: Callable[[list[Path]], None]) -> Iterator[str]:
    act = after_the_writer(service, FULL_PAGES, damage)
    with Proxy(service, counting="POST /v1/pages/match", on_request=act) as proxy:
        yield proxy.url


def flip(path: Path, offset: int = 100) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x40
    path.write_bytes(data)


def check_not_passed(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """It failed, in its own words, and no row that passed for whole has other bytes than were written."""
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stderr
    report = json.loads(done.stdout)
    assert report["passed"] is False
    found: list[dict[str, Any]] = report["rows"]
    # What was restored was right, and what was not was computed: the tokens are those of computing everything.
    assert all(row["tokens_equal"] for row in found)
    assert any(row["kv_equal"] is False and row["hit_tokens"] < FULL_PAGES * 64 for row in found)
    return found


@pytest.mark.parametrize(
    "damage", [lambda files: flip(files[0]), lambda files: files[0].unlink()], ids=["flip", "lose"]
)
def test_one_damaged_object_is_a_smaller_hit_and_a_failed_proof(
    service: Service, damage: Callable[[list[Path]], None]
) -> None:
    with damaged(service, damage) as url:
        check_not_passed(demo("--json", "--url", url, "--model", "gqa"))


def test_everything_lost_is_no_hit_and_a_failed_proof(service: Service) -> None:
    def lose(files: list[Path]) -> None:
        for path in files:
            path.unlink()

    with damaged(service, lose) as url:
        found = check_not_passed(demo("--json", "--url", url, "--model", "mla"))
    assert [row["hit_tokens"] for row in found[1:]] == [0, 0, 0]


def test_the_bytes_of_two_pages_exchanged_with_their_sums_fail_the_proof(service: Service) -> None:
    """No sum shows it: the bytes are sound, at another page's place. The comparison of bytes does."""

    def exchange(files: list[Path]) -> None:
        suffix = files[0].name.partition("_")[2]
        first, second = [path for path in files if path.name.endswith(suffix)][:2]
        data = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(data)

    with damaged(service, exchange) as url:
        done = demo("--json", "--url", url, "--model", "gqa")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert any(row["kv_equal"] is False and row["hit_tokens"] == 192 for row in rows(done))


def test_bytes_damaged_on_the_way_fail_the_proof(service: Service) -> None:
    def damage(count: int, data: bytes) -> bytes:
        return data[:-1] + bytes([data[-1] ^ 1]) if count == 1 else data

    with Proxy(service, on_answer=damage) as proxy:
        check_not_passed(demo("--json", "--url", proxy.url, "--model", "gqa"))


def test_a_service_that_goes_away_is_a_failure_in_words(start_service: Callable[..., Service], tmp_path: Path) -> None:
    running = start_service(tmp_path / "data")

    def kill(count: int, _head: str) -> None:
        if count == 0:
            running.process.kill()
            running.process.wait(10)

    with Proxy(running, counting="POST /v1/pages/write", on_request=kill) as proxy:
        done = demo("--json", "--url", proxy.url, "--model", "mla")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("l3store demo: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        (("--tokens", "64"), 2, "more than 64 tokens"),
        (("--generate", "0"), 2, "at least 1 to generate"),
        (("--url", "nowhere"), 1, "is not the address of a service"),
        (("--url", "http://127.0.0.1:1", "--model", "mla"), 1, "cannot connect|refused"),
    ],
)
def test_what_cannot_be_done_is_said(args: tuple[str, ...], status: int, says: str) -> None:
    done = demo(*args)
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert any(words in done.stderr for words in says.split("|")), done.stderr


def test_its_own_service_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from l3client.demo.service import own_service
    from l3client.transport import L3Client
    from l3store.errors import ConnectError

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", None)
    with own_service() as url, L3Client(url) as client:
        assert client.control.namespaces() == []
        assert len(list(tmp_path.iterdir())) == 1
    with L3Client(url) as client, pytest.raises(ConnectError):
        client.control.namespaces()
    assert list(tmp_path.iterdir()) == []


def test_a_service_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from l3client.demo.service import own_service

    monkeypatch.setenv("L3STORE_CAPACITY", "a lot")
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="did not start") as failed, own_service():
        pass
    assert "a lot" in str(failed.value)
    assert time.monotonic() - began < 20
