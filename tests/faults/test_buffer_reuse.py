"""Memory is used again, but not before the last byte of it has left, however slow the reader.

Every object is one byte value, over and over. Slow readers stop in the middle of their answers; meanwhile what they
read is evicted, deleted and written over with other values; then they go on. The same with writers that stop.
"""

from __future__ import annotations

import importlib.util
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from l3store.layout import Fields, Geometry, Namespace
from tests.support import Client, Service, Wire, page_hashes

CELL = 256 << 10
OBJECT = 8 * CELL
NAMESPACE = Namespace(
    fields=Fields(
        model_id="org/reuse", dtype="bfloat16", page_size=64, rank_replicated=False,
        total_kv_heads=8, layer_partition=8, head_group=8,
    ),
    geometry=Geometry(num_layers=8, head_dim=128, itemsize=2),
)  # fmt: skip


def key(name: str, at: int) -> str:
    return f"{page_hashes(name, at + 1)[at]}_{NAMESPACE.digest}_L0-8_H0"


def value(at: int) -> bytes:
    return bytes([at % 251 + 1])


def body(at: int) -> bytes:
    return value(at) * OBJECT


@pytest.fixture(params=["asyncio", "uvloop"])
def service(request: pytest.FixtureRequest, start_service: Callable[..., Service], tmp_path: Path) -> Iterator[Service]:
    if request.param == "uvloop" and importlib.util.find_spec("uvloop") is None:
        pytest.skip("uvloop is not installed")
    # Ten objects fill it: everything is evicted again and again.
    running = start_service(
        tmp_path / "data", "--loop", request.param, "--ram", "24Mi", "--hot", "24Mi", "--capacity", "200M"
    )
    with closing(Client(running.url)) as client:
        client.register(NAMESPACE)
    yield running
    assert running.process.poll() is None, running.log
    assert "Traceback" not in running.log


def slow(service: Service) -> Wire:
    """A connection that takes little at once."""
    wire = Wire(service, timeout=60)
    wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
    return wire


def churn(client: Client, name: str, objects: int) -> None:
    """Write and read so much that all memory is used for something else."""
    for at in range(objects):
        assert client.put(key(name, at), body(at + 7)).status_code == 201
        assert client.get(key(name, at)).content == body(at + 7)


def test_what_a_slow_reader_was_promised_is_what_it_gets(service: Service) -> None:
    with ExitStack() as stack:
        client = stack.enter_context(closing(Client(service.url)))
        for name in ("gone", "kept"):
            for at in range(4):
                assert client.put(key(name, at), body(at)).status_code == 201
                # From memory, or from the disk into memory.
                assert client.get(key(name, at)).content == body(at)
        readers = [stack.enter_context(slow(service)) for _ in range(4)]
        for at in range(2):
            readers[at].request(f"GET /v1/objects/{key('gone', at)} HTTP/1.1")
        for reader, order in zip(readers[2:], ("page", "layer"), strict=True):
            asked = {"namespace": NAMESPACE.digest, "page_hashes": page_hashes("kept", 4), "order": order}
            text = json.dumps(asked | {"sums": True}).encode()
            reader.request(
                f"POST /v1/pages/read HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(text)}", text
            )
        begun = [reader.socket.recv(2000) for reader in readers]
        for at in range(2):
            assert client.http.delete(f"/v1/objects/{key('gone', at)}").status_code == 204
        churn(client, "churn", 16)
        for reader, data in zip(readers, begun, strict=True):
            reader._buffer = data
        for at in range(2):
            assert readers[at].answer().body == body(at)
        sums = 8 * 4 * (OBJECT // CELL)
        assert readers[2].answer().body[:-sums] == b"".join(map(body, range(4)))
        assert readers[3].answer().body[:-sums] == b"".join(value(at) * CELL for at in range(4)) * (OBJECT // CELL)


def test_what_a_slow_writer_sends_is_what_is_stored(service: Service) -> None:
    with ExitStack() as stack:
        client = stack.enter_context(closing(Client(service.url)))
        writers = [stack.enter_context(Wire(service, timeout=60)) for _ in range(3)]
        for at, writer in enumerate(writers):
            writer.request(
                f"PUT /v1/objects/{key('writer', at)} HTTP/1.1\r\nContent-Length: {OBJECT}", body(at)[:100_000]
            )
        churn(client, "between", 12)
        for at, writer in enumerate(writers):
            writer.send(body(at)[100_000 : OBJECT // 2])
        churn(client, "again", 12)
        for at, writer in enumerate(writers):
            writer.send(body(at)[OBJECT // 2 :])
            assert writer.answer().status == 201
        for at in range(3):
            assert client.get(key("writer", at)).content == body(at)
