"""The byte path over TLS, which has no scattered buffers and other timeouts, against a server with a certificate."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from l3client.transport import L3Client, Order, PagesRead, Part, Timeouts
from l3store.errors import ConnectError, TimeoutExpiredError, TooLargeError
from l3store.layout import Coordinate, Key, Range
from l3store.layout.sums import encode_sums, sum_cells
from tests.client_support import PATIENT, ScriptedServer, answer, hold, read_request
from tests.support import page_hashes, tiny

NAMESPACE = tiny("org/tls", layers=4, heads=2, head_group=1, partition=0, page_size=64, head_dim=128)
CELL = NAMESPACE.cell_bytes
SHAPE = NAMESPACE.shape()
HASHES = page_hashes("tls", 3)
KEY = Key(HASHES[0], NAMESPACE.digest, Coordinate(0, 4, 0))
OBJECT = bytes(range(256)) * (4 * CELL // 256)
SUMS = f"L3-Sums: {encode_sums(sum_cells(OBJECT, CELL))}"
PART = Part(NAMESPACE.digest, Range(0, 4), Range(0, 2))
LARGE = bytes(16 << 20)

Script = Callable[[ssl.SSLSocket], None]


class Contexts:
    def __init__(self, folder: Path) -> None:
        """A certificate for 127.0.0.1, and who trusts it."""
        key, certificate = folder / "key.pem", folder / "certificate.pem"
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command += ["-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=l3store test"]
        command += ["-addext", "subjectAltName=IP:127.0.0.1"]
        subprocess.run(command, check=True, capture_output=True, timeout=30)
        self.client = ssl.create_default_context(cafile=str(certificate))
        self._server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._server.load_cert_chain(certificate, key)

    def serve(self, script: Script) -> ScriptedServer:
        def wrapped(connection: socket.socket, _number: int) -> None:
            with self._server.wrap_socket(connection, server_side=True) as secure:
                script(secure)

        return ScriptedServer(wrapped)

    def connect(self, server: ScriptedServer, timeouts: Timeouts) -> L3Client:
        return L3Client(f"https://127.0.0.1:{server.port}", timeouts=timeouts, context=self.client)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Contexts:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    return Contexts(tmp_path_factory.mktemp("tls"))


def get(client: L3Client) -> None:
    into = bytearray(len(OBJECT))
    client.get(KEY, memoryview(into), cell_bytes=CELL)
    assert into == OBJECT


def put(client: L3Client) -> None:
    client.put(KEY, memoryview(LARGE), cell_bytes=len(LARGE))


def test_bytes_go_there_and_back_over_one_connection(tls: Contexts) -> None:
    bodies = []
    pages = bytes(reversed(OBJECT)) * 6

    def script(connection: ssl.SSLSocket) -> None:
        while True:
            head, body = read_request(connection)
            if head.startswith("GET"):
                connection.sendall(answer("200 OK", OBJECT, SUMS))
            elif head.startswith("PUT"):
                bodies.append(body)
                connection.sendall(answer("201 Created"))
            else:
                connection.sendall(answer("200 OK", pages + sum_cells(pages, CELL), "L3-Pages: 3"))

    with tls.serve(script) as server, tls.connect(server, PATIENT) as client:
        for _ in range(3):
            get(client)
            assert client.put(KEY, memoryview(OBJECT), cell_bytes=CELL)
            views = [memoryview(bytearray(SHAPE.page_bytes)) for _ in HASHES]
            assert client.read_pages(PART, HASHES, SHAPE, views, order=Order.LAYER) == PagesRead(3, 3)
            assert views[0][:CELL] == pages[:CELL]
        assert server.accepted == 1
        assert bodies == [OBJECT] * 3


def test_silence_in_the_middle_of_a_body_is_a_read_timeout(tls: Contexts) -> None:
    def script(connection: ssl.SSLSocket) -> None:
        read_request(connection)
        connection.sendall(answer("200 OK", OBJECT, SUMS)[:-CELL])
        hold(connection)

    with tls.serve(script) as server, tls.connect(server, Timeouts(read=0.4)) as client:
        began = time.monotonic()
        with pytest.raises(TimeoutExpiredError) as raised:
            get(client)
        assert raised.value.phase == "read"
        assert 0.35 < time.monotonic() - began < 1.5


def test_a_body_that_trickles_ends_with_the_call(tls: Contexts) -> None:
    def script(connection: ssl.SSLSocket) -> None:
        read_request(connection)
        data = answer("200 OK", OBJECT, SUMS)
        for at in range(200):
            connection.sendall(data[at * 100 : at * 100 + 100])
            time.sleep(0.02)

    timeouts = Timeouts(read=2, call=0.5, bytes_per_sec=1 << 40)
    with tls.serve(script) as server, tls.connect(server, timeouts) as client:
        began = time.monotonic()
        with pytest.raises(TimeoutExpiredError) as raised:
            get(client)
        assert raised.value.phase == "call"
        assert 0.45 < time.monotonic() - began < 1.5


def test_a_service_that_stops_reading_is_a_write_timeout(tls: Contexts) -> None:
    def script(connection: ssl.SSLSocket) -> None:
        connection.recv(1000)
        time.sleep(1)  # the client's end does not reach who does not read

    with tls.serve(script) as server, tls.connect(server, Timeouts(write=0.4)) as client:
        with pytest.raises(TimeoutExpiredError) as raised:
            put(client)
        assert raised.value.phase == "write"


def test_a_refusal_while_sending_is_seen(tls: Contexts) -> None:
    def script(connection: ssl.SSLSocket) -> None:
        connection.recv(1000)
        connection.sendall(answer("413 Too Large", b"", "Connection: close"))
        time.sleep(1)  # as above

    with tls.serve(script) as server, tls.connect(server, Timeouts(write=0.4)) as client, pytest.raises(TooLargeError):
        put(client)


def test_closing_the_client_ends_a_call(tls: Contexts) -> None:
    asked = threading.Event()
    failures: list[BaseException] = []

    def script(connection: ssl.SSLSocket) -> None:
        read_request(connection)
        asked.set()
        hold(connection)

    def work(client: L3Client) -> None:
        try:
            get(client)
        except ConnectError as error:
            failures.append(error)

    with tls.serve(script) as server:
        client = tls.connect(server, PATIENT)
        thread = threading.Thread(target=work, args=(client,))
        thread.start()
        assert asked.wait(10)
        client.close()
        thread.join(3)
        assert len(failures) == 1


def test_a_certificate_that_nobody_trusts_is_a_connect_error(tls: Contexts) -> None:
    with (
        tls.serve(lambda connection: hold(connection)) as server,
        L3Client(f"https://127.0.0.1:{server.port}", timeouts=PATIENT) as client,
        pytest.raises(ConnectError, match="certificate"),
    ):
        get(client)
