"""What a review broke: smuggled bodies, lost pipelines, sleepers that hold memory, descriptors that run out."""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from l3store.service.http import pace
from tests.support import Client, Pages, Service, Wire, check_problem, tiny, wait_for

Start = Callable[..., Service]
Connect = Callable[[Service], Client]

JSON = "Content-Type: application/json\r\n"


@pytest.fixture(scope="module")
def pages(service: Service) -> Pages:
    made = Pages(tiny("org/hardening"), "hardening", 12)
    client = Client(service.url)
    client.register(made.namespace)
    for page in range(12):
        assert client.put(made.key(page, 0, 3), made.body(page, 0, 3)).status_code == 201
    client.close()
    return made


@pytest.mark.parametrize("blank", [" ", "\t", "  \t "])
def test_a_length_with_blanks_behind_it_is_that_length(
    service: Service, client: Client, pages: Pages, blank: str
) -> None:
    """Taken for 0, the body would be the next request: here, one that deletes."""
    inner = f"DELETE /v1/objects/{pages.key(0, 0, 3)} HTTP/1.1\r\nHost: l3\r\n\r\n".encode()
    head = f"POST /v1/pages/match HTTP/1.1\r\nHost: l3\r\n{JSON}Content-Length: {len(inner)}{blank}\r\n\r\n"
    with Wire(service) as wire:
        wire.send(head.encode() + inner)
        wire.problem(400)
        wire.request("GET /healthz HTTP/1.1")
        assert wire.answer().body == b'{"status":"ok"}'
    assert client.get(pages.key(0, 0, 3)).status_code == 200


def test_expect_with_a_blank_behind_it_is_understood(service: Service, pages: Pages) -> None:
    body = pages.body(0, 3, 6)
    with Wire(service) as wire:
        head = f"PUT /v1/objects/{pages.key(0, 3, 6)} HTTP/1.1\r\nHost: l3\r\nExpect: 100-continue \r\n"
        wire.send(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
        assert wire.answer().status == 100
        wire.send(body)
        assert wire.answer().status == 201


@pytest.mark.parametrize(
    "head",
    [
        "GET /healthz HTTP/1.1\r\n\r\n",
        "GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        "GET /healthz HTTP/2.0\r\nHost: a\r\n\r\n",
        "GET /healthz HTTP/0.9\r\nHost: a\r\n\r\n",
    ],
)
def test_a_request_without_one_host_or_of_another_version_is_400(service: Service, head: str) -> None:
    with Wire(service) as wire:
        wire.send(head.encode())
        wire.problem(400)
        assert wire.ended()


@pytest.mark.parametrize("count", [1, 3, 10])
def test_all_that_was_asked_before_the_end_is_answered(service: Service, pages: Pages, count: int) -> None:
    with Wire(service) as wire:
        for page in range(count):
            wire.request(f"GET /v1/objects/{pages.key(page, 0, 3)} HTTP/1.1")
        wire.socket.shutdown(socket.SHUT_WR)
        for page in range(count):
            assert wire.answer().body == pages.body(page, 0, 3)
        assert wire.ended()


def test_a_batch_larger_than_the_memory_is_stored_piece_by_piece(
    start_service: Start, connect: Connect, tmp_path: Path
) -> None:
    client = connect(start_service(tmp_path / "data", "--ram", "2Mi"))
    namespace = tiny("org/small-memory", page_size=64, layers=6, heads=4, head_group=2, head_dim=64)
    pages = Pages(namespace, "small", 16)
    client.register(namespace)
    items = [
        (pages.key(page, first, first + 3, group), pages.body(page, first, first + 3, group), None)
        for page in range(16)
        for group in (0, 1)
        for first in (0, 3)
    ]
    assert sum(len(body) for _, body, _ in items) > 4 << 20
    results = client.write(items).json()["results"]
    assert {result["status"] for result in results} == {"created"}
    for order in ("page", "layer"):
        answer = client.pages("read", namespace, pages.hashes, order=order)
        assert answer.content == pages.read(slice(None), slice(None), slice(None), order)


def test_memory_too_small_to_work_with_is_refused_at_start(tmp_path: Path) -> None:
    from l3store.cli import main

    assert main(["serve", "--ram", "1K", "--data-dir", str(tmp_path / "data"), "--port", "0"]) == 2


def test_a_sender_that_trickles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: now))
    made = pace.Pace()
    made.start()
    for _ in range(19):
        now += 1
        made.moved(1)
        assert made.patience() > 0
    now += 1
    assert made.patience() == 0
    made.start()
    for _ in range(100):
        now += 19
        made.moved(pace.MIN_BYTES)
        assert made.patience() == pace.WINDOW_SECONDS


def test_no_descriptors_left_turns_connections_away_and_is_over_when_some_are(
    start_service: Start, connect: Connect, tmp_path: Path
) -> None:
    service = start_service(tmp_path / "data")
    client = connect(service)
    assert client.http.get("/healthz").status_code == 200
    resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE, (64, 64))
    held = []
    for _ in range(70):
        connected = socket.create_connection(service.address, timeout=5)
        held.append(connected)
    time.sleep(0.5)
    assert client.http.get("/healthz").status_code == 200
    for connected in held:
        connected.close()

    def answers() -> bool:
        # Whoever comes before it has noticed is still turned away.
        with contextlib.suppress(httpx.TransportError):
            return connect(service).http.get("/healthz").status_code == 200
        return False

    wait_for(answers)
    assert len(service.log) < 200_000
    assert "AttributeError" not in service.log
    check_problem(client.get("nope"), 400)
