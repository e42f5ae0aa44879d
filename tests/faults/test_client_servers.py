"""The transport against servers that misbehave: the right error each time, no hang, nothing reported good.

Every server is a real socket that says what no service of ours would say.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable

import pytest

from l3client.transport import Body, L3Client, Order, Part, Timeouts
from l3store.errors import (
    ConflictError,
    ConnectError,
    L3Error,
    MissError,
    ProtocolError,
    RetryError,
    ServiceError,
    TimeoutExpiredError,
    TooLargeError,
    UnknownNamespaceError,
)
from l3store.layout import Coordinate, Key, Range
from l3store.layout.sums import encode_sums, sum_cells
from tests.client_support import PATIENT, SHORT, ScriptedServer, answer, hold, read_request
from tests.support import page_hashes, tiny

NAMESPACE = tiny("org/faults", layers=2, heads=1, head_group=1, partition=0)
CELL = NAMESPACE.cell_bytes
SHAPE = NAMESPACE.shape()
HASHES = page_hashes("faults", 3)
KEY = Key(HASHES[0], NAMESPACE.digest, Coordinate(0, 2, 0))
PART = Part(NAMESPACE.digest, Range(0, 2), Range(0, 1))
OBJECT = bytes(range(256)) * (2 * CELL // 256)
SUMS = f"L3-Sums: {encode_sums(sum_cells(OBJECT, CELL))}"
CANARY = b"\xee" * 64


class Memory:
    """Room for ``size`` bytes between canaries."""

    def __init__(self, size: int) -> None:
        self.block = bytearray(CANARY + b"\0" * size + CANARY)
        self.view = memoryview(self.block)[len(CANARY) : len(CANARY) + size]

    def check(self) -> None:
        assert self.block.startswith(CANARY)
        assert self.block.endswith(CANARY)


def get(client: L3Client) -> None:
    memory = Memory(len(OBJECT))
    try:
        client.get(KEY, memory.view, cell_bytes=CELL)
    finally:
        memory.check()


def put(client: L3Client) -> None:
    client.put(KEY, memoryview(OBJECT), cell_bytes=CELL)


def read(client: L3Client) -> None:
    memory = Memory(3 * SHAPE.page_bytes)
    views = [memory.view[i * SHAPE.page_bytes : (i + 1) * SHAPE.page_bytes] for i in range(3)]
    try:
        client.read_pages(PART, HASHES, SHAPE, views, order=Order.LAYER)
    finally:
        memory.check()


def write(client: L3Client) -> None:
    client.write_pages([Body(KEY, memoryview(OBJECT))], cell_bytes=CELL)


def match(client: L3Client) -> None:
    client.control.match(PART, HASHES)


def missing(client: L3Client) -> None:
    client.control.missing(PART, HASHES)


ON_THE_BYTE_PATH = [get, put, read, write]
EVERY_CALL = [*ON_THE_BYTE_PATH, match, missing]

Call = Callable[[L3Client], None]


def always(reply: bytes) -> ScriptedServer:
    """Answers every request with the same bytes, and closes."""

    def script(connection: socket.socket, _number: int) -> None:
        read_request(connection)
        connection.sendall(reply)
        connection.shutdown(socket.SHUT_WR)
        hold(connection)

    return ScriptedServer(script)


def ask(reply: bytes, call: Call) -> L3Error:
    """The error that a call raises when the server answers this. Any other exception fails the test."""
    with always(reply) as server, L3Client(server.url, timeouts=PATIENT) as client, pytest.raises(L3Error) as raised:
        call(client)
    return raised.value


GARBAGE = {
    "not HTTP": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "no status": b"HTTP/1.1\r\n\r\n",
    "a status of letters": b"HTTP/1.1 abc OK\r\nContent-Length: 0\r\n\r\n",
    "a status of four digits": b"HTTP/1.1 2000 OK\r\nContent-Length: 0\r\n\r\n",
    "a status of superscripts": "HTTP/1.1 ²²² OK\r\nContent-Length: 0\r\n\r\n".encode("latin-1"),
    "HTTP/2": b"HTTP/2 200\r\nContent-Length: 0\r\n\r\n",
    "binary": bytes(range(256)) + b"\r\n\r\n",
}


@pytest.mark.parametrize("reply", GARBAGE.values(), ids=GARBAGE.keys())
@pytest.mark.parametrize("call", ON_THE_BYTE_PATH)
def test_what_is_not_http_is_a_protocol_error(call: Call, reply: bytes) -> None:
    assert type(ask(reply, call)) is ProtocolError


LENGTHS = {
    "of letters": "Content-Length: ten",
    "of superscripts": "Content-Length: ²",
    "negative": "Content-Length: -1",
    "of 5,000 digits": f"Content-Length: {'9' * 5000}",
    "beyond all memory": "Content-Length: 999999999999999999",
    "twice, differing": "Content-Length: 4\r\nContent-Length: 5",
    "and chunked": f"Content-Length: {len(OBJECT)}\r\nTransfer-Encoding: chunked",
}


@pytest.mark.parametrize("line", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("call", ON_THE_BYTE_PATH)
def test_a_content_length_that_cannot_be_is_a_protocol_error(call: Call, line: str) -> None:
    head = f"HTTP/1.1 200 OK\r\n{line}\r\nL3-Pages: 3\r\n{SUMS}\r\n\r\n".encode("latin-1")
    assert type(ask(head, call)) is ProtocolError


@pytest.mark.parametrize("call", [get, read])
@pytest.mark.parametrize("wrong", [-1, 1, -len(OBJECT)])
def test_a_body_of_another_length_than_asked_is_a_protocol_error(call: Call, wrong: int) -> None:
    body = (OBJECT * 3)[: len(OBJECT) + wrong]
    assert type(ask(answer("200 OK", body, SUMS, "L3-Pages: 3"), call)) is ProtocolError


@pytest.mark.parametrize("call", EVERY_CALL)
def test_a_chunked_answer_is_never_taken_for_bytes(call: Call) -> None:
    body = b"4\r\nabcd\r\n0\r\n\r\n"
    error = ask(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nL3-Pages: 3\r\n\r\n" + body, call)
    assert type(error) is ProtocolError


@pytest.mark.parametrize("call", ON_THE_BYTE_PATH)
def test_http_1_0_is_a_protocol_error(call: Call) -> None:
    reply = answer("200 OK", OBJECT, SUMS).replace(b"HTTP/1.1", b"HTTP/1.0")
    assert type(ask(reply, call)) is ProtocolError


@pytest.mark.parametrize("status", ["204 No Content", "206 Partial Content", "302 Found", "304 Not Modified"])
@pytest.mark.parametrize("call", ON_THE_BYTE_PATH)
def test_a_status_that_the_wire_does_not_have_is_no_success(call: Call, status: str) -> None:
    """A proxy that redirects must not make a writer believe that its object is stored."""
    assert type(ask(answer(status, b"", "Location: http://elsewhere/"), call)) is ProtocolError


@pytest.mark.parametrize("call", EVERY_CALL)
@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 200 OK\r\nContent-Le"], ids=["nothing", "half a head"])
def test_an_end_instead_of_an_answer_is_a_connect_error(call: Call, reply: bytes) -> None:
    assert type(ask(reply, call)) is ConnectError


@pytest.mark.parametrize("call", ON_THE_BYTE_PATH)
def test_a_head_without_end_is_given_up(call: Call) -> None:
    def endless(connection: socket.socket, _number: int) -> None:
        read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\n")
        while True:
            connection.sendall(b"X-More: and more\r\n" * 1000)

    with ScriptedServer(endless) as server, L3Client(server.url, timeouts=PATIENT) as client:
        with pytest.raises(ProtocolError) as error:
            call(client)
        assert "head of more than 65536 bytes" in str(error.value)


@pytest.mark.parametrize("call", ON_THE_BYTE_PATH)
def test_interim_answers_without_end_are_given_up(call: Call) -> None:
    def endless(connection: socket.socket, _number: int) -> None:
        read_request(connection)
        while True:
            connection.sendall(b"HTTP/1.1 102 Processing\r\n\r\n")

    with ScriptedServer(endless) as server, L3Client(server.url, timeouts=PATIENT) as client:
        with pytest.raises(ProtocolError) as error:
            call(client)
        assert "no final one" in str(error.value)


def test_an_interim_answer_before_the_answer_is_skipped() -> None:
    reply = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + answer("200 OK", OBJECT, SUMS)
    with always(reply) as server, L3Client(server.url, timeouts=PATIENT) as client:
        into = bytearray(len(OBJECT))
        client.get(KEY, memoryview(into), cell_bytes=CELL)
        assert into == OBJECT


@pytest.mark.parametrize("sent", [0, 1, CELL, len(OBJECT) - 1])
def test_a_body_that_ends_early_is_a_connect_error(sent: int) -> None:
    reply = answer("200 OK", OBJECT, SUMS)
    assert type(ask(reply[: len(reply) - len(OBJECT) + sent], get)) is ConnectError


@pytest.mark.parametrize("pages", ["4", "-1", "³", "3.0", "", "many", "9" * 5000])
def test_a_number_of_pages_that_cannot_be_is_a_protocol_error(pages: str) -> None:
    body = b"\0" * (3 * (SHAPE.page_bytes + 16))
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nL3-Pages: {pages}\r\n\r\n"
    assert type(ask(head.encode("latin-1") + body, read)) is ProtocolError


def test_no_number_of_pages_is_a_protocol_error() -> None:
    assert type(ask(answer("200 OK", b"\0" * (3 * (SHAPE.page_bytes + 16))), read)) is ProtocolError


@pytest.mark.parametrize(
    "sums", ["", "L3-Sums: ", "L3-Sums: ????", "L3-Sums: AAAAAAAAAAA=", f"{SUMS[:-1]}"], ids=range(5)
)
def test_bytes_whose_sums_cannot_be_read_are_not_good(sums: str) -> None:
    assert type(ask(answer("200 OK", OBJECT, *([sums] if sums else [])), get)) is ProtocolError


PROBLEMS = {
    "not JSON": b"<html>Bad gateway</html>",
    "not an object": b'["x"]',
    "empty": b"",
    "not UTF-8": b"\xff\xfe{",
    "nothing known": b'{"type": "about:blank"}',
}


@pytest.mark.parametrize("body", PROBLEMS.values(), ids=PROBLEMS.keys())
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("404 Not Found", MissError),
        ("413 Too Large", TooLargeError),
        ("503 Busy", RetryError),
        ("502 Bad", ServiceError),
    ],
)
@pytest.mark.parametrize("call", EVERY_CALL)
def test_an_error_without_a_document_of_ours_is_known_by_its_status(
    call: Call, status: str, kind: type[L3Error], body: bytes
) -> None:
    assert type(ask(answer(status, body), call)) is kind


@pytest.mark.parametrize("call", EVERY_CALL)
def test_a_document_that_names_the_problem_is_that_error(call: Call) -> None:
    problem = UnknownNamespaceError("register first").to_problem()
    error = ask(answer("404 Not Found", json.dumps(problem).encode()), call)
    assert type(error) is UnknownNamespaceError
    assert error.detail == "register first"


@pytest.mark.parametrize("call", ON_THE_BYTE_PATH)
def test_an_error_whose_document_is_cut_short_or_huge_is_known_by_its_status(call: Call) -> None:
    cut = b"HTTP/1.1 409 Conflict\r\nContent-Length: 500\r\n\r\n" + b'{"type": "urn:l3'
    assert type(ask(cut, call)) is ConflictError
    huge = b"HTTP/1.1 409 Conflict\r\nContent-Length: 99999999999\r\n\r\n" + b"x" * 1000
    assert type(ask(huge, call)) is ConflictError


WRITE_ANSWERS = {
    "not JSON": b"ok",
    "no results": b"{}",
    "results of another shape": b'{"results": [1]}',
    "no status": json.dumps({"results": [{"key": str(KEY)}]}).encode(),
    "too few": b'{"results": []}',
    "another key": json.dumps({"results": [{"key": "x", "status": "created"}]}).encode(),
    "nothing": b"",
}


@pytest.mark.parametrize("body", WRITE_ANSWERS.values(), ids=WRITE_ANSWERS.keys())
def test_an_answer_to_a_write_that_cannot_be_read_is_not_taken_for_stored(body: bytes) -> None:
    assert type(ask(answer("200 OK", body), write)) is ProtocolError


CONTROL_ANSWERS = [
    b"no", b"[]", b"{}", b'{"pages": 4, "missing": [[3, "L0-2_H0"]]}', b'{"pages": -1, "missing": [[-1, "L0-2_H0"]]}',
    b'{"pages": true, "missing": [[true, "L0-2_H0"]]}', b'{"pages": "2", "missing": [[0, "L2-2"]]}',
    b'{"pages": 1.5, "missing": [[0]]}', b'{"pages": null, "missing": [[0, 7]]}', b'{"missing": 3}',
]  # fmt: skip


@pytest.mark.parametrize("body", CONTROL_ANSWERS)
@pytest.mark.parametrize("call", [match, missing])
def test_an_answer_of_a_control_call_that_cannot_be_is_a_protocol_error(call: Call, body: bytes) -> None:
    assert type(ask(answer("200 OK", body), call)) is ProtocolError


def test_connection_close_is_obeyed() -> None:
    def script(connection: socket.socket, _number: int) -> None:
        while True:
            read_request(connection)
            connection.sendall(answer("200 OK", OBJECT, SUMS, "Connection: Keep-Alive, Close"))

    with ScriptedServer(script) as server, L3Client(server.url, timeouts=PATIENT) as client:
        for _ in range(3):
            get(client)
        assert server.accepted == 3


@pytest.mark.parametrize("extra", [b"x", answer("200 OK", bytes(len(OBJECT)), SUMS)], ids=["a byte", "an answer"])
def test_bytes_beyond_an_answer_are_never_taken_for_the_next_one(extra: bytes) -> None:
    def script(connection: socket.socket, _number: int) -> None:
        while True:
            read_request(connection)
            connection.sendall(answer("200 OK", OBJECT, SUMS) + extra)

    with ScriptedServer(script) as server, L3Client(server.url, timeouts=PATIENT) as client:
        for _ in range(3):
            into = bytearray(len(OBJECT))
            client.get(KEY, memoryview(into), cell_bytes=CELL)
            assert into == OBJECT
            time.sleep(0.02)  # what comes late is as bad as what comes at once
        assert server.accepted == 3


def test_an_error_without_a_length_ends_the_connection() -> None:
    def script(connection: socket.socket, _number: int) -> None:
        read_request(connection)
        connection.sendall(b'HTTP/1.1 503 Busy\r\n\r\n{"detail": "no length"}')
        hold(connection)

    with ScriptedServer(script) as server, L3Client(server.url, timeouts=PATIENT) as client:
        for _ in range(2):
            with pytest.raises(RetryError):
                get(client)
        assert server.accepted == 2


LARGE = bytearray(32 << 20)
LARGE_KEY = Key(HASHES[0], NAMESPACE.digest, Coordinate(0, 1, 0))


def put_large(client: L3Client) -> None:
    client.put(LARGE_KEY, memoryview(LARGE), cell_bytes=len(LARGE))


@pytest.mark.parametrize("reset", [False, True], ids=["stops reading", "closes with data unread"])
def test_a_refusal_of_a_large_body_is_seen_although_it_was_not_all_taken(reset: bool) -> None:
    """The answer comes while we send. It says what to do; a reset or a timeout would not."""
    refusal = json.dumps(TooLargeError("at most 1 MiB").to_problem()).encode()

    def script(connection: socket.socket, _number: int) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        connection.recv(1000)
        connection.sendall(answer("413 Too Large", refusal, "Connection: close"))
        time.sleep(0.1)
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return
        hold(connection)

    with ScriptedServer(script) as server, L3Client(server.url, timeouts=Timeouts(write=0.3)) as client:
        with pytest.raises(TooLargeError) as error:
            put_large(client)
        assert error.value.detail == "at most 1 MiB"


def test_a_reset_without_a_word_while_sending_is_a_connect_error() -> None:
    def script(connection: socket.socket, _number: int) -> None:
        connection.recv(1000)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with (
        ScriptedServer(script) as server,
        L3Client(server.url, timeouts=PATIENT) as client,
        pytest.raises(ConnectError),
    ):
        put_large(client)


def timed_out(call: Call, client: L3Client, phase: str) -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutExpiredError) as raised:
        call(client)
    assert raised.value.phase == phase
    assert 0.1 <= time.monotonic() - began < 5


def test_a_server_that_stops_reading_is_a_write_timeout() -> None:
    def script(connection: socket.socket, _number: int) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        hold(connection)

    with ScriptedServer(script) as server, L3Client(server.url, timeouts=SHORT) as client:
        timed_out(put_large, client, "write")


@pytest.mark.parametrize("call", EVERY_CALL)
def test_a_server_that_never_answers_is_a_read_timeout(call: Call) -> None:
    with (
        ScriptedServer(lambda connection, _: hold(connection)) as server,
        L3Client(server.url, timeouts=SHORT) as client,
    ):
        timed_out(call, client, "read")


@pytest.mark.parametrize(
    "sent", [20, -len(OBJECT), -CELL, -1], ids=["in the head", "after it", "mid-body", "at the end"]
)
def test_a_server_that_stalls_in_its_answer_is_a_read_timeout(sent: int) -> None:
    def script(connection: socket.socket, _number: int) -> None:
        read_request(connection)
        connection.sendall(answer("200 OK", OBJECT, SUMS)[:sent])
        connection.recv(1)  # nothing more is asked: this waits for the client's end

    with ScriptedServer(script) as server, L3Client(server.url, timeouts=SHORT) as client:
        timed_out(get, client, "read")


@pytest.mark.parametrize("call", EVERY_CALL)
def test_a_server_that_takes_no_connection_is_a_connect_timeout(call: Call) -> None:
    """A listener that never accepts and whose queue is full: the handshake gets no answer."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        client = stack.enter_context(L3Client(url, timeouts=SHORT))
        timed_out(call, client, "connect")


@pytest.mark.parametrize("call", EVERY_CALL)
def test_nobody_listening_is_a_connect_error(call: Call) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with L3Client(f"http://127.0.0.1:{port}", timeouts=SHORT) as client, pytest.raises(ConnectError):
        call(client)


def test_a_host_name_that_cannot_be_is_a_connect_error() -> None:
    with L3Client(f"http://{'a' * 100}.invalid:9460", timeouts=PATIENT) as client, pytest.raises(ConnectError):
        get(client)


@pytest.mark.parametrize("call", EVERY_CALL)
def test_a_closed_client_says_so(call: Call) -> None:
    with always(b"") as server:
        client = L3Client(server.url, timeouts=PATIENT)
        client.close()
        with pytest.raises(ConnectError, match="closed"):
            call(client)
        assert server.accepted == 0


def slow_server(delay: float) -> ScriptedServer:
    def script(connection: socket.socket, _number: int) -> None:
        while True:
            read_request(connection)
            time.sleep(delay)
            connection.sendall(answer("200 OK", OBJECT, SUMS))

    return ScriptedServer(script)


def test_all_connections_in_use_is_a_pool_timeout() -> None:
    release = threading.Event()

    def script(connection: socket.socket, _number: int) -> None:
        read_request(connection)
        release.wait(10)
        for _ in range(2):
            connection.sendall(answer("200 OK", OBJECT, SUMS))
            read_request(connection)

    timeouts = Timeouts(pool=0.3)
    with ScriptedServer(script) as server, L3Client(server.url, connections=1, timeouts=timeouts) as client:
        first = threading.Thread(target=get, args=(client,))
        first.start()
        while not server.accepted:
            time.sleep(0.01)
        timed_out(get, client, "pool")
        release.set()
        first.join(10)
        get(client)  # its place came free
        assert server.accepted == 1


def test_sixteen_threads_share_the_connections_there_are() -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(5):
                get(client)
        except L3Error as error:
            failures.append(error)

    with slow_server(0.002) as server, L3Client(server.url, connections=3) as client:
        threads = [threading.Thread(target=work) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert failures == []
        assert 1 <= server.accepted <= 3


def test_errors_give_their_place_in_the_pool_back() -> None:
    timeouts = Timeouts(pool=0.5)
    with always(b"garbage\r\n\r\n") as server, L3Client(server.url, connections=1, timeouts=timeouts) as client:
        for _ in range(5):
            with pytest.raises(ProtocolError):
                get(client)


def test_one_connection_is_used_again_for_one_call_after_another() -> None:
    with slow_server(0) as server, L3Client(server.url) as client:
        for _ in range(20):
            get(client)
        assert server.accepted == 1


def closing_after(requests: int, closing: threading.Event) -> ScriptedServer:
    """Closes each connection after some requests: at once, or (``closing`` set) only when the next one comes."""

    def script(connection: socket.socket, _number: int) -> None:
        for _ in range(requests):
            read_request(connection)
            connection.sendall(answer("200 OK", OBJECT, SUMS))
        if closing.is_set():
            read_request(connection)

    return ScriptedServer(script)


@pytest.mark.parametrize("late", [False, True], ids=["while idle", "just as the next request comes"])
def test_a_kept_connection_that_was_closed_is_replaced(late: bool) -> None:
    closing = threading.Event()
    if late:
        closing.set()
    with closing_after(2, closing) as server, L3Client(server.url, timeouts=PATIENT) as client:
        for _ in range(6):
            get(client)
            time.sleep(0.02)
        assert server.accepted == 3


def test_a_new_connection_that_fails_is_not_tried_again() -> None:
    def script(connection: socket.socket, _number: int) -> None:
        read_request(connection)

    with ScriptedServer(script) as server, L3Client(server.url, timeouts=PATIENT) as client:
        with pytest.raises(ConnectError):
            get(client)
        assert server.accepted == 1


def test_an_answer_that_breaks_off_on_a_kept_connection_is_not_tried_again() -> None:
    """It was answered: whatever was asked has been done, and a reader's deadline is not doubled."""

    def script(connection: socket.socket, _number: int) -> None:
        read_request(connection)
        connection.sendall(answer("200 OK", OBJECT, SUMS))
        read_request(connection)
        connection.sendall(answer("200 OK", OBJECT, SUMS)[:-1])

    with ScriptedServer(script) as server, L3Client(server.url, timeouts=PATIENT) as client:
        get(client)
        with pytest.raises(ConnectError, match="in the middle of an answer"):
            get(client)
        assert server.accepted == 1


def test_the_host_header_has_the_port() -> None:
    heads = []

    def script(connection: socket.socket, _number: int) -> None:
        heads.append(read_request(connection)[0])
        connection.sendall(answer("200 OK", OBJECT, SUMS))

    with ScriptedServer(script) as server, L3Client(server.url) as client:
        get(client)
        assert f"Host: 127.0.0.1:{server.port}" in heads[0].split("\r\n")


@pytest.mark.parametrize(
    "url", ["127.0.0.1:9460", "ftp://127.0.0.1", "http://", "http://127.0.0.1:9460/prefix", "http://127.0.0.1:99999"]
)
def test_what_is_not_the_address_of_a_service_is_refused(url: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the last is urllib's own
        L3Client(url)


@pytest.mark.parametrize("sizes", [[SHAPE.page_bytes] * 2, [SHAPE.page_bytes] * 2 + [SHAPE.page_bytes - 1]])
def test_room_that_is_not_that_of_the_pages_asked_is_refused(sizes: list[int]) -> None:
    views = [memoryview(bytearray(size)) for size in sizes]
    with always(b"") as server, L3Client(server.url) as client, pytest.raises(ValueError, match="3 pages need as many"):
        client.read_pages(PART, HASHES, SHAPE, views, order=Order.PAGE)


IN_ALL = Timeouts(connect=1, read=1, write=1, pool=1, call=0.5)


@pytest.mark.parametrize("call", EVERY_CALL)
def test_a_call_that_is_in_time_for_every_phase_ends_all_the_same(call: Call) -> None:
    def drip(connection: socket.socket, _number: int) -> None:
        read_request(connection)
        length = len(OBJECT) * 3 + 3 * 2 * 8 if call is read else len(OBJECT)
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nL3-Pages: 3\r\n{SUMS}\r\n\r\n"
        connection.sendall(head.encode())
        for _ in range(100):
            time.sleep(0.1)
            connection.sendall(b" ")

    with ScriptedServer(drip) as server, L3Client(server.url, timeouts=IN_ALL) as client:
        began = time.monotonic()
        with pytest.raises(TimeoutExpiredError) as raised:
            call(client)
        assert time.monotonic() - began < 3
        assert raised.value.phase in {"call", "read"}


@pytest.mark.parametrize("call", EVERY_CALL)
def test_a_head_that_comes_byte_by_byte_ends_as_well(call: Call) -> None:
    def drip(connection: socket.socket, _number: int) -> None:
        read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        for _ in range(100):
            time.sleep(0.1)
            connection.sendall(b"z")

    with ScriptedServer(drip) as server, L3Client(server.url, timeouts=IN_ALL) as client:
        began = time.monotonic()
        with pytest.raises(TimeoutExpiredError):
            call(client)
        assert time.monotonic() - began < 3


def test_a_control_answer_without_an_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("l3client.transport.control._MAX_ANSWER", 1 << 20)

    def endless(connection: socket.socket, _number: int) -> None:
        read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            connection.sendall(b"10000\r\n" + b" " * 0x10000 + b"\r\n")

    with (
        ScriptedServer(endless) as server,
        L3Client(server.url, timeouts=PATIENT) as client,
        pytest.raises(ProtocolError, match="more than 1048576 bytes"),
    ):
        client.control.namespaces()


@pytest.mark.parametrize("call", [match, missing])
def test_a_control_answer_that_says_it_is_huge_is_not_read(call: Call) -> None:
    error = ask(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", call)
    assert type(error) is ProtocolError
    assert "99999999999 bytes where at most" in str(error)


def test_time_for_a_call_grows_with_what_it_moves() -> None:
    timeouts = Timeouts(call=2, bytes_per_sec=1 << 20)
    assert [timeouts.whole(count) for count in (0, 1 << 20, 10 << 20)] == [2, 3, 12]
