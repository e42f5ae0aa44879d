"""The transport against the real service: every byte in its place, none beyond, sums verified, damage reported."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from l3client.transport import Body, L3Client, Order, PagesRead, Part, Written
from l3store.errors import (
    ConflictError,
    CorruptError,
    L3Error,
    MissError,
    RefusedError,
    TooLargeError,
    UnknownNamespaceError,
)
from l3store.layout import Coordinate, Key, Namespace, Range, parse_key
from l3store.layout.sums import encode_sums, sum_cells
from tests.client_support import ScriptedServer, Truth, answer, read_request, revive
from tests.support import Service, tiny

CANARY = 0xEE
ORDERS = list(Order)


@pytest.fixture
def l3(service: Service) -> Iterator[L3Client]:
    with L3Client(service.url) as client:
        yield client


class Room:
    """Views for pages, apart from each other, with canaries between and around them."""

    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self.block = bytearray([CANARY]) * (count * (size + 64) + 64)
        self.starts = [64 + i * (size + 64) for i in range(count)]
        self.views = [memoryview(self.block)[start : start + size] for start in self.starts]

    def page(self, index: int) -> bytes:
        return bytes(self.views[index])

    def check(self, used: int) -> None:
        """Nothing but the first ``used`` views was written to."""
        inside = {i for start in self.starts[:used] for i in range(start, start + self.size)}
        assert all(byte == CANARY for i, byte in enumerate(self.block) if i not in inside)


def key(truth: Truth, page: int, first: int, end: int, group: int | None) -> Key:
    return Key(truth.hashes[page], truth.namespace.digest, Coordinate(first, end, group))


def store(client: L3Client, truth: Truth, pages: range, cuts: list[tuple[int, int]]) -> list[Written]:
    """Write pages whole, their layers cut as said."""
    namespace = truth.namespace
    client.register(namespace)
    mla = namespace.fields.rank_replicated
    bodies = [
        Body(key(truth, page, a, b, None if mla else group), memoryview(truth.object(page, a, b, group)))
        for page in pages
        for a, b in cuts
        for group in range(namespace.num_groups)
    ]
    return client.write_pages(bodies, cell_bytes=namespace.cell_bytes)


def expected(truth: Truth, page: int, layers: Range, groups: Range) -> bytes:
    return b"".join(truth.object(page, layers.start, layers.end, group) for group in groups)


MODELS = {
    "gqa": tiny("client/gqa"),
    "mla": tiny("client/mla", heads=0),
    "v narrower": tiny("client/v", v_head_dim=2),
    "packed rows": tiny("client/packed", dtype="float8_e4m3fn", itemsize=1, row_bytes=7),
}


@pytest.fixture(params=list(MODELS))
def namespace(request: pytest.FixtureRequest) -> Namespace:
    return MODELS[request.param]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("asked", [1, 5, 90])
def test_pages_land_in_the_callers_memory_and_nowhere_else(
    l3: L3Client, namespace: Namespace, order: Order, asked: int
) -> None:
    """90 pages of 6 layers are more views than one system call takes."""
    truth = Truth(namespace, f"land-{order}-{asked}", asked + 2)
    present = asked - asked // 3
    assert all(w.error is None and w.created for w in store(l3, truth, range(present), [(0, 3), (3, 6)]))
    store(l3, truth, range(present + 1, asked + 2), [(0, 6)])  # beyond a gap
    shape = namespace.shape()
    room = Room(asked, shape.page_bytes)
    part = Part(namespace.digest, namespace.layers, namespace.heads)
    got = l3.read_pages(part, truth.hashes[:asked], shape, room.views, order=order)
    assert got == PagesRead(present, present)
    for page in range(present):
        assert room.page(page) == expected(truth, page, namespace.layers, Range(0, namespace.num_groups))
    room.check(present)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layers", [Range(0, 1), Range(2, 5), Range(1, 6)])
def test_a_part_of_pages_that_were_cut_otherwise(
    l3: L3Client, namespace: Namespace, order: Order, layers: Range
) -> None:
    truth = Truth(namespace, f"part-{order}-{layers}", 3)
    for page, cuts in enumerate([[(0, 6)], [(0, 3), (3, 6)], [(0, 1), (1, 4), (3, 6)]]):
        store(l3, truth, range(page, page + 1), cuts)
    groups = Range(0, 1) if namespace.fields.rank_replicated else Range(1, 2)
    heads = None if namespace.fields.rank_replicated else Range(2, 4)
    shape = namespace.shape(layers=layers, groups=groups)
    room = Room(3, shape.page_bytes)
    got = l3.read_pages(Part(namespace.digest, layers, heads), truth.hashes, shape, room.views, order=order)
    assert got == PagesRead(3, 3)
    assert [room.page(i) for i in range(3)] == [expected(truth, i, layers, groups) for i in range(3)]
    room.check(3)


@pytest.mark.parametrize("order", ORDERS)
def test_nothing_stored_is_no_page_and_no_byte(l3: L3Client, namespace: Namespace, order: Order) -> None:
    truth = Truth(namespace, "nothing", 4)
    l3.register(namespace)
    shape = namespace.shape()
    room = Room(4, shape.page_bytes)
    part = Part(namespace.digest, namespace.layers, namespace.heads)
    assert l3.read_pages(part, truth.hashes, shape, room.views, order=order) == PagesRead(0, 0)
    assert l3.read_pages(part, [], shape, [], order=order) == PagesRead(0, 0)
    room.check(0)
    assert l3.write_pages([], cell_bytes=namespace.cell_bytes) == []
    assert l3.control.match(part, []) == 0
    assert l3.control.missing(part, []) == []


def test_an_object_goes_there_and_back(l3: L3Client, namespace: Namespace) -> None:
    truth = Truth(namespace, "object", 1)
    l3.register(namespace)
    group = None if namespace.fields.rank_replicated else 1
    name = key(truth, 0, 1, 4, group)
    data = truth.object(0, 1, 4, group or 0)
    assert l3.put(name, memoryview(data), cell_bytes=namespace.cell_bytes) is True
    assert l3.put(name, memoryview(data), cell_bytes=namespace.cell_bytes) is False
    room = Room(1, len(data))
    l3.get(name, room.views[0], cell_bytes=namespace.cell_bytes)
    assert room.page(0) == data
    room.check(1)
    inner = bytearray(namespace.cell_bytes)
    l3.get(key(truth, 0, 2, 3, group), memoryview(inner), cell_bytes=namespace.cell_bytes)
    assert inner == truth.object(0, 2, 3, group or 0)


def test_memory_of_another_type_is_sent_and_received_as_its_bytes(l3: L3Client) -> None:
    namespace = tiny("client/float", dtype="float32", itemsize=4)
    truth = Truth(namespace, "float", 2)
    l3.register(namespace)
    data = truth.object(0, 0, 6, 0)
    words = memoryview(bytearray(data)).cast("i")
    assert l3.put(key(truth, 0, 0, 6, 0), words, cell_bytes=namespace.cell_bytes)
    [written] = l3.write_pages([Body(key(truth, 1, 0, 6, 0), words)], cell_bytes=namespace.cell_bytes)
    assert written == Written(str(key(truth, 1, 0, 6, 0)), created=True)
    into = memoryview(bytearray(len(data))).cast("i")
    l3.get(key(truth, 1, 0, 6, 0), into, cell_bytes=namespace.cell_bytes)
    assert into.tobytes() == data


def test_many_bodies_at_once_and_what_became_of_each(l3: L3Client) -> None:
    namespace = tiny("client/many", layers=4, partition=1)
    truth = Truth(namespace, "many", 120)
    cuts = [(i, i + 1) for i in range(4)]
    first = store(l3, truth, range(120), cuts)
    assert len(first) == 960
    assert all(written.created and written.error is None for written in first)
    again = store(l3, truth, range(120), cuts)
    assert [w.key for w in again] == [w.key for w in first]
    assert not any(written.created or written.error for written in again)


def test_a_body_that_is_refused_leaves_the_others_stored(l3: L3Client) -> None:
    namespace = tiny("client/refused")
    truth = Truth(namespace, "refused", 2)
    l3.register(namespace)
    good, beyond = key(truth, 0, 0, 3, 0), key(truth, 0, 4, 7, 0)
    data = truth.object(0, 0, 3, 0)
    written = l3.write_pages(
        [Body(beyond, memoryview(data)), Body(good, memoryview(data))], cell_bytes=namespace.cell_bytes
    )
    assert [w.created for w in written] == [False, True]
    assert "beyond the model's 6 layers" in (written[0].error or "")
    assert written[1].error is None


def test_what_the_service_refuses_is_raised_as_what_it_is(l3: L3Client) -> None:
    namespace = tiny("client/errors")
    truth = Truth(namespace, "errors", 1)
    name = key(truth, 0, 0, 1, 0)
    data = memoryview(truth.object(0, 0, 1, 0))
    with pytest.raises(UnknownNamespaceError, match="is not registered"):
        l3.put(name, data, cell_bytes=namespace.cell_bytes)
    l3.register(namespace)
    with pytest.raises(MissError) as missed:
        l3.get(name, memoryview(bytearray(len(data))), cell_bytes=namespace.cell_bytes)
    assert type(missed.value) is MissError
    with pytest.raises(RefusedError):
        l3.put(key(truth, 0, 5, 7, 0), data, cell_bytes=namespace.cell_bytes)
    other = tiny("client/errors", layers=7)
    with pytest.raises(ConflictError, match="num_layers"):
        l3.register(other)
    with pytest.raises(MissError):
        l3.control.delete(name)
    part = Part(namespace.digest, Range(0, 6), Range(1, 3))
    with pytest.raises(RefusedError, match=r"ask for heads \[0, 4\)"):
        l3.control.match(part, truth.hashes)


def test_a_body_beyond_the_limit_is_too_large_although_it_was_being_sent(l3: L3Client) -> None:
    """The service refuses before it received the body, while we send it."""
    limit = l3.control.version()["limits"]["max_object_bytes"]
    namespace = tiny("client/large", layers=512, partition=0, head_group=4, page_size=1024, head_dim=128)
    truth = Truth(tiny("client/large-hash"), "large", 1)
    l3.register(namespace)
    size = namespace.cell_bytes * 512
    assert size > limit
    body = memoryview(bytearray(size))
    big = Key(truth.hashes[0], namespace.digest, Coordinate(0, 512, 0))
    with pytest.raises(TooLargeError, match=str(limit)):
        l3.put(big, body, cell_bytes=size)


def quarantined(service: Service, namespace: Namespace) -> list[Key]:
    names = [path.name.rpartition(".")[0] for path in service.files("quarantine")]
    return [key for key in map(parse_key, names) if key.digest == namespace.digest]


def flip(service: Service, name: Key, *offsets: int) -> None:
    [path] = [path for path in service.files() if path.name == str(name)]
    data = bytearray(path.read_bytes())
    for offset in offsets:
        data[offset] ^= 1
    path.write_bytes(data)


def test_a_flipped_byte_of_an_object_is_corrupt_reported_quarantined_and_then_a_miss(
    service: Service, l3: L3Client
) -> None:
    namespace = tiny("client/flip")
    truth = Truth(namespace, "flip", 2)
    store(l3, truth, range(2), [(0, 3), (3, 6)])
    name = key(truth, 0, 3, 6, 1)
    flip(service, name, namespace.cell_bytes + 3)
    room = Room(1, 3 * namespace.cell_bytes)
    with pytest.raises(CorruptError) as raised:
        l3.get(name, room.views[0], cell_bytes=namespace.cell_bytes)
    assert raised.value.members["keys"] == [str(key(truth, 0, 4, 5, 1))]
    room.check(1)
    assert l3.failed_reports == 0
    assert quarantined(service, namespace) == [name]
    with pytest.raises(MissError) as missed:
        l3.get(name, room.views[0], cell_bytes=namespace.cell_bytes)
    assert type(missed.value) is MissError


@pytest.mark.parametrize("order", ORDERS)
def test_flipped_bytes_of_pages_end_the_good_ones(service: Service, l3: L3Client, order: Order) -> None:
    namespace = tiny(f"client/flip-{order}")
    truth = Truth(namespace, "flips", 6)
    store(l3, truth, range(6), [(0, 3), (3, 6)])
    damaged = key(truth, 4, 0, 3, 0), key(truth, 2, 3, 6, 1)
    flip(service, damaged[0], 0)
    flip(service, damaged[1], 0, namespace.cell_bytes)
    shape = namespace.shape()
    room = Room(6, shape.page_bytes)
    part = Part(namespace.digest, namespace.layers, namespace.heads)
    got = l3.read_pages(part, truth.hashes, shape, room.views, order=order)
    assert (got.present, got.good) == (6, 2)
    assert set(got.corrupt) == {key(truth, 4, 0, 1, 0), key(truth, 2, 3, 4, 1), key(truth, 2, 4, 5, 1)}
    assert [room.page(i) for i in range(2)] == [expected(truth, i, Range(0, 6), Range(0, 2)) for i in range(2)]
    # Both were reported: neither is served any more.
    assert l3.failed_reports == 0
    assert set(quarantined(service, namespace)) == set(damaged)
    assert l3.control.match(part, truth.hashes) == 2
    assert l3.read_pages(part, truth.hashes, shape, room.views, order=order) == PagesRead(2, 2)
    assert l3.control.missing(part, truth.hashes) == [(2, damaged[1].coordinate), (4, damaged[0].coordinate)]


def test_a_damaged_object_of_many_cells_is_reported_once(service: Service, l3: L3Client) -> None:
    namespace = tiny("client/once", layers=40, partition=0)
    truth = Truth(namespace, "once", 2)
    store(l3, truth, range(2), [(0, 40)])
    [first, second] = [key(truth, page, 0, 40, 0) for page in range(2)]
    flip(service, first, *range(0, 40 * namespace.cell_bytes, namespace.cell_bytes))
    flip(service, second, 0)
    shape = namespace.shape()
    part = Part(namespace.digest, namespace.layers, namespace.heads)
    got = l3.read_pages(part, truth.hashes, shape, Room(2, shape.page_bytes).views, order=Order.PAGE)
    assert (got.good, len(got.corrupt), l3.failed_reports) == (0, 41, 0)
    assert set(quarantined(service, namespace)) == {first, second}


@pytest.mark.parametrize("order", ORDERS)
def test_a_page_lost_while_it_is_being_sent_ends_the_answer_before_it(
    service: Service, l3: L3Client, order: Order
) -> None:
    """The answer is longer than what the service reads before it begins: it breaks off, and is asked for once more."""
    namespace = tiny(f"client/lost-{order}", page_size=64, head_dim=128)
    truth = Truth(namespace, "lost", 14)
    store(l3, truth, range(14), [(0, 3), (3, 6)])
    lost = key(truth, 12, 3, 6, 1)
    [path] = [path for path in service.files() if path.name == str(lost)]
    path.unlink()
    shape = namespace.shape()
    room = Room(14, shape.page_bytes)
    part = Part(namespace.digest, namespace.layers, namespace.heads)
    assert l3.control.match(part, truth.hashes) == 14
    assert l3.read_pages(part, truth.hashes, shape, room.views, order=order) == PagesRead(12, 12)
    assert [room.page(i) for i in range(12)] == [expected(truth, i, Range(0, 6), Range(0, 2)) for i in range(12)]
    assert l3.control.match(part, truth.hashes) == 12


def test_bytes_damaged_on_the_way_are_corrupt_and_the_stored_ones_stay(l3: L3Client, service: Service) -> None:
    """The service checks its own copy, finds it sound, and goes on serving it."""
    namespace = tiny("client/way")
    truth = Truth(namespace, "way", 1)
    store(l3, truth, range(1), [(0, 6)])
    name = key(truth, 0, 0, 6, 0)
    data = bytearray(6 * namespace.cell_bytes)

    def script(connection: socket.socket, _number: int) -> None:
        while True:
            head, body = read_request(connection)
            with socket.create_connection(service.address) as upstream:
                upstream.sendall(f"{head}\r\nConnection: close\r\n\r\n".encode() + body)
                reply = b"".join(iter(lambda: upstream.recv(1 << 16), b""))
            if head.startswith("GET /v1/objects"):
                reply = reply[:-1] + bytes([reply[-1] ^ 1])
            connection.sendall(reply)

    with ScriptedServer(script) as proxy, L3Client(proxy.url) as damaged:
        with pytest.raises(CorruptError):
            damaged.get(name, memoryview(data), cell_bytes=namespace.cell_bytes)
        assert damaged.failed_reports == 0
    l3.get(name, memoryview(data), cell_bytes=namespace.cell_bytes)
    assert data == truth.object(0, 0, 6, 0)


def test_a_report_that_fails_changes_nothing(l3: L3Client) -> None:
    namespace = tiny("client/report")
    truth = Truth(namespace, "report", 1)
    name = key(truth, 0, 0, 1, 0)

    def script(connection: socket.socket, _number: int) -> None:
        head, _ = read_request(connection)
        if head.startswith("POST"):
            connection.sendall(answer("503 Busy"))
        else:
            connection.sendall(answer("200 OK", bytes(namespace.cell_bytes), "L3-Sums: AAAAAAAAAAA="))

    with ScriptedServer(script) as server, L3Client(server.url) as client:
        with pytest.raises(CorruptError):
            client.get(name, memoryview(bytearray(namespace.cell_bytes)), cell_bytes=namespace.cell_bytes)
        assert client.failed_reports == 1


@pytest.mark.parametrize("order", ORDERS)
def test_who_verifies_by_himself_gets_the_bytes_as_they_are(service: Service, l3: L3Client, order: Order) -> None:
    """Damage is neither found nor reported, and the service is asked for the same things as by others."""
    namespace = tiny(f"client/unverified-{order}")
    truth = Truth(namespace, "unverified", 3)
    with L3Client(service.url, verify=False) as client:
        store(client, truth, range(3), [(0, 3), (3, 6)])
        name = key(truth, 1, 0, 3, 0)
        flip(service, name, 5)
        damaged = bytearray(truth.object(1, 0, 3, 0))
        damaged[5] ^= 1
        into = bytearray(len(damaged))
        client.get(name, memoryview(into), cell_bytes=namespace.cell_bytes)
        assert into == damaged
        shape = namespace.shape()
        part = Part(namespace.digest, namespace.layers, namespace.heads)
        room = Room(3, shape.page_bytes)
        assert client.read_pages(part, truth.hashes, shape, room.views, order=order) == PagesRead(3, 3)
        assert room.page(1)[: len(damaged)] == damaged
        assert [room.page(i) for i in (0, 2)] == [expected(truth, i, Range(0, 6), Range(0, 2)) for i in (0, 2)]
        room.check(3)
    assert quarantined(service, namespace) == []
    with pytest.raises(CorruptError):
        l3.get(name, memoryview(into), cell_bytes=namespace.cell_bytes)


def test_who_verifies_by_himself_sends_and_asks_for_sums_all_the_same() -> None:
    """Without them, the service would verify what it sends, and make sums of what it gets."""
    namespace = tiny("client/asks")
    truth = Truth(namespace, "asks", 1)
    name = key(truth, 0, 0, 1, 0)
    data = memoryview(truth.object(0, 0, 1, 0))
    requests: list[tuple[str, bytes]] = []

    def script(connection: socket.socket, _number: int) -> None:
        while True:
            requests.append(read_request(connection))
            connection.sendall(answer("404 Not Found"))

    with ScriptedServer(script) as server, L3Client(server.url, verify=False) as client:
        shape = namespace.shape()
        part = Part(namespace.digest, namespace.layers, namespace.heads)
        with pytest.raises(MissError):
            client.put(name, data, cell_bytes=len(data))
        with pytest.raises(MissError):
            client.write_pages([Body(name, data)], cell_bytes=len(data))
        with pytest.raises(MissError):
            client.read_pages(part, truth.hashes, shape, Room(1, shape.page_bytes).views, order=Order.PAGE)
    sums = encode_sums(sum_cells(data, len(data)))
    assert f"L3-Sums: {sums}" in requests[0][0]
    assert sums.encode() in requests[1][1]
    assert json.loads(requests[2][1])["sums"] is True


def test_room_that_is_not_whole_cells_is_refused(l3: L3Client) -> None:
    truth = Truth(tiny("client/whole"), "whole", 1)
    with pytest.raises(ValueError, match="not whole cells of 8"):
        l3.get(key(truth, 0, 0, 1, 0), memoryview(bytearray(20)), cell_bytes=8)


def test_wrong_sums_are_refused_by_the_service_and_nothing_is_stored(l3: L3Client) -> None:
    """A writer whose memory changes between the sums and the send stores nothing."""
    namespace = tiny("client/race", page_size=1024, head_dim=128)
    truth = Truth(namespace, "race", 1)
    l3.register(namespace)
    name = key(truth, 0, 0, 6, 0)
    body = bytearray(truth.object(0, 0, 6, 0))

    def encode_then_change(packed: bytes) -> str:
        body[0] ^= 1
        return encode_sums(packed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("l3client.transport.client.encode_sums", encode_then_change)
        [written] = l3.write_pages([Body(name, memoryview(body))], cell_bytes=namespace.cell_bytes)
        assert written.error is not None
        with pytest.raises(RefusedError, match="sums"):
            l3.put(name, memoryview(body), cell_bytes=namespace.cell_bytes)
    with pytest.raises(MissError):
        l3.get(name, memoryview(bytearray(len(body))), cell_bytes=namespace.cell_bytes)


def test_a_restart_between_calls_is_not_noticed(start_service: Callable[..., Service], tmp_path: Path) -> None:
    running = start_service(tmp_path / "data")
    namespace = tiny("client/restart")
    truth = Truth(namespace, "restart", 1)
    into = bytearray(6 * namespace.cell_bytes)
    with L3Client(running.url) as l3:
        store(l3, truth, range(1), [(0, 6)])
        for restarted in (False, True):
            l3.get(key(truth, 0, 0, 6, 1), memoryview(into), cell_bytes=namespace.cell_bytes)
            assert into == truth.object(0, 0, 6, 1)
            assert l3.control.match(Part(namespace.digest, Range(0, 6), Range(0, 4)), truth.hashes) == 1
            if not restarted:
                running.stop()
                revive(running)


def test_sixteen_threads_at_once_each_get_their_own_bytes(service: Service) -> None:
    namespace = tiny("client/threads")
    truth = Truth(namespace, "threads", 16)
    failures: list[str] = []
    shared = L3Client(service.url, connections=4)

    def work(page: int) -> None:
        try:
            mine = [Body(key(truth, page, 0, 6, g), memoryview(truth.object(page, 0, 6, g))) for g in range(2)]
            shape = namespace.shape()
            part = Part(namespace.digest, namespace.layers, namespace.heads)
            if any(w.error for w in shared.write_pages(mine, cell_bytes=namespace.cell_bytes)):
                failures.append(f"write {page}")
            for order in (*ORDERS, *ORDERS):
                room = Room(1, shape.page_bytes)
                shared.read_pages(part, truth.hashes[page : page + 1], shape, room.views, order=order)
                if room.page(0) != expected(truth, page, namespace.layers, Range(0, 2)):
                    failures.append(f"read {page}")
        except L3Error as error:
            failures.append(repr(error))

    with shared:
        shared.register(namespace)
        threads = [threading.Thread(target=work, args=(page,)) for page in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert failures == []
