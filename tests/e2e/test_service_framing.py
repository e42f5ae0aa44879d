"""Framing, byte by byte over sockets: what is refused is refused in words, and the connection ends in order."""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections.abc import Iterator

import pytest

from tests.support import Client, Pages, Service, Wire, check_document, counters, tiny, wait_for, write_body

SIZE = 768


@pytest.fixture
def pages(client: Client, request: pytest.FixtureRequest) -> Iterator[Pages]:
    name = hashlib.sha256(request.node.name.encode()).hexdigest()[:12]
    made = Pages(tiny(f"org/framing-{name}"), name, 3)
    assert client.register(made.namespace).status_code == 201
    yield made
    client.http.delete(f"/v1/namespaces/{made.namespace.digest}")


@pytest.fixture
def wire(service: Service) -> Iterator[Wire]:
    with Wire(service) as made:
        yield made


@pytest.fixture(autouse=True)
def unharmed(service: Service, client: Client) -> Iterator[None]:
    """Whatever was sent: nothing is left behind, nothing fell over, and no memory stays held."""
    yield
    wait_for(lambda: service.partials() == [])
    assert client.http.get("/readyz").status_code == 200
    assert "Traceback" not in service.log
    assert " ERROR " not in service.log


def put_head(pages: Pages, page: int = 0) -> str:
    return f"PUT /v1/objects/{pages.key(page, 0, 3)} HTTP/1.1"


def test_a_body_without_a_length_is_411(wire: Wire, client: Client, pages: Pages) -> None:
    wire.request(put_head(pages))
    time.sleep(0.05)
    # Without a length it looks like the next request, and must not be taken for one.
    wire.send(f"PUT /v1/objects/{pages.key(1, 0, 3)} HTTP/1.1\r\nContent-Length: {SIZE}\r\n\r\n".encode())
    wire.send(pages.body(1, 0, 3))
    assert wire.problem(411, "Content-Length").headers["connection"] == "close"
    assert wire.ended()
    assert client.get(pages.key(1, 0, 3)).status_code == 404


@pytest.mark.parametrize("path", ["/v1/pages/match", "/v1/pages/write", "/v1/pages/read"])
def test_a_post_without_a_length_is_411(wire: Wire, path: str) -> None:
    wire.request(f"POST {path} HTTP/1.1")
    wire.problem(411, "Content-Length")


@pytest.mark.parametrize(
    "value", ["x", "-1", "+768", "7 68", "768, 768", "0x300", "1e3", "", "٣", "99999999999999999999999"]
)
def test_a_length_that_is_no_number_is_400(wire: Wire, client: Client, pages: Pages, value: str) -> None:
    wire.send(f"{put_head(pages)}\r\nHost: l3\r\nContent-Length: {value}\r\n\r\n".encode() + pages.body(0, 0, 3))
    assert wire.answer().status in {400, 411, 413}
    assert wire.ended()
    assert client.get(pages.key(0, 0, 3)).status_code == 404


@pytest.mark.parametrize("second", [SIZE, SIZE + 1, 0])
def test_two_lengths_are_400_even_where_they_agree(wire: Wire, client: Client, pages: Pages, second: int) -> None:
    wire.request(put_head(pages) + f"\nContent-Length: {SIZE}\nContent-Length: {second}", pages.body(0, 0, 3))
    wire.problem(400)
    assert wire.ended()
    assert client.get(pages.key(0, 0, 3)).status_code == 404


@pytest.mark.parametrize(
    "body", [b"5\r\nhello\r\n0\r\n\r\n", b"not chunks at all", b""], ids=["chunks", "garbage", "nothing"]
)
@pytest.mark.parametrize("path", ["objects", "/v1/pages/match", "/v1/pages/write", "/readyz"])
def test_transfer_encoding_is_411(wire: Wire, client: Client, pages: Pages, path: str, body: bytes) -> None:
    head = put_head(pages) if path == "objects" else f"POST {path} HTTP/1.1"
    wire.request(f"{head}\nTransfer-Encoding: chunked", body)
    wire.problem(411, "Transfer-Encoding is not taken")
    assert wire.ended()
    assert client.get(pages.key(0, 0, 3)).status_code == 404


@pytest.mark.parametrize("coding", ["chunked", "gzip, chunked", "identity"])
def test_a_length_and_a_transfer_encoding_are_400(wire: Wire, client: Client, pages: Pages, coding: str) -> None:
    head = put_head(pages) + f"\nContent-Length: {SIZE}\nTransfer-Encoding: {coding}"
    wire.request(head, pages.body(0, 0, 3))
    answer = wire.answer()
    assert answer.status in {400, 411}
    check_document(json.loads(answer.body), answer.status)
    assert wire.ended()
    assert client.get(pages.key(0, 0, 3)).status_code == 404


@pytest.mark.parametrize("length", [0, 1, SIZE - 1, SIZE + 1, 2 * SIZE])
def test_another_length_than_the_keys_is_400_before_the_body(
    wire: Wire, client: Client, pages: Pages, length: int
) -> None:
    wire.request(put_head(pages) + f"\nContent-Length: {length}")
    answer = wire.problem(400, f"a body of {length} bytes", f"has {SIZE}")
    assert json.loads(answer.body)["expected"] == SIZE
    if length:
        assert answer.headers["connection"] == "close"
        assert wire.ended()
    assert client.get(pages.key(0, 0, 3)).status_code == 404


def test_a_body_that_ends_early_is_400_and_stores_nothing(wire: Wire, client: Client, pages: Pages) -> None:
    wire.request(put_head(pages) + f"\nContent-Length: {SIZE}", pages.body(0, 0, 3)[:-1])
    wire.socket.shutdown(socket.SHUT_WR)
    wire.problem(400, f"ended after {SIZE - 1} of the {SIZE} bytes")
    assert wire.ended()
    assert client.get(pages.key(0, 0, 3)).status_code == 404


def test_json_that_ends_early_is_400_even_where_it_is_whole(wire: Wire, client: Client) -> None:
    namespace = tiny("org/framing-early-json")
    body = json.dumps(namespace.to_wire()).encode()
    head = f"PUT /v1/namespaces/{namespace.digest} HTTP/1.1\nContent-Type: application/json"
    wire.request(f"{head}\nContent-Length: {len(body) + 5}", body)
    wire.socket.shutdown(socket.SHUT_WR)
    wire.problem(400, "bytes announced")
    assert client.http.get(f"/v1/namespaces/{namespace.digest}").status_code == 404


def test_a_body_that_is_longer_than_announced_is_stored_as_announced(wire: Wire, client: Client, pages: Pages) -> None:
    """The rest is the next request, and no HTTP. The answers come in the order of what was sent."""
    wire.request(put_head(pages) + f"\nContent-Length: {SIZE}", pages.body(0, 0, 3) + b"\x00\x01 more than that")
    assert wire.answer().status == 201
    wire.problem(400, "not an HTTP/1.1 request")
    assert wire.ended()
    assert client.get(pages.key(0, 0, 3)).content == pages.body(0, 0, 3)


def test_garbage_behind_slow_requests_waits_for_its_turn(wire: Wire, pages: Pages) -> None:
    gets = f"GET /v1/objects/{pages.key(0, 0, 3)} HTTP/1.1\r\nHost: l3\r\n\r\n" * 3
    wire.send(gets.encode() + b"\xff\xff\xff\r\n\r\n")
    for _ in range(3):
        wire.problem(404)
    wire.problem(400, "not an HTTP/1.1 request")
    assert wire.ended()


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"FETCH / HTTP/1.1\r\n\r\n",
        b"GET /v1/objects/\xff\xfe HTTP/1.1\r\nHost: l3\r\n\r\n",
        b"GET /v1/objects/a b HTTP/1.1\r\nHost: l3\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: l3\r\nbad header\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: l3\r\nX: a\x00b\r\n\r\n",
        b"CONNECT l3:1 HTTP/1.1\r\nHost: l3\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: l3\r\n\r\n",
    ],
    ids=["TLS", "HTTP/2", "one word", "HTTP/9.9", "FETCH", "high bytes", "a blank", "no colon", "NUL", "CONNECT", "*"],
)
def test_what_is_not_our_http_is_a_problem_document(wire: Wire, sent: bytes) -> None:
    wire.send(sent)
    answer = wire.answer()
    assert answer.status in {400, 404, 405}
    assert answer.headers["content-type"] == "application/problem+json"
    check_document(json.loads(answer.body), answer.status)


@pytest.mark.parametrize(
    ("path", "length", "limit"),
    [
        ("PUT /v1/objects/{key}", 10**15, 256 << 20),
        ("PUT /v1/objects/{key}", (256 << 20) + 1, 256 << 20),
        ("POST /v1/pages/write", (4 << 30) + 1, 4 << 30),
        ("POST /v1/pages/match", (16 << 20) + 1, 16 << 20),
        ("PUT /v1/namespaces/{digest}", 10**18, 16 << 20),
        ("GET /v1/objects/{key}", (16 << 20) + 1, 16 << 20),
    ],
)
def test_a_body_beyond_the_limit_is_refused_before_it_comes(
    wire: Wire, pages: Pages, path: str, length: int, limit: int
) -> None:
    line = path.format(key=pages.key(0, 0, 3), digest=pages.namespace.digest)
    began = time.monotonic()
    wire.request(f"{line} HTTP/1.1\nContent-Length: {length}")
    answer = wire.problem(413, str(length), str(limit))
    assert answer.headers["connection"] == "close"
    assert wire.ended()
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("length", [100_000, 20 << 20, (256 << 20) + 1], ids=["small", "20 MiB", "beyond"])
def test_a_client_that_sends_on_while_it_is_refused_can_read_why(service: Service, pages: Pages, length: int) -> None:
    """A plain close would reset the connection under the unread answer. The client sends first and reads after."""
    key = pages.key(0, 0, 3)
    with Wire(service) as wire:
        wire.request(f"PUT /v1/objects/{key} HTTP/1.1\nContent-Length: {length}")
        piece = bytes(1 << 18)
        for _ in range(min(length, 32 << 20) // len(piece)):
            wire.send(piece)
        wire.problem(413 if length > 256 << 20 else 400)
        assert wire.ended()


def test_what_a_refused_client_sends_is_bounded(service: Service, pages: Pages) -> None:
    with Wire(service) as wire:
        wire.request(f"PUT /v1/objects/{pages.key(0, 0, 3)} HTTP/1.1\nContent-Length: {10**15}")
        piece = bytes(1 << 20)
        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            wire.send(piece * 200)


def test_garbage_and_a_lot_of_it_is_answered_without_a_reset(service: Service) -> None:
    with Wire(service) as wire:
        for _ in range(16):
            wire.send(b"\xff" * (1 << 18))
        wire.problem(400, "not an HTTP/1.1 request")
        assert wire.ended()


@pytest.mark.parametrize("part", ["url", "header", "headers"])
def test_headers_without_an_end_are_431(service: Service, part: str) -> None:
    with Wire(service) as wire:
        wire.send(b"GET /v1/objects/" if part == "url" else b"GET /readyz HTTP/1.1\r\nHost: l3\r\nX-Long: ")
        for _ in range(60):
            wire.send(b"a: b\r\n" * 1500 if part == "headers" else b"a" * 9000)
            time.sleep(0.001)
        wire.problem(431, "headers of more than")
        assert wire.ended()


@pytest.mark.parametrize("length", [161, 5_000, 60_000])
def test_over_long_keys_are_400_in_a_document_of_bounded_length(wire: Wire, length: int) -> None:
    wire.request(f"GET /v1/objects/{'a' * length} HTTP/1.1")
    assert len(wire.problem(400, "not a key").body) < 1000


BAD_KEYS = [
    "", "..", "../..", "../../../etc/passwd", "./x", "a/b", "a%2Fb", "..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/x",
    "{key}%00", "%00", "{key}%0a", "{key}%0d", "{key}%7f", "{key}/", "/{key}", "{key}%20", "%C3%BC", "{key}%E2%80%AE",
    "{upper}", "%ff%fe", "%zz", "{key}_H0", "{hash}", "{hash}_{digest}", "{hash}_{digest}_L3-3_H0",
    "{hash}_{digest}_L3-0_H0", "{hash}_{digest}_L00-3_H0", "{hash}_{digest}_L0-3_H00", "{hash}_{digest}_L0-3_H",
    "{hash}_{digest}_L0-3", "{hash}_{digest}_L0-3_H2", "{hash}_{digest}_L0-7_H0", "{hash}_{digest}_L0-99999_H0",
    "{hash}_{digest}_L-1-3_H0", "{hash}_{digest}_L0-3_H0_H0", "{hash}_{digest}_l0-3_H0",
    "{hash}_ukv2-0000000000000000_L0-3_H0", "{hash}_{digest}_L٠-3_H0",
]  # fmt: skip


@pytest.mark.parametrize("method", ["PUT", "GET", "DELETE", "HEAD"])
def test_bad_keys_are_refused_and_change_nothing(service: Service, pages: Pages, method: str) -> None:
    good = pages.key(0, 0, 3)
    before = (service.files(), service.files("quarantine"), service.files("namespaces"))
    outside = sorted(service.data_dir.parent.iterdir())
    body = pages.body(0, 0, 3) if method == "PUT" else b""
    for key in BAD_KEYS:
        path = key.format(key=good, upper=good.upper(), hash=pages.hashes[0], digest=pages.namespace.digest)
        with Wire(service) as wire:
            head = f"{method} /v1/objects/{path} HTTP/1.1\r\nHost: l3\r\nContent-Length: {len(body)}\r\n\r\n"
            wire.send(head.encode() + body)
            answer = wire.answer(head_only=method == "HEAD")
        assert answer.status in {400, 404}, key
        assert answer.headers["content-type"] == "application/problem+json", key
        if method != "HEAD":
            check_document(json.loads(answer.body), answer.status)
    assert (service.files(), service.files("quarantine"), service.files("namespaces")) == before
    assert sorted(service.data_dir.parent.iterdir()) == outside


def test_a_client_that_disconnects_half_way_leaves_nothing(service: Service, client: Client, pages: Pages) -> None:
    for cut in (0, 1, SIZE // 2, SIZE - 1):
        with Wire(service) as wire:
            wire.request(put_head(pages) + f"\nContent-Length: {SIZE}", pages.body(0, 0, 3)[:cut])
    with Wire(service) as wire:
        # A reset instead of an orderly end.
        wire.request(put_head(pages) + f"\nContent-Length: {SIZE}", pages.body(0, 0, 3)[:100])
        wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    time.sleep(0.2)
    assert client.get(pages.key(0, 0, 3)).status_code == 404
    assert client.put(pages.key(0, 0, 3), pages.body(0, 0, 3)).status_code == 201


def test_a_write_that_is_cut_off_keeps_no_half_object(service: Service, client: Client, pages: Pages) -> None:
    body = write_body([(pages.key(page, 0, 3), pages.body(page, 0, 3), None) for page in range(3)])
    with Wire(service) as wire:
        wire.request(f"POST /v1/pages/write HTTP/1.1\nContent-Length: {len(body)}", body[: -SIZE // 2])
    time.sleep(0.2)
    assert client.get(pages.key(2, 0, 3)).status_code == 404
    for page in range(2):
        answer = client.get(pages.key(page, 0, 3))
        assert answer.status_code == 404 or answer.content == pages.body(page, 0, 3)


def test_a_reader_that_leaves_is_no_fault(service: Service, client: Client) -> None:
    pages = Pages(
        tiny("org/framing-leaver", page_size=256, layers=4, heads=8, head_group=8, head_dim=128, partition=4), "l", 8
    )
    client.register(pages.namespace)
    for page in range(8):
        client.put_page(pages, page, [(0, 4)])
    body = json.dumps({"namespace": pages.namespace.digest, "page_hashes": pages.hashes})
    before = counters(client)["l3store_sent_bytes_total"]
    for _ in range(4):
        with Wire(service) as wire:
            wire.request(
                f"POST /v1/pages/read HTTP/1.1\nContent-Type: application/json\nContent-Length: {len(body)}",
                body.encode(),
            )
            assert wire.socket.recv(1000).startswith(b"HTTP/1.1 200")
    time.sleep(0.3)
    # Nothing is read from the disk for who has left: a part of each answer was, in the buffers between.
    assert counters(client)["l3store_sent_bytes_total"] - before < 4 * pages.array.size
    client.http.delete(f"/v1/namespaces/{pages.namespace.digest}")


def test_expect_100_continue_is_asked_for_the_body(wire: Wire, client: Client, pages: Pages) -> None:
    wire.request(put_head(pages) + f"\nContent-Length: {SIZE}\nExpect: 100-continue")
    assert wire.answer().status == 100
    wire.send(pages.body(0, 0, 3))
    assert wire.answer().status == 201
    assert client.get(pages.key(0, 0, 3)).content == pages.body(0, 0, 3)


@pytest.mark.parametrize("case", ["bad key", "wrong length", "exists", "too large"])
def test_expect_100_continue_is_answered_without_the_body_where_it_is_not_needed(
    wire: Wire, client: Client, pages: Pages, case: str
) -> None:
    client.put(pages.key(0, 0, 3), pages.body(0, 0, 3))
    path = pages.key(0, 0, 3) if case in {"exists", "wrong length"} else "no-key"
    length = {"wrong length": SIZE - 1, "too large": 10**12}.get(case, SIZE)
    wire.request(f"PUT /v1/objects/{path} HTTP/1.1\nContent-Length: {length}\nExpect: 100-continue")
    answer = wire.answer()
    assert answer.status == {"exists": 200, "too large": 413}.get(case, 400)
    # Whether the body still comes is the client's choice, so what follows could not be told from it.
    assert answer.headers["connection"] == "close"
    assert wire.ended()


def test_the_body_of_what_is_there_already_is_dropped_and_the_connection_goes_on(
    wire: Wire, client: Client, pages: Pages
) -> None:
    client.put(pages.key(0, 0, 3), pages.body(0, 0, 3))
    for _ in range(3):
        wire.request(put_head(pages) + f"\nContent-Length: {SIZE}")
        assert wire.answer().status == 200
        wire.send(bytes(SIZE))
    wire.request(f"GET /v1/objects/{pages.key(0, 0, 3)} HTTP/1.1")
    assert wire.answer().body == pages.body(0, 0, 3)


def test_the_body_of_what_is_there_already_does_not_reset_a_connection_that_closes(
    service: Service, client: Client
) -> None:
    pages = Pages(
        tiny("org/framing-large", page_size=1024, layers=2, heads=8, head_group=8, head_dim=256, partition=2), "x", 1
    )
    client.register(pages.namespace)
    client.put_page(pages, 0, [(0, 2)])
    body = pages.body(0, 0, 2)
    for _ in range(4):
        with Wire(service) as wire:
            wire.request(
                f"PUT /v1/objects/{pages.key(0, 0, 2)} HTTP/1.1\nConnection: close\nContent-Length: {len(body)}", body
            )
            assert wire.answer().status == 200
            assert wire.ended()
    client.http.delete(f"/v1/namespaces/{pages.namespace.digest}")


def test_a_connection_goes_on_after_an_error_whose_request_was_read(wire: Wire, pages: Pages) -> None:
    for _ in range(2):
        wire.request(f"GET /v1/objects/{pages.key(0, 0, 3)} HTTP/1.1")
        wire.problem(404)
        wire.request("GET /nowhere HTTP/1.1")
        wire.problem(404)
        body = b'{"namespace": "x", "page_hashes": []}'
        wire.request(
            f"POST /v1/pages/match HTTP/1.1\nContent-Type: application/json\nContent-Length: {len(body)}", body
        )
        wire.problem(400)
        wire.request("PATCH /readyz HTTP/1.1\nContent-Length: 0")
        wire.problem(405)
    wire.request(put_head(pages) + f"\nContent-Length: {SIZE}", pages.body(0, 0, 3))
    assert wire.answer().status == 201


def test_pipelined_requests_are_answered_in_order(wire: Wire, pages: Pages) -> None:
    key = pages.key(0, 0, 3)
    put = f"PUT /v1/objects/{key} HTTP/1.1\r\nHost: l3\r\nContent-Length: {SIZE}\r\n\r\n".encode() + pages.body(0, 0, 3)
    get = f"GET /v1/objects/{key} HTTP/1.1\r\nHost: l3\r\n\r\n".encode()
    delete = f"DELETE /v1/objects/{key} HTTP/1.1\r\nHost: l3\r\n\r\n".encode()
    wire.send((get + put + get + put + delete + get) * 2)
    seen = [wire.answer() for _ in range(12)]
    assert [answer.status for answer in seen] == [404, 201, 200, 200, 204, 404] * 2
    assert seen[2].body == pages.body(0, 0, 3)


def test_a_client_that_has_ended_its_half_gets_its_answer(service: Service, client: Client, pages: Pages) -> None:
    client.put(pages.key(0, 0, 3), pages.body(0, 0, 3))
    with Wire(service) as wire:
        wire.request(f"GET /v1/objects/{pages.key(0, 0, 3)} HTTP/1.1")
        wire.socket.shutdown(socket.SHUT_WR)
        assert wire.answer().body == pages.body(0, 0, 3)
        assert wire.ended()


def test_http_1_0_is_served_and_closed(service: Service, client: Client, pages: Pages) -> None:
    client.put(pages.key(0, 0, 3), pages.body(0, 0, 3))
    with Wire(service) as wire:
        wire.request(f"GET /v1/objects/{pages.key(0, 0, 3)} HTTP/1.0")
        assert wire.answer().body == pages.body(0, 0, 3)
        assert wire.ended()


def test_an_offer_to_upgrade_is_passed_over(service: Service, pages: Pages) -> None:
    offer = "Connection: Upgrade, HTTP2-Settings\nUpgrade: h2c\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA"
    with Wire(service) as wire:
        wire.request(f"{put_head(pages)}\n{offer}\nContent-Length: {SIZE}", pages.body(0, 0, 3))
        assert wire.answer().status == 201
        wire.request(f"GET /v1/objects/{pages.key(0, 0, 3)} HTTP/1.1\n{offer}")
        assert wire.answer().body == pages.body(0, 0, 3)


def test_a_request_in_single_bytes_is_understood(wire: Wire, pages: Pages) -> None:
    wire.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in f"{put_head(pages)}\r\nHost: l3\r\nContent-Length: {SIZE}\r\n\r\n".encode():
        wire.send(bytes([byte]))
    for at in range(0, SIZE, 7):
        wire.send(pages.body(0, 0, 3)[at : at + 7])
    assert wire.answer().status == 201


def test_a_method_that_is_not_offered_names_those_that_are(client: Client, pages: Pages) -> None:
    answer = client.http.request("PATCH", f"/v1/objects/{pages.key(0, 0, 3)}", content=b"")
    assert answer.status_code == 405
    assert answer.headers["Allow"] == "DELETE, GET, HEAD, PUT"
    assert answer.headers["content-type"] == "application/problem+json"
    assert client.http.get("/v1/pages/match").headers["Allow"] == "POST"


@pytest.mark.parametrize(
    "path",
    ["/", "/v1", "/v1/", "/v1/objects", "/v1/namespaces/", "/v2/objects/x", "/v1/pages/match/", "//v1/namespaces"],
)
def test_what_is_no_resource_is_404(client: Client, path: str) -> None:
    answer = client.http.get(path, follow_redirects=False)
    assert answer.status_code == 404
    check_document(answer.json(), 404, "not a resource")
