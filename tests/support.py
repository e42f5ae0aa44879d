"""What tests of the service share: a running service, small models, and an independent model of the layout."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import numpy as np
import numpy.typing as npt
from prometheus_client.parser import text_string_to_metric_families

from l3store.layout import Extension, Fields, Geometry, Namespace
from l3store.layout.sums import encode_sums, sum_cells

START_SECONDS = 40.0
PROBLEM = "application/problem+json"


@dataclass
class Service:
    """A running `l3store serve`."""

    url: str
    data_dir: Path
    process: subprocess.Popen[bytes]
    output: Path

    @property
    def address(self) -> tuple[str, int]:
        parts = httpx.URL(self.url)
        assert parts.port is not None
        return parts.host, parts.port

    @property
    def log(self) -> str:
        """All that it printed and logged."""
        return self.output.read_text(errors="replace")

    def stop(self, sent: signal.Signals = signal.SIGTERM) -> int:
        """End it, and wait; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(sent)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait(10)

    def partials(self) -> list[Path]:
        """Files of writes that are not visible: under way, or left behind."""
        return self.files("tmp") + [path for path in self.files() if path.suffix == ".partial"]

    def files(self, folder: str = "objects") -> list[Path]:
        return sorted(path for path in (self.data_dir / folder).rglob("*") if path.is_file())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def launch(data_dir: Path, *args: str, ready: bool = True, env: dict[str, str] | None = None) -> Service:
    """Start a service on a free port. With ``ready`` it has its index when this returns."""
    port = free_port()
    output = data_dir.with_name(f"{data_dir.name}.{port}.out")
    # Nothing is kept in memory where a test does not ask for it: what happens to files would not be seen.
    place = ["--port", str(port), "--data-dir", str(data_dir), "--hot", "0"]
    command = [sys.executable, "-m", "l3store", "serve", *place, *args]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("L3STORE_")}
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env={**inherited, **(env or {})})
    service = Service(f"http://127.0.0.1:{port}", data_dir, process, output)
    try:
        _await(service, "/readyz" if ready else "/healthz")
    except BaseException:
        service.stop(signal.SIGKILL)
        raise
    return service


def _await(service: Service, path: str) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        assert service.process.poll() is None, service.log
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(service.url + path, timeout=5, trust_env=False).status_code == 200:
                return
        time.sleep(0.05)
    raise AssertionError(f"not ready in {START_SECONDS} s: {service.log}")


def tiny(
    model_id: str,
    *,
    layers: int = 6,
    heads: int = 4,
    head_group: int = 2,
    partition: int = 3,
    page_size: int = 4,
    head_dim: int = 8,
    dtype: str = "bfloat16",
    itemsize: int = 2,
    **extension: Any,
) -> Namespace:
    """A small model; ``heads`` 0 is MLA."""
    return Namespace(
        fields=Fields(
            model_id=model_id,
            dtype=dtype,
            page_size=page_size,
            rank_replicated=heads == 0,
            total_kv_heads=heads,
            layer_partition=partition,
            head_group=head_group if heads else 0,
        ),
        geometry=Geometry(num_layers=layers, head_dim=head_dim, itemsize=itemsize),
        extension=Extension(**extension),
    )


def page_hashes(seed: str, count: int) -> list[str]:
    return [hashlib.sha256(f"{seed}/{i}".encode()).hexdigest() for i in range(count)]


class Pages:
    """Pages of random KV as one array, its axes being the layout's: (page, group, layer, K/V, token, head, byte)."""

    def __init__(self, namespace: Namespace, seed: str, count: int) -> None:
        self.namespace = namespace
        self.hashes = page_hashes(seed, count)
        fields, geometry = namespace.fields, namespace.geometry
        mla = fields.rank_replicated
        self.array: npt.NDArray[np.uint8] = np.random.default_rng(int(self.hashes[0][:16], 16)).integers(
            0,
            256,
            size=(
                count,
                1 if mla else fields.total_kv_heads // fields.head_group,
                geometry.num_layers,
                1 if mla else 2,
                fields.page_size,
                1 if mla else fields.head_group,
                geometry.head_dim * geometry.itemsize,
            ),
            dtype=np.uint8,
        )

    def key(self, page: int, first: int, end: int, group: int | None = 0) -> str:
        suffix = "" if self.namespace.fields.rank_replicated else f"_H{group}"
        return f"{self.hashes[page]}_{self.namespace.digest}_L{first}-{end}{suffix}"

    def body(self, page: int, first: int, end: int, group: int | None = 0) -> bytes:
        return self.array[page, group or 0, first:end].tobytes()

    def sums(self, data: bytes) -> bytes:
        return sum_cells(data, self.cell_bytes)

    @property
    def cell_bytes(self) -> int:
        return int(np.prod(self.array.shape[3:]))

    def read(self, pages: slice, layers: slice, groups: slice, order: str) -> bytes:
        """What a read of the wire must give."""
        part = self.array[pages, groups, layers]
        if order == "layer":
            part = np.moveaxis(part, 2, 0)
        return part.tobytes()

    def read_sums(self, pages: slice, layers: slice, groups: slice, order: str) -> bytes:
        return self.sums(self.read(pages, layers, groups, order))


class Client:
    """Requests of the wire, spelled out."""

    def __init__(self, url: str) -> None:
        # Proxies of the environment have no part in a test.
        self.http = httpx.Client(base_url=url, timeout=30, trust_env=False, verify=False)

    def close(self) -> None:
        self.http.close()

    def register(self, namespace: Namespace, labels: dict[str, Any] | None = None) -> httpx.Response:
        body = namespace.to_wire() | ({} if labels is None else {"labels": labels})
        return self.http.put(f"/v1/namespaces/{namespace.digest}", json=body)

    def put(self, key: str, body: bytes, sums: bytes | None = None, *, once: bool = False) -> httpx.Response:
        headers = {} if sums is None else {"L3-Sums": encode_sums(sums)}
        if once:
            headers["If-None-Match"] = "*"
        return self.http.put(f"/v1/objects/{key}", content=body, headers=headers)

    def get(self, key: str, **headers: str) -> httpx.Response:
        return self.http.get(f"/v1/objects/{key}", headers=headers)

    def pages(self, what: str, namespace: Namespace, hashes: Sequence[str], **more: Any) -> httpx.Response:
        body = {"namespace": namespace.digest, "page_hashes": list(hashes), **more}
        return self.http.post(f"/v1/pages/{what}", json=body)

    def write(self, items: Sequence[tuple[str, bytes, bytes | None]]) -> httpx.Response:
        return self.http.post("/v1/pages/write", content=write_body(items))

    def put_page(self, pages: Pages, page: int, cuts: Sequence[tuple[int, int]]) -> None:
        """Store all head groups of a page, cut at these layers."""
        items: list[tuple[str, bytes, bytes | None]] = []
        for group in range(pages.array.shape[1]):
            for first, end in cuts:
                body = pages.body(page, first, end, group)
                items.append((pages.key(page, first, end, group), body, pages.sums(body)))
        answer = self.write(items)
        assert {r["status"] for r in answer.json()["results"]} <= {"created", "exists"}, answer.text


def write_body(items: Sequence[tuple[str, bytes, bytes | None]]) -> bytes:
    """The body of a batch write: keys, bodies, sums."""
    manifest = [
        {"key": key, "length": len(body)} | ({} if sums is None else {"sums": encode_sums(sums)})
        for key, body, sums in items
    ]
    return framed(manifest) + b"".join(body for _, body, _ in items)


def framed(manifest: Any) -> bytes:
    text = json.dumps(manifest).encode()
    return struct.pack("<I", len(text)) + text


def check_problem(answer: httpx.Response, status: int, *words: str) -> dict[str, Any]:
    """An RFC 9457 problem document that says these words."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == PROBLEM
    return check_document(answer.json(), status, *words)


def check_document(problem: Any, status: int, *words: str) -> dict[str, Any]:
    assert isinstance(problem, dict)
    assert problem["status"] == status
    assert problem["type"].startswith("urn:l3store:problem:")
    assert isinstance(problem["title"], str)
    assert problem["title"]
    for word in words:
        assert word.lower() in problem["detail"].lower(), problem["detail"]
    return problem


@dataclass
class Answer:
    """A response as it came over a socket."""

    status: int
    headers: dict[str, str]
    body: bytes


class Wire:
    """One connection, byte by byte."""

    def __init__(self, service: Service, timeout: float = 15.0) -> None:
        self.socket = socket.create_connection(service.address, timeout=timeout)
        self._buffer = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def request(self, head: str, body: bytes = b"") -> None:
        """Send a request; ``head`` has its lines."""
        lines = "\r\n".join(line.strip() for line in head.strip().splitlines())
        self.send(f"{lines}\r\nHost: l3\r\n\r\n".encode("latin-1") + body)

    def answer(self, *, head_only: bool = False) -> Answer:
        """Read one response."""
        head = self._until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        status = int(head[0].split(" ")[1])
        length = 0 if head_only or status in {100, 204, 304} else int(headers["content-length"])
        while len(self._buffer) < length:
            self._more()
        body, self._buffer = self._buffer[:length], self._buffer[length:]
        return Answer(status, headers, body)

    def problem(self, status: int, *words: str) -> Answer:
        """Read one response, which is a problem document."""
        answer = self.answer()
        assert answer.status == status, answer
        assert answer.headers["content-type"] == PROBLEM
        check_document(json.loads(answer.body), status, *words)
        return answer

    def ended(self) -> bool:
        """Whether the service ends the connection, in order, with nothing more to say."""
        return not self._buffer and self.socket.recv(1) == b""

    def _until(self, mark: bytes) -> bytes:
        while mark not in self._buffer:
            self._more()
        head, _, self._buffer = self._buffer.partition(mark)
        return head

    def _more(self) -> None:
        data = self.socket.recv(1 << 16)
        assert data, f"the connection ended within an answer: {self._buffer[:400]!r}"
        self._buffer += data


def wait_for(condition: Any, seconds: float = 10.0) -> None:
    """Wait until a call returns something true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass in time"
        time.sleep(0.02)


def counters(client: Client) -> dict[str, float]:
    """The sums of all samples of `/metrics`, by name."""
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(client.http.get("/metrics").text):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0) + sample.value
    return totals


def tree(folder: Path) -> dict[str, bytes]:
    """Every file of a folder and what it holds."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in _walk(folder)}


def _walk(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
