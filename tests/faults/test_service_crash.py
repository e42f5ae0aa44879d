"""The service is killed, its folder misused, its disk full: what it keeps and what it says."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from l3store.layout import Namespace
from tests.support import Client, Pages, Service, Wire, check_problem, counters, launch, tiny, wait_for

Start = Callable[..., Service]
Connect = Callable[[Service], Client]

LARGE = tiny("org/large", page_size=1024, layers=4, heads=8, head_group=8, head_dim=128, partition=4)
"""Objects of 16 MiB."""


def test_a_write_that_a_kill_cuts_off_never_was(start_service: Start, connect: Connect, tmp_path: Path) -> None:
    """A slow writer; readers ask meanwhile; then kill -9."""
    service = start_service(tmp_path / "data")
    client = connect(service)
    client.register(LARGE)
    pages = Pages(LARGE, "killed", 1)
    key, body = pages.key(0, 0, 4), pages.body(0, 0, 4)
    with Wire(service) as wire:
        wire.request(f"PUT /v1/objects/{key} HTTP/1.1\nContent-Length: {len(body)}")
        for at in range(0, len(body) - (1 << 20), 1 << 20):
            wire.send(body[at : at + (1 << 20)])
            assert client.get(key).status_code == 404
            assert client.http.head(f"/v1/objects/{key}").status_code == 404
        service.stop(signal.SIGKILL)
    service = start_service(tmp_path / "data")
    client = connect(service)
    check_problem(client.get(key), 404)
    assert service.partials() == []
    assert client.put(key, body, pages.sums(body)).status_code == 201
    assert client.get(key).content == body


def test_kills_at_any_time_leave_whole_objects_or_none(start_service: Start, connect: Connect, tmp_path: Path) -> None:
    pages = Pages(LARGE, "kills", 40)
    service = start_service(tmp_path / "data")
    connect(service).register(LARGE)
    acknowledged: list[int] = []

    def write() -> None:
        client = connect(service)
        for page in range(40):
            # The service is killed under it.
            with contextlib.suppress(httpx.TransportError):
                if client.put(pages.key(page, 0, 4), pages.body(page, 0, 4)).status_code == 201:
                    acknowledged.append(page)

    writer = threading.Thread(target=write)
    writer.start()
    wait_for(lambda: len(acknowledged) >= 2)
    time.sleep(0.013)
    service.stop(signal.SIGKILL)
    writer.join(20)
    service = start_service(tmp_path / "data")
    client = connect(service)
    assert service.partials() == []
    for page in range(40):
        answer = client.get(pages.key(page, 0, 4))
        assert answer.status_code == 404 or answer.content == pages.body(page, 0, 4)
        assert answer.status_code == 200 or page not in acknowledged


def test_leftovers_in_tmp_are_swept_at_start(start_service: Start, connect: Connect, tmp_path: Path) -> None:
    (tmp_path / "data" / "tmp").mkdir(parents=True)
    (tmp_path / "data" / "tmp" / "12").write_bytes(b"half")
    assert start_service(tmp_path / "data").partials() == []


def test_a_second_service_on_one_folder_is_refused_with_a_clear_line(
    start_service: Start, connect: Connect, tmp_path: Path
) -> None:
    service = start_service(tmp_path / "data")
    with pytest.raises(AssertionError, match=r"data is in use by another l3store: stop it, or give --data-dir"):
        launch(tmp_path / "data")
    assert connect(service).http.get("/readyz").status_code == 200


def test_a_port_that_is_taken_is_refused_with_a_clear_line(service: Service, tmp_path: Path) -> None:
    port = str(service.address[1])
    command = [sys.executable, "-m", "l3store", "serve", "--port", port, "--data-dir", str(tmp_path / "other")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert not (tmp_path / "other").exists()


def test_until_the_index_is_complete_all_but_healthz_is_503_with_retry_after(
    start_service: Start, connect: Connect, tmp_path: Path
) -> None:
    """A registration whose reading blocks, until we let it go on."""
    namespace = tiny("org/slow-start")
    folder = tmp_path / "data" / "namespaces"
    folder.mkdir(parents=True)
    os.mkfifo(folder / f"{namespace.digest}.json")
    service = start_service(tmp_path / "data", ready=False)
    client = connect(service)
    key = f"{'0' * 64}_{namespace.digest}_L0-3_H0"
    for answer in (
        client.http.get("/readyz"),
        client.http.get("/v1/namespaces"),
        client.register(namespace),
        client.get(key),
        client.put(key, bytes(768)),
        client.http.delete(f"/v1/objects/{key}"),
        client.pages("match", namespace, ["0" * 64]),
        client.pages("read", namespace, ["0" * 64]),
        client.http.post(f"/v1/objects/{key}/suspect"),
    ):
        check_problem(answer, 503, "index is being rebuilt")
        assert answer.headers["Retry-After"] == "1"
    for path in ("/healthz", "/version", "/metrics"):
        assert client.http.get(path).status_code == 200
    assert "l3store 0" not in service.log
    (folder / f"{namespace.digest}.json").write_text(json.dumps(namespace.to_wire()))
    wait_for(lambda: client.http.get("/readyz").status_code == 200)
    assert [n["digest"] for n in client.http.get("/v1/namespaces").json()["namespaces"]] == [namespace.digest]
    assert f" on {service.url}, data in {service.data_dir}" in service.log


def test_a_folder_that_cannot_be_read_is_said_and_stays_503(
    start_service: Start, connect: Connect, tmp_path: Path
) -> None:
    (tmp_path / "data" / "namespaces" / "x.json").mkdir(parents=True)
    client = connect(start_service(tmp_path / "data", ready=False))
    wait_for(lambda: "could not start" in client.http.get("/readyz").json()["detail"])
    check_problem(client.http.get("/v1/namespaces"), 503, "could not start", "x.json")


def test_a_data_folder_that_cannot_be_written_is_503_and_back_when_it_can(
    start_service: Start, connect: Connect, tmp_path: Path
) -> None:
    service = start_service(tmp_path / "data")
    client = connect(service)
    pages = Pages(tiny("org/unwritable"), "unwritable", 2)
    client.register(pages.namespace)
    client.put_page(pages, 0, [(0, 6)])
    # A file where a folder has to be.
    in_the_way = tmp_path / "data" / "objects" / pages.hashes[1][:2]
    in_the_way.rmdir()
    in_the_way.write_bytes(b"")
    check_problem(client.put(pages.key(1, 0, 3), pages.body(1, 0, 3)), 503, "could not store")
    (tmp_path / "data" / "tmp").rename(tmp_path / "gone")
    check_problem(client.register(tiny("org/unwritable-2")), 503, "could not be stored")
    # What is there is still served.
    assert client.get(pages.key(0, 0, 6)).content == pages.body(0, 0, 6)
    (tmp_path / "data" / "objects").rename(tmp_path / "objects-gone")
    answer = client.http.get("/readyz")
    check_problem(answer, 503, "cannot be written")
    assert answer.headers["Retry-After"] == "1"
    assert client.http.get("/healthz").status_code == 200
    # No other folder is begun in the place of one that is gone.
    check_problem(client.put(pages.key(1, 0, 3), pages.body(1, 0, 3)), 503, "could not store")
    assert not (tmp_path / "data" / "objects").exists()
    (tmp_path / "objects-gone").rename(tmp_path / "data" / "objects")
    (tmp_path / "gone").rename(tmp_path / "data" / "tmp")
    in_the_way.unlink()
    assert client.http.get("/readyz").status_code == 200
    assert client.put(pages.key(1, 0, 3), pages.body(1, 0, 3)).status_code == 201


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a file system of a known size")
def test_a_disk_smaller_than_the_capacity_evicts_then_says_507_and_recovers(
    start_service: Start, connect: Connect, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "none", str(disk)]
    mounted = subprocess.run(mount, check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting is not allowed here: {mounted.stderr.decode(errors='replace').strip()}")
    service = None
    try:
        service = start_service(disk / "data", "--capacity", "1Gi")
        client = connect(service)
        namespace = tiny("org/disk", page_size=1024, layers=4, heads=2, head_group=2, head_dim=128, partition=4)
        pages = Pages(namespace, "disk", 16)
        client.register(pages.namespace)
        for page in range(16):
            assert client.put(pages.key(page, 0, 4), pages.body(page, 0, 4)).status_code == 201
        assert counters(client)["l3store_evicted_objects_total"] > 0
        client.http.delete(f"/v1/namespaces/{pages.namespace.digest}")
        client.register(pages.namespace)
        with (disk / "other").open("wb") as other:
            other.write(bytes(30 << 20))
        answer = client.put(pages.key(0, 0, 4), pages.body(0, 0, 4))
        check_problem(answer, 507, "no space")
        assert answer.headers["Retry-After"] == "5"
        assert client.http.get("/healthz").status_code == 200
        (disk / "other").unlink()
        assert client.put(pages.key(0, 0, 4), pages.body(0, 0, 4)).status_code == 201
    finally:
        if service is not None:
            service.stop()
        subprocess.run(["umount", str(disk)], check=False)


def test_what_cannot_fit_the_capacity_is_507(start_service: Start, connect: Connect, tmp_path: Path) -> None:
    client = connect(start_service(tmp_path / "data", "--capacity", "40K"))
    pages = Pages(tiny("org/full", page_size=64), "full", 1)
    client.register(pages.namespace)
    answer = client.put(pages.key(0, 0, 6), pages.body(0, 0, 6))
    assert answer.status_code == 201
    wide = Pages(tiny("org/full-2", page_size=128), "full", 1)
    client.register(wide.namespace)
    answer = client.put(wide.key(0, 0, 6), wide.body(0, 0, 6))
    check_problem(answer, 507, "capacity 40000")
    assert answer.headers["Retry-After"] == "5"
    # It evicted nothing in vain.
    assert client.get(pages.key(0, 0, 6)).status_code == 200
    result = client.write([(wide.key(0, 0, 6), wide.body(0, 0, 6), None)]).json()["results"][0]
    assert result["status"] == "error"
    assert "capacity" in result["detail"]


def test_a_stop_finishes_what_is_in_flight(start_service: Start, connect: Connect, tmp_path: Path) -> None:
    service = start_service(tmp_path / "data")
    client = connect(service)
    client.register(LARGE)
    pages = Pages(LARGE, "stopping", 1)
    key, body = pages.key(0, 0, 4), pages.body(0, 0, 4)
    with Wire(service) as wire:
        wire.request(f"PUT /v1/objects/{key} HTTP/1.1\nContent-Length: {len(body)}", body[: 1 << 20])
        time.sleep(0.1)
        service.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        wire.send(body[1 << 20 :])
        assert wire.answer().status == 201
    assert service.stop() == 0
    service = start_service(tmp_path / "data")
    assert connect(service).get(key).content == body


def test_a_stop_waits_for_nobody_who_is_idle(start_service: Start, connect: Connect, tmp_path: Path) -> None:
    service = start_service(tmp_path / "data")
    idle = [socket.create_connection(service.address) for _ in range(3)]
    idle[1].sendall(b"GET /healthz HTTP/1.1\r\nHost: l3\r\n\r\n")
    assert idle[1].recv(1000).startswith(b"HTTP/1.1 200")
    began = time.monotonic()
    assert service.stop() == 0
    assert time.monotonic() - began < 4
    for connection in idle:
        connection.close()


@pytest.mark.parametrize("capacity", ["2M"])
def test_the_files_stay_within_the_capacity_and_a_restart_with_less_trims_before_ready(
    start_service: Start, connect: Connect, tmp_path: Path, capacity: str
) -> None:
    namespace: Namespace = tiny("org/capped", page_size=256, heads=2)
    pages = Pages(namespace, "capped", 60)
    service = start_service(tmp_path / "data", "--capacity", capacity)
    client = connect(service)
    client.register(namespace)

    def disk() -> int:
        return sum(path.stat().st_blocks * 512 for path in service.files())

    for page in range(60):
        client.put_page(pages, page, [(0, 3), (3, 6)])
        assert disk() <= 2_000_000
    assert disk() > 1_000_000
    assert counters(client)["l3store_evicted_objects_total"] > 0
    assert client.pages("match", namespace, pages.hashes[-5:]).json() == {"pages": 5}
    service.stop()
    service = start_service(tmp_path / "data", "--capacity", "1M")
    assert disk() <= 1_000_000
    client = connect(service)
    totals = counters(client)
    assert totals["l3store_objects"] == len(service.files())
    assert totals["l3store_disk_bytes"] <= totals["l3store_capacity_bytes"] == 1_000_000
