"""What tests of the client share: KV with known bytes, workers with pools, servers and proxies that misbehave."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from l3client.breaker import BackOff
from l3client.connector import Connector, StagingOptions
from l3client.pools import KVPool, MHAPool, MLAPool
from l3client.transport import L3Client, Timeouts
from l3store.errors import L3Error
from l3store.layout import Namespace, Shard, SplitGroupError, Topology
from tests.support import Service, page_hashes

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
FILL = 0xA5
"""What every byte of a pool is before anything is restored into it."""

SHORT = Timeouts(connect=0.15, read=0.15, write=0.15, pool=0.15)
"""For what is meant to run into them."""

PATIENT = Timeouts(connect=8, read=8, write=8, pool=8)
"""For what is not, however busy the machine."""

Bytes = npt.NDArray[np.uint8]


class Truth:
    """KV of a whole model with known bytes: for each component, [page, layer, token, head, byte of the row]."""

    def __init__(self, namespace: Namespace, seed: str, pages: int) -> None:
        self.namespace = namespace
        self.hashes = page_hashes(seed, pages)
        shape = namespace.shape()
        random = np.random.default_rng(list(seed.encode()))
        self.components: list[Bytes] = [
            random.integers(
                0, 256, (pages, shape.layers, shape.page_size, shape.groups * shape.group_heads, row), dtype=np.uint8
            )
            for row in shape.row_bytes
        ]

    def object(self, page: int, first_layer: int, end_layer: int, group: int) -> bytes:
        """The bytes that the layout gives a run of layers of a head group: (layer, K/V, token, head in group, dim)."""
        size = self.namespace.fields.head_group or 1
        cells = [
            component[page, layer, :, group * size : (group + 1) * size].tobytes()
            for layer in range(first_layer, end_layer)
            for component in self.components
        ]
        return b"".join(cells)


class Worker:
    """One rank: a pool that is all `FILL`, and its connector."""

    def __init__(
        self,
        client: L3Client,
        namespace: Namespace,
        shard: Shard,
        *,
        num_pages: int,
        read_only: bool = False,
        staging: StagingOptions | None = None,
        back_off: BackOff | None = None,
    ) -> None:
        self.shard = shard
        self.pool = make_pool(namespace, shard, num_pages)
        # Small: what the engine wants of staging costs a quarter of a second for each rank.
        staging = staging or StagingOptions(buffer_bytes=1 << 20, buffers=3)
        self.connector = Connector(
            client, namespace, shard, self.pool, read_only=read_only, staging=staging, back_off=back_off
        )

    def __enter__(self) -> Self:
        self.connector.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.connector.__exit__(kind, error, trace)

    def fill(self, truth: Truth, page_ids: Sequence[int]) -> None:
        """Put the first pages of the truth, or the part of them that this rank holds, into the pool's pages."""
        for held, true in self._pairs(truth, page_ids):
            held[list(page_ids)] = true.clone()

    def holds(self, truth: Truth, page_ids: Sequence[int]) -> bool:
        """Whether the pool's pages are the first pages of the truth, bit for bit."""
        return all(torch.equal(held[list(page_ids)], true) for held, true in self._pairs(truth, page_ids))

    def untouched(self, page_ids: Sequence[int]) -> bool:
        """Whether no byte was written to any of these pages of the pool."""
        layers = (tensor for layer in range(self.pool.num_layers) for tensor in self.pool.layer(layer))
        return all(bool((_paged(tensor, self.pool)[list(page_ids)] == FILL).all()) for tensor in layers)

    def _pairs(self, truth: Truth, page_ids: Sequence[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        heads = slice(None) if self.shard.heads is None else slice(self.shard.heads.start, self.shard.heads.end)
        for local, layer in enumerate(self.shard.layers):
            for tensor, component in zip(self.pool.layer(local), truth.components, strict=True):
                true = np.ascontiguousarray(component[: len(page_ids), layer, :, heads])
                yield _paged(tensor, self.pool), torch.from_numpy(true)


def make_pool(namespace: Namespace, shard: Shard, num_pages: int) -> KVPool:
    """A pool for a shard, every byte `FILL`."""
    shape = namespace.shape()
    dtype = DTYPES[namespace.fields.dtype]
    heads = [] if shard.heads is None else [len(shard.heads)]
    components = [
        [
            torch.full([num_pages * shape.page_size, *heads, row], FILL, dtype=torch.uint8).view(dtype)
            for _ in shard.layers
        ]
        for row in shape.row_bytes
    ]
    if shard.heads is None:
        return MLAPool(components[0], page_size=shape.page_size)
    return MHAPool(components[0], components[1], page_size=shape.page_size)


@contextlib.contextmanager
def deployment(
    client: L3Client, namespace: Namespace, topology: Topology, *, num_pages: int, staging: StagingOptions | None = None
) -> Iterator[list[Worker]]:
    """All ranks of a deployment, attached; those that cannot write the grid are read-only."""
    with contextlib.ExitStack() as stack:
        workers = []
        for shard in topology.shards(namespace):
            try:
                worker = Worker(client, namespace, shard, num_pages=num_pages, staging=staging)
            except SplitGroupError:
                worker = Worker(client, namespace, shard, num_pages=num_pages, staging=staging, read_only=True)
            workers.append(stack.enter_context(worker))
        client.register(namespace)
        yield workers


def back_up(workers: Sequence[Worker], truth: Truth, page_ids: Sequence[int]) -> int:
    """Fill the pools with the truth and store it; how many leading pages every rank has stored."""
    for worker in workers:
        worker.fill(truth, page_ids)
    transfers = [w.connector.backup(truth.hashes[: len(page_ids)], page_ids) for w in workers]
    return min(transfer.wait(60) for transfer in transfers)


def restore(workers: Sequence[Worker], truth: Truth, page_ids: Sequence[int]) -> int:
    """Restore the truth into the pools; how many leading pages every rank has."""
    transfers = [w.connector.restore(truth.hashes[: len(page_ids)], page_ids) for w in workers]
    return min(transfer.wait(60) for transfer in transfers)


def _paged(tensor: torch.Tensor, pool: KVPool) -> torch.Tensor:
    return tensor.view(pool.num_pages, pool.page_size, *tensor.shape[1:])


def revive(service: Service) -> None:
    """Start a service that ended again, on the same port and folder, and wait until it has its index."""
    port = service.address[1]
    command = [sys.executable, "-m", "l3store", "serve", "--port", str(port), "--data-dir", str(service.data_dir)]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("L3STORE_")}
    with service.output.open("ab") as output:
        service.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=inherited)
    end = time.monotonic() + 40
    with L3Client(service.url) as client:
        while True:
            try:
                client.control.namespaces()
            except L3Error:
                assert time.monotonic() < end, service.log
                assert service.process.poll() is None, service.log
                time.sleep(0.05)
            else:
                return


class ScriptedServer:
    """A server that does what a test says with each connection, on a thread of its own, until it returns."""

    def __init__(self, script: Callable[[socket.socket, int], None], *, backlog: int = 64) -> None:
        """``script(connection, number)``; connections are numbered from 0."""
        self._script = script
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=backlog)
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self.accepted = 0
        self.failures: list[BaseException] = []
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # shutdown, not only close: it is what wakes a thread in accept or recv.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join(10)
        self._listener.close()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        assert not self.failures, self.failures

    def _accept(self) -> None:
        for number in itertools.count():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._open.append(connection)
                self.accepted += 1
            thread = threading.Thread(target=self._serve, args=(connection, number), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        with connection:
            try:
                self._script(connection, number)
            except OSError:
                pass  # the client went away, as it may
            except BaseException as error:  # noqa: BLE001 - shown at the end of the test
                self.failures.append(error)
            with self._lock:
                self._open.remove(connection)


def read_request(connection: socket.socket) -> tuple[str, bytes]:
    """One request, whole: its head and its body. Raises ConnectionError where the client has closed."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += _some(connection)
    head, _, body = received.partition(b"\r\n\r\n")
    text = head.decode("latin-1")
    length = next((int(line[15:]) for line in text.split("\r\n") if line.lower().startswith("content-length:")), 0)
    while len(body) < length:
        body += _some(connection)
    return text, body


def _some(connection: socket.socket) -> bytes:
    data = connection.recv(1 << 18)
    if not data:
        raise ConnectionError("closed")
    return data


def answer(status: str, body: bytes = b"", *headers: str) -> bytes:
    """An HTTP answer with a right Content-Length."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


def hold(connection: socket.socket) -> None:
    """Keep a connection open, reading nothing, until the other side or the end of the test closes it."""
    poller = select.poll()
    poller.register(connection, select.POLLRDHUP)
    poller.poll(20_000)


class LastPieceError(Exception):
    """Raised by `Proxy.on_answer`: pass ``data`` on, then close the connection."""

    def __init__(self, data: bytes) -> None:
        super().__init__(f"{len(data)} bytes")
        self.data = data


class Proxy:
    """Stands between a client and a service, and may hold up, change or cut what passes.

    ``on_request(count, head)`` is called before the count-th request is passed on; ``on_answer(count, data)`` returns
    what to pass on of a piece of its answer. The count is of requests that begin with ``counting``; others pass
    untouched.
    """

    def __init__(
        self,
        service: Service,
        *,
        counting: str = "POST /v1/pages/read",
        on_request: Callable[[int, str], None] | None = None,
        on_answer: Callable[[int, bytes], bytes] | None = None,
    ) -> None:
        self._service = service
        self._counting = counting.encode()
        self._on_request = on_request
        self._on_answer = on_answer
        self._lock = threading.Lock()
        self.count = 0
        self._server = ScriptedServer(self._relay)

    @property
    def url(self) -> str:
        return self._server.url

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.__exit__()

    def _relay(self, client: socket.socket, _number: int) -> None:
        with socket.create_connection(self._service.address, 10) as upstream:
            upstream.settimeout(None)
            current: list[int | None] = [None]
            back = threading.Thread(target=self._back, args=(upstream, client, current), daemon=True)
            back.start()
            try:
                while data := client.recv(1 << 18):
                    if data.startswith((b"POST ", b"PUT ", b"GET ", b"DELETE ")):
                        current[0] = self._begin(data)
                    upstream.sendall(data)
            finally:
                with contextlib.suppress(OSError):
                    upstream.shutdown(socket.SHUT_RDWR)
                back.join(10)

    def _begin(self, data: bytes) -> int | None:
        if not data.startswith(self._counting):
            return None
        with self._lock:
            count = self.count
            self.count += 1
        if self._on_request is not None:
            self._on_request(count, data.partition(b"\r\n\r\n")[0].decode("latin-1"))
        return count

    def _back(self, upstream: socket.socket, client: socket.socket, current: list[int | None]) -> None:
        try:
            while piece := upstream.recv(1 << 16):
                if self._on_answer is not None and current[0] is not None:
                    piece = self._on_answer(current[0], piece)
                client.sendall(piece)
        except LastPieceError as last:
            with contextlib.suppress(OSError):
                client.sendall(last.data)
        except OSError:
            pass  # either side went away, as they may
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)
