"""Object bytes through the service and our client, beside the bare sockets of the same machine in the same run.

Every round measures each kind once, one after the other, and compares it with that round's own ceiling: a process that
does nothing but `send` from memory, or `recv_into`, over loopback. Prints medians of the ratios over the rounds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe

from l3client.demo.service import own_service
from l3client.transport import Body, L3Client, Order, Part
from l3store.layout import Coordinate, Fields, Geometry, Key, Namespace, PlannedObject, Shard, plan_reads

NAMESPACE = Namespace(
    fields=Fields(
        model_id="benchmark", dtype="bfloat16", page_size=64, rank_replicated=False, total_kv_heads=8,
        layer_partition=30, head_group=2,
    ),
    geometry=Geometry(num_layers=60, head_dim=128, itemsize=2),
)  # fmt: skip
BATCH = 4 << 20


def ceiling_server(pipe: Pipe) -> None:
    """Answer b"S" by sending, b"R" by receiving, as many bytes as the 8 that follow say."""
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname()[1])
    connection, _ = listener.accept()
    block = memoryview(bytearray(BATCH))
    while command := connection.recv(9, socket.MSG_WAITALL):
        left = int.from_bytes(command[1:], "little")
        while left:
            part = block[: min(left, BATCH)]
            left -= connection.send(part) if command[:1] == b"S" else connection.recv_into(part)
        if command[:1] == b"R":
            connection.sendall(b".")


class Ceiling:
    """What two processes move over one bare socket."""

    def __init__(self) -> None:
        here, there = multiprocessing.Pipe()
        self._process = multiprocessing.Process(target=ceiling_server, args=(there,), daemon=True)
        self._process.start()
        self._socket = socket.create_connection(("127.0.0.1", here.recv()))

    def get(self, into: memoryview) -> None:
        self._socket.sendall(b"S" + len(into).to_bytes(8, "little"))
        got = 0
        while got < len(into):
            got += self._socket.recv_into(into[got:])

    def put(self, data: memoryview) -> None:
        self._socket.sendall(b"R" + len(data).to_bytes(8, "little"))
        self._socket.sendall(data)
        self._socket.recv(1)


def seconds(work: Callable[..., object], *args: object, **kwargs: object) -> float:
    began = time.perf_counter()
    work(*args, **kwargs)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--pages", type=int, default=4, help="pages of 15 MiB in one call")
    args = parser.parse_args()
    shard = Shard(layers=NAMESPACE.layers, heads=NAMESPACE.heads)
    plan = plan_reads(NAMESPACE, shard)
    part = Part(NAMESPACE.digest, plan.layers, plan.heads)
    size = plan.shape.page_bytes
    data = memoryview(bytearray(os.urandom(size * args.pages)))
    into = memoryview(bytearray(len(data)))
    views = [into[i * size : (i + 1) * size] for i in range(args.pages)]
    ceiling = Ceiling()
    ratios: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {}

    def note(kind: str, moved: int, took: float, base: float) -> None:
        rates.setdefault(kind, []).append(moved / took / 1e9)
        ratios.setdefault(kind, []).append(moved / took / base)

    with own_service() as url, L3Client(url) as client:
        client.register(NAMESPACE)
        for _ in range(args.rounds + 1):
            hashes = [os.urandom(32).hex() for _ in range(args.pages)]
            bodies = [body(data, i * size, h, o) for i, h in enumerate(hashes) for o in plan.objects]
            base_put = len(data) / seconds(ceiling.put, data)
            base_get = len(data) / seconds(ceiling.get, into)
            note("bare put", len(data), len(data) / base_put, base_put)
            note(
                "write_pages",
                len(data),
                seconds(client.write_pages, bodies, cell_bytes=plan.shape.cell_bytes),
                base_put,
            )
            note("bare get", len(data), len(data) / base_get, base_get)
            for order in Order:
                into[:] = bytes(len(into))
                took = seconds(client.read_pages, part, hashes, plan.shape, views, order=order)
                note(f"read_pages, {order} order", len(data), took, base_get)
                assert into == data
            one = bodies[0]
            key = Key(one.key.page_hash, NAMESPACE.digest, Coordinate(0, 30, 0))
            took = seconds(client.get, key, into[: len(one.data)], cell_bytes=plan.shape.cell_bytes)
            note("get, 1.9 MiB", len(one.data), took, base_get)
    print(f"{'':<26}{'GB/s':>8}{'of ceiling':>12}   medians of {args.rounds} rounds, {len(data) >> 20} MiB a call")
    for kind, values in ratios.items():
        print(f"{kind:<26}{statistics.median(rates[kind][1:]):>8.2f}{statistics.median(values[1:]):>12.2f}")


def body(data: memoryview, page: int, page_hash: str, planned: PlannedObject) -> Body:
    span = data[page + planned.span.offset : page + planned.span.end]
    return Body(Key(page_hash, NAMESPACE.digest, planned.coordinate), span)


if __name__ == "__main__":
    main()
