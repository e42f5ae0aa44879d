"""The order of copies, and how transfers and connectors end: cancelled, closed, dropped, at the interpreter's exit."""

from __future__ import annotations

import gc
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import l3client.connector
from l3client.connector import StagingOptions
from l3client.streams import CPUEvent, Event
from l3client.transfer import TransferCancelledError
from l3client.transport import L3Client, Timeouts
from l3store.errors import TransportError
from l3store.layout import Namespace, Range, Shard
from tests.client_support import Proxy, ScriptedServer, Truth, Worker, hold, read_request
from tests.support import Service, tiny, wait_for

LAYERS, PAGES = 8, 12
ALL = Shard(layers=Range(0, LAYERS), heads=Range(0, 4))
ONE_LAYER_AT_A_TIME = StagingOptions(buffer_bytes=1, buffers=2, timeout=5)


@pytest.fixture
def kept(service: Service, request: pytest.FixtureRequest) -> Iterator[tuple[Worker, Truth]]:
    """A worker whose model's pages are stored, and in its pool, which has as much room again."""
    name = request.node.name
    namespace = tiny(f"endings/{name}", layers=LAYERS, partition=4)
    truth = Truth(namespace, name, PAGES)
    with (
        L3Client(service.url) as client,
        Worker(client, namespace, ALL, num_pages=2 * PAGES, staging=ONE_LAYER_AT_A_TIME) as worker,
    ):
        worker.connector.attach()
        worker.fill(truth, range(PAGES))
        assert worker.connector.backup(truth.hashes, range(PAGES)).wait(30) == PAGES
        yield worker, truth


OTHER = range(PAGES, 2 * PAGES)


def fresh(truth: Truth, pages: int) -> list[str]:
    """Hashes under which nothing is stored."""
    return [page_hash[::-1] for page_hash in truth.hashes[:pages]]


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("l3client")}


def test_a_cancelled_restore_writes_nothing_more(service: Service, kept: tuple[Worker, Truth]) -> None:
    _, truth = kept
    gate, second = threading.Event(), threading.Event()

    def wait_at_gate(count: int, _head: str) -> None:
        if count == 2:
            second.set()
            assert gate.wait(20)

    with (
        Proxy(service, on_request=wait_at_gate) as proxy,
        L3Client(proxy.url) as client,
        Worker(client, truth.namespace, ALL, num_pages=PAGES, staging=ONE_LAYER_AT_A_TIME) as worker,
    ):
        transfer = worker.connector.restore(truth.hashes, range(PAGES))
        assert second.wait(10)
        assert (transfer.wait(0), transfer.done) == (0, False)
        assert transfer.cancel() is True
        assert (transfer.done, transfer.wait()) == (True, 0)
        assert isinstance(transfer.error, TransferCancelledError)
        for layer in range(LAYERS):
            for held in worker.pool.layer(layer):
                held.fill_(0x11)  # the pages are the engine's again
        gate.set()
        wait_for(lambda: not worker.connector._lanes.under_way)
        assert all(bool((held == 0x11).all()) for layer in range(LAYERS) for held in worker.pool.layer(layer))
        assert not worker.connector.failures
        assert worker.connector._staging.stats().in_use == 0
        assert worker.connector.restore(truth.hashes, range(PAGES)).wait(30) == PAGES


def test_a_cancelled_backup_waits_for_nothing_and_blocks_nobody(kept: tuple[Worker, Truth]) -> None:
    worker, truth = kept
    hashes = fresh(truth, 4)
    transfer = worker.connector.backup(hashes, range(4), after=CPUEvent())
    behind = worker.connector.backup(hashes, range(4))
    assert behind.wait(0.1) == 0
    assert transfer.cancel() is True
    assert behind.wait(10) == 4


def test_a_backup_is_not_held_up_by_what_a_later_one_waits_for(kept: tuple[Worker, Truth]) -> None:
    worker, truth = kept
    hashes = fresh(truth, PAGES)
    computed = CPUEvent()
    earlier = worker.connector.backup(hashes[:8], range(8))
    later = worker.connector.backup(hashes[8:], range(8, PAGES), after=computed)
    assert earlier.wait(10) == 8
    assert not later.done
    computed.complete()
    assert later.wait(10) == PAGES - 8


def test_a_restore_writes_only_after_what_it_waits_for(kept: tuple[Worker, Truth]) -> None:
    worker, truth = kept
    free = CPUEvent()
    transfer = worker.connector.restore(truth.hashes, OTHER, after=free)
    assert (transfer.wait(0.2), transfer.done) == (0, False)
    assert worker.untouched(OTHER)
    free.complete()
    assert transfer.wait(10) == PAGES
    assert worker.holds(truth, OTHER)


def test_a_restore_after_what_failed_writes_nothing(kept: tuple[Worker, Truth]) -> None:
    worker, truth = kept
    failed = CPUEvent()
    failure = RuntimeError("the forward pass failed")
    failed.complete(failure)
    transfer = worker.connector.restore(truth.hashes, OTHER, after=failed)
    assert (transfer.wait(10), transfer.error) == (0, failure)
    assert worker.untouched(OTHER)


def test_copies_wait_by_default_for_what_the_caller_had_enqueued(
    kept: tuple[Worker, Truth], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU; here the caller's stream is one of ours, looked at when the call is made."""
    worker, truth = kept
    enqueued = CPUEvent()
    asked: list[tuple[torch.device, str]] = []

    def work_so_far(device: torch.device) -> Event:
        asked.append((device, threading.current_thread().name))
        return enqueued

    monkeypatch.setattr(l3client.connector, "work_so_far", work_so_far)
    transfers = [
        worker.connector.restore(truth.hashes, OTHER),
        worker.connector.backup(fresh(truth, 2), range(2)),
    ]
    assert asked == [(torch.device("cpu"), threading.current_thread().name)] * 2
    assert [transfer.wait(0.1) for transfer in transfers] == [0, 0]
    assert worker.untouched(OTHER)
    enqueued.complete()
    assert [transfer.wait(10) for transfer in transfers] == [PAGES, 2]


class BrokenEvent(CPUEvent):
    def wait(self, timeout: float | None = None) -> bool:
        raise RuntimeError("CUDA error: device-side assert")


def test_an_event_that_cannot_be_waited_for_ends_its_backup_and_no_other(kept: tuple[Worker, Truth]) -> None:
    worker, truth = kept
    hashes = fresh(truth, 4)
    broken = worker.connector.backup(hashes[:2], [0, 1], after=BrokenEvent())
    sound = worker.connector.backup(hashes[2:], [2, 3])
    assert (broken.wait(10), str(broken.error)) == (0, "CUDA error: device-side assert")
    assert sound.wait(10) == 2
    with pytest.raises(TypeError, match=r"neither a torch\.cuda\.Event"):
        worker.connector.backup(hashes[:2], [0, 1], after=object())  # type: ignore[arg-type]


def test_packing_that_cannot_begin_leaks_no_buffer(kept: tuple[Worker, Truth]) -> None:
    worker, truth = kept
    worker.connector._lanes.backups[0].copies.close()
    transfer = worker.connector.backup(fresh(truth, 2), [0, 1])
    assert transfer.wait(10) == 0
    wait_for(lambda: not worker.connector._lanes.under_way)
    assert worker.connector._staging.stats().in_use == 0


def drip(connection: socket.socket, namespace: Namespace, stop: threading.Event) -> None:
    """A read's head, and then one byte now and then: every phase is in time."""
    read_request(connection)
    length = 2 * namespace.num_groups * LAYERS * (namespace.cell_bytes + 8)
    connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nL3-Pages: 2\r\n\r\n".encode())
    while not stop.wait(0.05):
        connection.sendall(b"x")


def test_a_restore_that_drips_ends_and_another_goes_on_beside_it() -> None:
    namespace = tiny("endings/drip", layers=LAYERS, partition=4)
    truth = Truth(namespace, "drip", 2)
    stop = threading.Event()
    timeouts = Timeouts(connect=1, read=1, write=1, pool=1, call=1)
    with (
        ScriptedServer(lambda connection, _: drip(connection, namespace, stop)) as server,
        L3Client(server.url, timeouts=timeouts) as client,
        Worker(client, namespace, ALL, num_pages=4) as worker,
    ):
        began = time.monotonic()
        restores = [worker.connector.restore(truth.hashes, ids) for ids in ([0, 1], [2, 3])]
        assert [transfer.wait(10) for transfer in restores] == [0, 0]
        assert all(transfer.done for transfer in restores)
        assert 0.9 < time.monotonic() - began < 5
        assert worker.connector.failures == {"TimeoutExpiredError": 2}
        stop.set()


@pytest.mark.parametrize("stuck", ["restore", "backup"])
def test_closing_the_client_ends_what_is_stuck_in_it(stuck: str) -> None:
    namespace = tiny("endings/stuck", layers=LAYERS, partition=4)
    truth = Truth(namespace, "stuck", 2)
    before = threads()
    asked = threading.Event()

    def script(connection: socket.socket, _number: int) -> None:
        read_request(connection)
        asked.set()
        hold(connection)

    with ScriptedServer(script) as server:
        client = L3Client(server.url)  # with timeouts far longer than this test
        worker = Worker(client, namespace, ALL, num_pages=2)
        call = worker.connector.restore if stuck == "restore" else worker.connector.backup
        transfer = call(truth.hashes, [0, 1])
        assert asked.wait(10)
        began = time.monotonic()
        client.close()
        assert transfer.wait(5) == 0
        assert isinstance(transfer.error, TransportError)
        worker.connector.close()
        assert time.monotonic() - began < 5
        assert threads() == before


def test_an_ordinary_close_leaves_no_threads(service: Service) -> None:
    namespace = tiny("endings/close", layers=LAYERS, partition=4)
    truth = Truth(namespace, "close", PAGES)
    before = threads()
    with L3Client(service.url) as client, Worker(client, namespace, ALL, num_pages=PAGES) as worker:
        worker.connector.attach()
        transfers = [worker.connector.backup(truth.hashes, range(PAGES)) for _ in range(3)]
        transfers += [worker.connector.restore(truth.hashes, range(PAGES)) for _ in range(3)]
    assert all(transfer.done for transfer in transfers)
    assert threads() == before


def test_a_dropped_connector_leaves_no_threads() -> None:
    before = threads()
    with L3Client("http://127.0.0.1:9") as client:
        worker = Worker(client, tiny("endings/dropped", layers=LAYERS, partition=4), ALL, num_pages=1)
        assert threads() > before
        del worker
        gc.collect()
    assert threads() == before


def test_exit_with_restores_under_way_is_an_ordinary_exit(
    start_service: Callable[..., Service], tmp_path: Path
) -> None:
    service = start_service(tmp_path / "data")
    script = tmp_path / "engine.py"
    script.write_text(
        textwrap.dedent("""
            import sys, time
            from l3client.connector import StagingOptions
            from l3client.transport import L3Client
            from l3store.layout import Range, Shard
            from tests.client_support import Truth, Worker
            from tests.support import tiny

            namespace = tiny("endings/exit", layers=32, partition=8)
            truth = Truth(namespace, "exit", 32)
            shard = Shard(layers=Range(0, 32), heads=Range(0, 4))
            worker = Worker(L3Client(sys.argv[1]), namespace, shard, num_pages=32,
                            staging=StagingOptions(buffer_bytes=1 << 14, buffers=2))
            worker.connector.attach()
            assert worker.connector.backup(truth.hashes, range(32)).wait(30) == 32
            restores = [worker.connector.restore(truth.hashes, range(32)) for _ in range(50)]
            assert restores[0].wait_layer(0, 30)
            sys.exit(7)
        """)
    )
    root = Path(__file__).parents[2]
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, str(script), service.url],
            check=False, capture_output=True, text=True, timeout=60, cwd=root, env={"PYTHONPATH": f"{root}:{root}/gpu"},
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (7, "")
