"""How long the byte path waits: every phase and every call as a whole end in time, and nothing that moves too early."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from l3client.transport import L3Client, Order, Part, Timeouts
from l3store.errors import ConnectError, TimeoutExpiredError
from l3store.layout import Coordinate, Key, Range
from l3store.layout.sums import encode_sums, sum_cells
from tests.client_support import ScriptedServer, answer, hold, read_request
from tests.support import page_hashes, tiny, wait_for

NAMESPACE = tiny("org/patience", layers=4, heads=2, head_group=1, partition=0, page_size=64, head_dim=128)
CELL = NAMESPACE.cell_bytes
SHAPE = NAMESPACE.shape()
HASHES = page_hashes("patience", 8)
PART = Part(NAMESPACE.digest, Range(0, 4), Range(0, 2))
KEY = Key(HASHES[0], NAMESPACE.digest, Coordinate(0, 4, 0))
OBJECT = bytes(range(256)) * (4 * CELL // 256)
SUMS = f"L3-Sums: {encode_sums(sum_cells(OBJECT, CELL))}"
PAGES = len(HASHES) * SHAPE.page_bytes
LARGE = bytes(32 << 20)

SECONDS_LATE = 0.5
"""Of a busy machine."""


def get(client: L3Client) -> None:
    into = bytearray(len(OBJECT))
    client.get(KEY, memoryview(into), cell_bytes=CELL)
    assert into == OBJECT


def get_answer() -> bytes:
    return answer("200 OK", OBJECT, SUMS)


def read(client: L3Client) -> None:
    """Scattered over more views than a system call takes chunks of."""
    views = [memoryview(bytearray(SHAPE.page_bytes)) for _ in HASHES]
    client.read_pages(PART, HASHES, SHAPE, views, order=Order.LAYER)


def read_answer() -> bytes:
    body = bytes(PAGES)
    return answer("200 OK", body + sum_cells(body, CELL), f"L3-Pages: {len(HASHES)}")


def put(client: L3Client) -> None:
    client.put(KEY, memoryview(LARGE), cell_bytes=len(LARGE))


Call = Callable[[L3Client], None]
READS = [(get, get_answer), (read, read_answer)]


@contextlib.contextmanager
def runs_out(phase: str, seconds: float) -> Iterator[None]:
    began = time.monotonic()
    with pytest.raises(TimeoutExpiredError) as raised:
        yield
    assert raised.value.phase == phase
    assert seconds * 0.95 <= time.monotonic() - began < seconds * 1.3 + SECONDS_LATE


def little_room(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)


@pytest.mark.parametrize(("call", "reply"), READS)
@pytest.mark.parametrize("part", [0.3, 0.9])
def test_silence_in_the_middle_of_a_body_ends_after_the_read_timeout(
    call: Call, reply: Callable[[], bytes], part: float
) -> None:
    def script(connection: socket.socket, _number: int) -> None:
        read_request(connection)
        data = reply()
        connection.sendall(data[: int(len(data) * part)])
        hold(connection)

    timeouts = Timeouts(read=0.4)
    with ScriptedServer(script) as server, L3Client(server.url, timeouts=timeouts) as client, runs_out("read", 0.4):
        call(client)


@pytest.mark.parametrize(("call", "reply"), READS)
def test_pauses_shorter_than_the_read_timeout_are_in_time(call: Call, reply: Callable[[], bytes]) -> None:
    def script(connection: socket.socket, _number: int) -> None:
        read_request(connection)
        data = reply()
        size = len(data) // 5 + 1
        for at in range(0, len(data), size):
            time.sleep(0.2)
            connection.sendall(data[at : at + size])

    with ScriptedServer(script) as server, L3Client(server.url, timeouts=Timeouts(read=0.6)) as client:
        began = time.monotonic()
        call(client)
        assert time.monotonic() - began > 0.9


@pytest.mark.parametrize(("call", "reply"), READS)
def test_a_body_that_trickles_ends_with_the_call(call: Call, reply: Callable[[], bytes]) -> None:
    def script(connection: socket.socket, _number: int) -> None:
        read_request(connection)
        data = reply()
        for at in range(0, 200 * 1000, 1000):
            connection.sendall(data[at : at + 1000])
            time.sleep(0.02)

    timeouts = Timeouts(read=0.5, call=0.6, bytes_per_sec=1 << 40)
    with ScriptedServer(script) as server, L3Client(server.url, timeouts=timeouts) as client, runs_out("call", 0.6):
        call(client)


def test_a_large_body_has_time_by_its_size() -> None:
    def script(connection: socket.socket, _number: int) -> None:
        read_request(connection)
        connection.sendall(get_answer()[:2000])
        while True:
            time.sleep(0.05)
            connection.sendall(b"x")

    timeouts = Timeouts(read=5, call=0.2, bytes_per_sec=len(OBJECT))
    with ScriptedServer(script) as server, L3Client(server.url, timeouts=timeouts) as client, runs_out("call", 1.2):
        get(client)


def test_a_service_that_stops_reading_is_a_write_timeout() -> None:
    def script(connection: socket.socket, _number: int) -> None:
        little_room(connection)
        connection.recv(100_000)
        hold(connection)

    timeouts = Timeouts(write=0.4)
    with ScriptedServer(script) as server, L3Client(server.url, timeouts=timeouts) as client, runs_out("write", 0.4):
        put(client)


def test_a_service_that_reads_slowly_is_in_time_until_the_call_ends() -> None:
    def script(connection: socket.socket, _number: int) -> None:
        little_room(connection)
        while connection.recv(200_000):
            time.sleep(0.05)

    timeouts = Timeouts(write=0.3, call=1, bytes_per_sec=1 << 40)
    with ScriptedServer(script) as server, L3Client(server.url, timeouts=timeouts) as client, runs_out("call", 1):
        put(client)


def test_a_call_that_just_made_it_leaves_the_next_one_its_time() -> None:
    def script(connection: socket.socket, _number: int) -> None:
        while True:
            read_request(connection)
            time.sleep(0.5)
            connection.sendall(get_answer())

    timeouts = Timeouts(read=4, write=4, call=0.9)
    with ScriptedServer(script) as server, L3Client(server.url, timeouts=timeouts) as client:
        for _ in range(3):
            get(client)
        assert server.accepted == 1


def test_a_second_try_has_what_is_left_of_the_call() -> None:
    def script(connection: socket.socket, number: int) -> None:
        read_request(connection)
        if number == 0:
            connection.sendall(get_answer())
            read_request(connection)
            time.sleep(0.5)
        else:
            hold(connection)

    with ScriptedServer(script) as server, L3Client(server.url, timeouts=Timeouts(call=0.8)) as client:
        get(client)
        with runs_out("call", 0.8):
            get(client)
        assert server.accepted == 2


@pytest.mark.parametrize("stuck", ["the answer", "the body", "sending"])
def test_closing_the_client_ends_a_call_wherever_it_waits(stuck: str) -> None:
    waits = threading.Event()

    def script(connection: socket.socket, _number: int) -> None:
        little_room(connection)
        if stuck != "sending":
            read_request(connection)
        if stuck == "the body":
            data = read_answer()
            connection.sendall(data[: len(data) // 2])
        waits.set()
        hold(connection)

    failures: list[BaseException] = []

    def work() -> None:
        try:
            (put if stuck == "sending" else read)(client)
        except ConnectError as error:
            failures.append(error)

    with ScriptedServer(script) as server:
        client = L3Client(server.url)  # with timeouts far longer than this test
        thread = threading.Thread(target=work)
        thread.start()
        assert waits.wait(10)
        time.sleep(0.1)
        began = time.monotonic()
        client.close()
        # The answer that breaks off is asked for again, of a client that is closed by then.
        thread.join(5)
        assert not thread.is_alive()
        assert time.monotonic() - began < 1
        assert len(failures) == 1


def test_closing_the_client_ends_the_wait_for_a_connection() -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            get(client)
        except ConnectError as error:
            failures.append(error)

    with ScriptedServer(lambda connection, _: hold(connection)) as server:
        client = L3Client(server.url, connections=1)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        wait_for(lambda: server.accepted == 1)
        time.sleep(0.1)
        client.close()
        for thread in threads:
            thread.join(2)
        assert len(failures) == 4


def test_what_is_asked_for_every_request_does_not_wait_for_transfers() -> None:
    asked = threading.Event()

    def script(connection: socket.socket, _number: int) -> None:
        head, _ = read_request(connection)
        if head.startswith("POST /v1/pages/match"):
            connection.sendall(answer("200 OK", b'{"pages": 2}'))
        else:
            asked.set()
        hold(connection)

    with ScriptedServer(script) as server, L3Client(server.url, connections=1) as client:
        thread = threading.Thread(target=get_quietly, args=(client,))
        thread.start()
        assert asked.wait(10)
        assert client.control.match(PART, HASHES) == 2
        client.close()
        thread.join(5)


def get_quietly(client: L3Client) -> None:
    with contextlib.suppress(ConnectError):
        get(client)
