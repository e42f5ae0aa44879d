"""The connector when things go wrong: every failure is a smaller hit, never an exception, never a hang."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch

from l3client.breaker import BackOff, BackOffError
from l3client.connector import Connector, StagingOptions
from l3client.pools import MHAPool
from l3client.streams import CPUEvent, StreamClosedError
from l3client.transfer import Transfer
from l3client.transport import L3Client, Timeouts
from l3store.errors import ConnectError, L3Error, TooLargeError, TransportError
from l3store.layout import Coordinate, Key, Namespace, Range, Shard
from tests.client_support import (
    LastPieceError,
    Proxy,
    ScriptedServer,
    Truth,
    Worker,
    answer,
    hold,
    read_request,
    revive,
)
from tests.support import Service, tiny, wait_for

LAYERS, PAGES = 8, 12
ALL = Shard(layers=Range(0, LAYERS), heads=Range(0, 4))
ONE_LAYER_AT_A_TIME = StagingOptions(buffer_bytes=1, buffers=2, timeout=5)
"""One page of room: a layer of 8 pages at a time, in two reads for 12 pages."""
QUICK = Timeouts(connect=1.0, read=2.0, write=2.0, pool=2.0)


@pytest.fixture
def own(start_service: Callable[..., Service], tmp_path: Path) -> Service:
    """A service of the test's own."""
    return start_service(tmp_path / "data")


def model(name: str) -> Namespace:
    return tiny(f"faults/{name}", layers=LAYERS, partition=4)


def stored(service: Service, name: str) -> tuple[Namespace, Truth]:
    """A model whose pages are all stored."""
    namespace = model(name)
    truth = Truth(namespace, name, PAGES)
    with L3Client(service.url) as client, Worker(client, namespace, ALL, num_pages=PAGES) as worker:
        worker.connector.attach()
        worker.fill(truth, range(PAGES))
        assert worker.connector.backup(truth.hashes, range(PAGES)).wait(30) == PAGES
    return namespace, truth


@pytest.fixture
def reader(service: Service, request: pytest.FixtureRequest) -> Iterator[tuple[Worker, Truth]]:
    """A worker whose model's pages are stored, over the shared service."""
    namespace, truth = stored(service, request.node.name)
    with L3Client(service.url, timeouts=QUICK) as client, Worker(client, namespace, ALL, num_pages=16) as worker:
        yield worker, truth


def path_of(service: Service, truth: Truth, page: int, first: int, group: int) -> Path:
    name = f"{truth.hashes[page]}_{truth.namespace.digest}_L{first}-{first + 4}_H{group}"
    [path] = [path for path in service.files() if path.name == name]
    return path


def test_a_layer_is_in_place_while_later_ones_are_still_to_be_sent(service: Service) -> None:
    """Each read is held up until the layers before it have been seen, complete, in the pool."""
    namespace, truth = stored(service, "by-layer")
    gates = [threading.Event() for _ in range(2 * LAYERS)]

    def wait_at_gate(count: int, _head: str) -> None:
        assert gates[count].wait(20)

    with (
        Proxy(service, on_request=wait_at_gate) as proxy,
        L3Client(proxy.url) as client,
        Worker(client, namespace, ALL, num_pages=PAGES, staging=ONE_LAYER_AT_A_TIME) as worker,
    ):
        transfer = worker.connector.restore(truth.hashes, range(PAGES))
        for layer in range(LAYERS):
            assert transfer.wait_layer(layer, timeout=0) == 0
            gates[2 * layer].set()
            gates[2 * layer + 1].set()
            assert transfer.wait_layer(layer, timeout=20) == PAGES
            for held in worker.pool.layer(layer):
                assert not bool((held == 0xA5).all())
            assert transfer.done is (layer == LAYERS - 1)
            if layer < LAYERS - 1:
                # The reads of later layers are held up: nothing of them can have arrived.
                assert all(bool((held == 0xA5).all()) for held in worker.pool.layer(layer + 1))
        assert transfer.wait(20) == PAGES
        assert worker.holds(truth, range(PAGES))


def test_a_page_deleted_between_match_and_restore_ends_the_hit(reader: tuple[Worker, Truth]) -> None:
    worker, truth = reader
    assert worker.connector.match(truth.hashes) == PAGES
    client = worker.connector._client
    client.control.delete(Key(truth.hashes[7], truth.namespace.digest, Coordinate(4, 8, 1)))
    transfer = worker.connector.restore(truth.hashes, range(PAGES))
    assert transfer.wait(30) == 7
    assert transfer.error is None
    assert worker.holds(truth, range(7))
    assert worker.untouched(range(PAGES, 16))
    assert worker.connector.match(truth.hashes) == 7


@pytest.mark.parametrize("count", [1, 5, 9])
def test_a_page_deleted_in_the_middle_of_a_restore_ends_the_hit(service: Service, count: int) -> None:
    """Before the count-th read; the layers read before had the page, and it does not count."""
    namespace, truth = stored(service, f"mid-delete-{count}")

    def delete(at: int, _head: str) -> None:
        if at == count:
            with L3Client(service.url) as other:
                other.control.delete(Key(truth.hashes[3], namespace.digest, Coordinate(0, 8, 0)))

    with (
        Proxy(service, on_request=delete) as proxy,
        L3Client(proxy.url) as client,
        Worker(client, namespace, ALL, num_pages=PAGES, staging=ONE_LAYER_AT_A_TIME) as worker,
    ):
        transfer = worker.connector.restore(truth.hashes, range(PAGES))
        # A second read of a layer, of pages 8 on, does not see that page 3 went away; the next layer's first one does.
        assert transfer.wait(30) == 3
        assert transfer.wait_layer(0) == 3
        assert worker.holds(truth, range(3))


@pytest.mark.parametrize("layer", [0, 3, 7])
def test_a_corrupt_page_ends_the_hit_and_is_a_miss_from_then_on(service: Service, layer: int) -> None:
    namespace, truth = stored(service, f"corrupt-{layer}")
    damaged = path_of(service, truth, 5, layer // 4 * 4, 0)
    data = bytearray(damaged.read_bytes())
    data[layer % 4 * namespace.cell_bytes + 1] ^= 0x10
    damaged.write_bytes(data)
    with L3Client(service.url) as client, Worker(client, namespace, ALL, num_pages=PAGES) as worker:
        assert worker.connector.match(truth.hashes) == PAGES
        transfer = worker.connector.restore(truth.hashes, range(PAGES))
        assert transfer.wait(30) == 5
        assert worker.holds(truth, range(5))
        assert worker.connector.failures == {"CorruptError": 1}
        assert worker.connector.match(truth.hashes) == 5
        assert [damaged.name in path.name for path in service.files("quarantine")].count(True) == 1
        # A writer that has the page mends the store.
        worker.fill(truth, range(PAGES))
        assert worker.connector.backup(truth.hashes, range(PAGES)).wait(30) == PAGES
        assert worker.connector.restore(truth.hashes, range(PAGES)).wait(30) == PAGES


def test_bytes_damaged_on_the_way_are_never_marked_valid(service: Service) -> None:
    namespace, truth = stored(service, "on-the-way")

    def damage(count: int, data: bytes) -> bytes:
        # The last byte of an answer is one of the sums of the last page.
        return data[:-1] + bytes([data[-1] ^ 1]) if count == 4 else data

    with (
        Proxy(service, on_answer=damage) as proxy,
        L3Client(proxy.url) as client,
        Worker(client, namespace, ALL, num_pages=PAGES, staging=ONE_LAYER_AT_A_TIME) as worker,
    ):
        transfer = worker.connector.restore(truth.hashes, range(PAGES))
        got = transfer.wait(30)
        assert got < PAGES
        assert worker.holds(truth, range(got))
        assert worker.connector.failures["CorruptError"] >= 1
        # The stored bytes were sound: the next restore, over a sound wire, has them all.
        assert worker.connector.restore(truth.hashes, range(PAGES)).wait(30) == PAGES


def test_an_object_lost_from_the_disk_ends_the_hit(service: Service) -> None:
    namespace, truth = stored(service, "lost")
    path_of(service, truth, 6, 0, 1).unlink()
    with L3Client(service.url) as client, Worker(client, namespace, ALL, num_pages=PAGES) as worker:
        assert worker.connector.match(truth.hashes) == PAGES
        assert worker.connector.restore(truth.hashes, range(PAGES)).wait(30) == 6
        assert worker.holds(truth, range(6))
        assert worker.connector.match(truth.hashes) == 6


def killer(service: Service, at: int) -> Callable[[int, str], None]:
    def kill(count: int, _head: str) -> None:
        if count == at:
            os.kill(service.process.pid, signal.SIGKILL)
            service.process.wait(10)

    return kill


def test_a_service_killed_in_the_middle_of_a_restore_is_a_hit_of_0_until_it_is_back(own: Service) -> None:
    namespace, truth = stored(own, "killed")
    with (
        Proxy(own, on_request=killer(own, 6)) as proxy,
        L3Client(proxy.url, timeouts=QUICK) as client,
        L3Client(own.url, timeouts=QUICK) as direct,
        Worker(client, namespace, ALL, num_pages=PAGES, staging=ONE_LAYER_AT_A_TIME) as worker,
        Worker(direct, namespace, ALL, num_pages=PAGES) as other,
    ):
        assert other.connector.match(truth.hashes) == PAGES
        transfer = worker.connector.restore(truth.hashes, range(PAGES))
        assert transfer.wait(30) == 0
        assert isinstance(transfer.error, TransportError)
        assert transfer.done
        assert worker.connector.failures.total() == 1
        assert other.connector.match(truth.hashes) == 0
        assert other.connector.restore(truth.hashes, range(PAGES)).wait(30) == 0
        revive(own)
        assert other.connector.match(truth.hashes) == PAGES
        assert other.connector.restore(truth.hashes, range(PAGES)).wait(30) == PAGES
        assert other.holds(truth, range(PAGES))


@pytest.mark.parametrize(("times", "hit"), [(1, PAGES), (2, 0)])
def test_an_answer_that_breaks_off_is_asked_for_once_more(service: Service, times: int, hit: int) -> None:
    namespace, truth = stored(service, f"broken-{times}")

    def cut(count: int, data: bytes) -> bytes:
        if 5 <= count < 5 + times:
            raise LastPieceError(data[:-1])
        return data

    with (
        Proxy(service, on_answer=cut) as proxy,
        L3Client(proxy.url, timeouts=QUICK) as client,
        Worker(client, namespace, ALL, num_pages=PAGES, staging=ONE_LAYER_AT_A_TIME) as worker,
    ):
        transfer = worker.connector.restore(truth.hashes, range(PAGES))
        assert (transfer.wait(30), transfer.wait_layer(0)) == (hit, hit)
        assert isinstance(transfer.error, TransportError) is (hit == 0)
        assert worker.connector.restore(truth.hashes, range(PAGES)).wait(30) == PAGES
        assert worker.holds(truth, range(PAGES))


def test_a_service_killed_in_the_middle_of_a_backup_stores_whole_objects_or_none(own: Service) -> None:
    namespace = model("killed-backup")
    truth = Truth(namespace, "killed-backup", PAGES)
    with (
        Proxy(own, counting="POST /v1/pages/write", on_request=killer(own, 5)) as proxy,
        L3Client(proxy.url, timeouts=QUICK) as client,
        L3Client(own.url, timeouts=QUICK) as direct,
        Worker(client, namespace, ALL, num_pages=PAGES, staging=ONE_LAYER_AT_A_TIME) as worker,
        Worker(direct, namespace, ALL, num_pages=PAGES) as other,
    ):
        worker.connector.attach()
        worker.fill(truth, range(PAGES))
        other.fill(truth, range(PAGES))
        transfer = worker.connector.backup(truth.hashes, range(PAGES))
        assert transfer.wait(30) == 0
        assert isinstance(transfer.error, TransportError)
        revive(own)
        assert other.connector.match(truth.hashes) == 5
        again = other.connector.backup(truth.hashes, range(PAGES))
        assert again.wait(30) == PAGES
        assert again.bytes == (PAGES - 5) * namespace.shape().page_bytes
        assert other.connector.match(truth.hashes) == PAGES


def test_nobody_listening_is_no_hit_and_says_so_in_the_counts() -> None:
    namespace = model("nobody")
    truth = Truth(namespace, "nobody", 2)
    with ScriptedServer(lambda connection, _: None) as server:
        url = server.url
    with L3Client(url, timeouts=QUICK) as client, Worker(client, namespace, ALL, num_pages=2) as worker:
        assert worker.connector.match(truth.hashes) == 0
        assert worker.connector.restore(truth.hashes, [0, 1]).wait(10) == 0
        assert worker.connector.backup(truth.hashes, [0, 1]).wait(10) == 0
        assert worker.connector.failures == {"ConnectError": 3}
        assert worker.untouched([0, 1])


def test_an_unregistered_namespace_is_no_hit(service: Service) -> None:
    namespace = model("unregistered")
    truth = Truth(namespace, "unregistered", 2)
    with L3Client(service.url) as client, Worker(client, namespace, ALL, num_pages=2) as worker:
        assert worker.connector.match(truth.hashes) == 0
        assert worker.connector.backup(truth.hashes, [0, 1]).wait(10) == 0
        assert worker.connector.failures == {"UnknownNamespaceError": 2}


@pytest.mark.parametrize("hashes", [["nonsense"] * 2, ["0" * 64] * 2], ids=["malformed", "twice"])
def test_hashes_that_the_service_refuses_are_no_hit(service: Service, hashes: list[str]) -> None:
    namespace = model("refused")
    with L3Client(service.url) as client, Worker(client, namespace, ALL, num_pages=2) as worker:
        worker.connector.attach()
        assert worker.connector.match(hashes) == 0
        assert worker.connector.backup(hashes, [0, 1]).wait(10) == 0
        assert worker.connector.restore(hashes, [0, 1]).wait(10) == 0
        assert worker.connector.failures == {"RefusedError": 3}


def test_a_full_service_is_a_smaller_result(start_service: Callable[..., Service], tmp_path: Path) -> None:
    """What does not fit beside what is being written is refused object by object."""
    namespace = model("full")
    page = namespace.shape().page_bytes
    service = start_service(tmp_path / "data", "--capacity", str(page // 4))
    truth = Truth(namespace, "full", PAGES)
    with L3Client(service.url) as client, Worker(client, namespace, ALL, num_pages=PAGES) as worker:
        worker.connector.attach()
        worker.fill(truth, range(PAGES))
        transfer = worker.connector.backup(truth.hashes, range(PAGES))
        assert transfer.wait(30) < PAGES
        assert worker.connector.failures["WriteError"] > 0
        assert worker.connector.match(truth.hashes) == 0


def test_kv_whose_computation_failed_is_never_stored(service: Service) -> None:
    """It would be served for good under a name that says it was computed."""
    namespace = model("after")
    truth = Truth(namespace, "after", 2)
    with L3Client(service.url) as client, Worker(client, namespace, ALL, num_pages=2) as worker:
        worker.connector.attach()
        computed = CPUEvent()
        transfer = worker.connector.backup(truth.hashes, [0, 1], after=computed)
        assert transfer.wait(0.1) == 0
        failure = RuntimeError("the forward pass failed")
        computed.complete(failure)
        assert transfer.wait(10) == 0
        assert transfer.error is failure
        assert worker.connector.match(truth.hashes) == 0


def test_a_backup_reads_the_pool_only_after_what_it_waits_for(service: Service) -> None:
    namespace = model("ordered")
    truth = Truth(namespace, "ordered", 2)
    with L3Client(service.url) as client, Worker(client, namespace, ALL, num_pages=2) as worker:
        worker.connector.attach()
        computed = CPUEvent()
        transfer = worker.connector.backup(truth.hashes, [0, 1], after=computed)
        worker.fill(truth, [0, 1])
        computed.complete()
        assert transfer.wait(10) == 2
    with L3Client(service.url) as client, Worker(client, namespace, ALL, num_pages=2) as worker:
        assert worker.connector.restore(truth.hashes, [1, 0]).wait(10) == 2
        assert worker.holds(truth, [1, 0])


def test_staging_that_does_not_come_free_ends_the_transfer(service: Service) -> None:
    namespace, truth = stored(service, "staging-timeout")
    staging = StagingOptions(buffer_bytes=1, buffers=1, timeout=0.2)
    with (
        L3Client(service.url) as client,
        Worker(client, namespace, ALL, num_pages=PAGES, staging=staging) as worker,
        worker.connector._staging.acquire() as _held,
    ):
        transfer = worker.connector.restore(truth.hashes, range(PAGES))
        assert transfer.wait(10) == 0
        assert worker.connector.failures == {"StagingTimeoutError": 1}
        other = worker.connector.backup([f"{i:064x}" for i in range(2)], [0, 1])
        assert other.wait(10) == 0
        _held.release()
        assert worker.connector.restore(truth.hashes, range(PAGES)).wait(10) == PAGES


def test_close_ends_transfers_that_are_under_way_and_those_that_wait(service: Service) -> None:
    """The first restore is stuck in a read, three wait behind it, a backup waits for an event that never comes."""
    namespace, truth = stored(service, "close")
    stuck = threading.Event()
    release = threading.Event()

    def wait_at_gate(_count: int, _head: str) -> None:
        stuck.set()
        release.wait(20)

    with Proxy(service, on_request=wait_at_gate) as proxy, L3Client(proxy.url, timeouts=QUICK) as client:
        worker = Worker(client, namespace, ALL, num_pages=PAGES)
        restores = [worker.connector.restore(truth.hashes, range(PAGES)) for _ in range(4)]
        backup = worker.connector.backup([f"{i:064x}" for i in range(2)], [0, 1], after=CPUEvent())
        assert stuck.wait(10)
        began = time.monotonic()
        worker.connector.close()
        assert time.monotonic() - began < 8
        assert [transfer.wait(0) for transfer in (*restores, backup)] == [0] * 5
        assert all(transfer.done for transfer in (*restores, backup))
        assert all(isinstance(transfer.error, (StreamClosedError, TransportError)) for transfer in restores)
        release.set()
    assert worker.untouched(range(PAGES))


def test_a_closed_connector_answers_and_does_nothing(reader: tuple[Worker, Truth]) -> None:
    worker, truth = reader
    worker.connector.close()
    worker.connector.close()
    for transfer in (
        worker.connector.restore(truth.hashes, range(PAGES)),
        worker.connector.backup(truth.hashes, range(PAGES)),
        worker.connector.backup(truth.hashes, range(PAGES), after=CPUEvent()),
    ):
        assert (transfer.done, transfer.wait()) == (True, 0)
        assert isinstance(transfer.error, StreamClosedError)
    assert worker.untouched(range(PAGES))


def test_a_closed_client_is_no_hit(reader: tuple[Worker, Truth]) -> None:
    worker, truth = reader
    worker.connector._client.close()
    assert worker.connector.match(truth.hashes) == 0
    transfer = worker.connector.restore(truth.hashes, range(PAGES))
    assert transfer.wait(10) == 0
    assert isinstance(transfer.error, ConnectError)


def test_a_service_that_hangs_is_no_hit_and_no_hang() -> None:
    namespace = model("hangs")
    truth = Truth(namespace, "hangs", 2)
    timeouts = Timeouts(connect=0.3, read=0.3, write=0.3, pool=0.3)
    with (
        ScriptedServer(lambda connection, _: hold(connection)) as server,
        L3Client(server.url, timeouts=timeouts) as client,
        Worker(client, namespace, ALL, num_pages=2) as worker,
    ):
        began = time.monotonic()
        assert worker.connector.match(truth.hashes) == 0
        assert worker.connector.restore(truth.hashes, [0, 1]).wait(10) == 0
        assert worker.connector.backup(truth.hashes, [0, 1]).wait(10) == 0
        assert time.monotonic() - began < 5
        assert worker.connector.failures == {"TimeoutExpiredError": 3}


def test_four_threads_back_up_and_restore_over_one_connector(service: Service) -> None:
    namespace = model("threads")
    truth = Truth(namespace, "threads", PAGES)
    found: dict[int, list[int]] = {}
    staging = StagingOptions(buffer_bytes=1, buffers=2, timeout=20)
    with (
        L3Client(service.url) as client,
        Worker(client, namespace, ALL, num_pages=4 * PAGES, staging=staging) as worker,
    ):
        worker.connector.attach()
        worker.fill(truth, range(PAGES))

        def work(thread: int) -> None:
            mine = range(thread * PAGES, (thread + 1) * PAGES)
            stored = worker.connector.backup(truth.hashes, range(PAGES)).wait(30)
            matched = worker.connector.match(truth.hashes)
            restored = [worker.connector.restore(truth.hashes, mine).wait(30) for _ in range(3 if thread else 0)]
            found[thread] = [stored, matched, *restored]

        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
        for running in threads:
            running.start()
        for running in threads:
            running.join(60)
        assert found == {0: [PAGES] * 2, **dict.fromkeys(range(1, 4), [PAGES] * 5)}
        for thread in range(4):
            assert worker.holds(truth, range(thread * PAGES, (thread + 1) * PAGES))
        assert not worker.connector.failures
        wait_for(lambda: not worker.connector._lanes.under_way)
        assert worker.connector._staging.stats().in_use == 0


def test_every_transfer_is_forgotten_at_its_end(reader: tuple[Worker, Truth]) -> None:
    worker, truth = reader
    transfers: list[Transfer] = [worker.connector.restore(truth.hashes, range(PAGES)) for _ in range(5)]
    assert [transfer.wait(30) for transfer in transfers] == [PAGES] * 5
    wait_for(lambda: not worker.connector._lanes.under_way)


def test_an_answer_that_no_parser_can_take_is_no_hit() -> None:
    namespace = model("deep")
    truth = Truth(namespace, "deep", 2)

    def deep(connection: socket.socket, _number: int) -> None:
        while True:
            read_request(connection)
            connection.sendall(answer("200 OK", b'{"pages":' + b"[" * 200_000, "Content-Type: application/json"))

    with (
        ScriptedServer(deep) as server,
        L3Client(server.url, timeouts=QUICK) as client,
        Worker(client, namespace, ALL, num_pages=2) as worker,
    ):
        assert worker.connector.match(truth.hashes) == 0
        assert worker.connector.backup(truth.hashes, [0, 1]).wait(10) == 0
        assert worker.connector.failures == {"ProtocolError": 2}


def test_whatever_a_match_meets_is_counted_and_no_hit(
    reader: tuple[Worker, Truth], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, truth = reader

    def bug(*_: object) -> int:
        raise KeyError("a bug of ours")

    monkeypatch.setattr(worker.connector._client.control, "match", bug)
    assert worker.connector.match(truth.hashes) == 0
    assert worker.connector.failures == {"KeyError": 1}


def test_a_service_that_does_not_answer_is_left_alone_for_a_while() -> None:
    namespace = model("back-off")
    truth = Truth(namespace, "back-off", 2)
    healthy = threading.Event()

    def script(connection: socket.socket, _number: int) -> None:
        read_request(connection)
        if healthy.is_set():
            connection.sendall(answer("200 OK", b'{"pages": 2}'))

    with (
        ScriptedServer(script) as server,
        L3Client(server.url, timeouts=QUICK) as client,
        Worker(client, namespace, ALL, num_pages=2, back_off=BackOff(failures=2, first=1)) as worker,
    ):
        now = [0.0]
        worker.connector._breaker._clock = lambda: now[0]
        assert [worker.connector.match(truth.hashes) for _ in range(2)] == [0, 0]
        asked = server.accepted
        healthy.set()
        assert worker.connector.match(truth.hashes) == 0
        for transfer in (
            worker.connector.restore(truth.hashes, [0, 1]),
            worker.connector.backup(truth.hashes, [0, 1]),
        ):
            assert (transfer.done, transfer.wait()) == (True, 0)
            assert isinstance(transfer.error, BackOffError)
        assert server.accepted == asked
        assert worker.connector.failures["BackOffError"] == 3
        now[0] += 1.01
        assert [worker.connector.match(truth.hashes) for _ in range(2)] == [2, 2]


def test_a_service_that_forgot_the_namespace_is_told_again(own: Service) -> None:
    namespace = model("forgot")
    truth = Truth(namespace, "forgot", 3)
    with (
        L3Client(own.url, timeouts=QUICK) as client,
        Worker(client, namespace, ALL, num_pages=3) as worker,
        httpx.Client(base_url=own.url, trust_env=False) as plain,
    ):
        worker.connector.attach({"engine": "tests"})
        worker.fill(truth, range(3))
        assert plain.delete(f"/v1/namespaces/{namespace.digest}").is_success
        assert worker.connector.match(truth.hashes) == 0
        assert worker.connector.backup(truth.hashes, range(3)).wait(20) == 3
        assert worker.connector.match(truth.hashes) == 3
        assert plain.get(f"/v1/namespaces/{namespace.digest}").json()["labels"] == [{"engine": "tests"}]


def test_what_the_service_did_not_take_is_the_transfers_error(
    start_service: Callable[..., Service], tmp_path: Path
) -> None:
    namespace = model("why")
    service = start_service(tmp_path / "data", "--capacity", str(namespace.shape().page_bytes // 4))
    truth = Truth(namespace, "why", 4)
    with L3Client(service.url) as client, Worker(client, namespace, ALL, num_pages=4) as worker:
        worker.connector.attach()
        transfer = worker.connector.backup(truth.hashes, range(4))
        assert transfer.wait(30) < 4
        assert isinstance(transfer.error, L3Error)
        assert transfer.error.detail


def test_attach_refuses_objects_that_the_service_will_never_take(
    reader: tuple[Worker, Truth], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, truth = reader
    size = worker.connector.plan.objects[0].span.length
    limits = {"max_object_bytes": size - 1}
    control = worker.connector._client.control
    monkeypatch.setattr(control, "version", lambda: {"limits": limits})
    with pytest.raises(TooLargeError, match=rf"have {size} bytes, and http.* takes {size - 1} at most"):
        worker.connector.attach()
    limits["max_object_bytes"] = size
    worker.connector.attach()
    monkeypatch.setattr(control, "version", lambda: {"limits": {"max_object_bytes": 1}})
    with Worker(worker.connector._client, truth.namespace, ALL, num_pages=1, read_only=True) as other:
        other.connector.attach()  # what it never writes is no matter


def test_two_restores_are_under_way_at_once(service: Service) -> None:
    namespace, truth = stored(service, "two-at-once")
    both = threading.Barrier(2)

    def meet(count: int, _head: str) -> None:
        if count < 2:
            both.wait(10)

    with (
        Proxy(service, on_request=meet) as proxy,
        L3Client(proxy.url) as client,
        Worker(client, namespace, ALL, num_pages=2 * PAGES) as worker,
    ):
        ids = [range(PAGES), range(PAGES, 2 * PAGES)]
        restores = [worker.connector.restore(truth.hashes, pages) for pages in ids]
        assert [transfer.wait(20) for transfer in restores] == [PAGES] * 2
        assert all(worker.holds(truth, pages) for pages in ids)


def typed(dtype: torch.dtype) -> MHAPool:
    shape = model("dtypes").shape()
    dim = shape.row_bytes[0] // dtype.itemsize
    tensors = [torch.zeros(shape.page_size, 4, dim, dtype=dtype) for _ in range(2 * LAYERS)]
    return MHAPool(tensors[:LAYERS], tensors[LAYERS:], page_size=shape.page_size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.int8])
def test_a_pool_of_the_namespaces_dtype_or_of_bytes_is_taken(dtype: torch.dtype) -> None:
    with L3Client("http://127.0.0.1:9") as client, Connector(client, model("dtypes"), ALL, typed(dtype)):
        pass


def test_a_pool_of_another_dtype_is_refused() -> None:
    """Its bytes would fit, and mean something else."""
    with (
        L3Client("http://127.0.0.1:9") as client,
        pytest.raises(ValueError, match="tensors are float16 and the namespace says dtype bfloat16"),
    ):
        Connector(client, model("dtypes"), ALL, typed(torch.float16))
