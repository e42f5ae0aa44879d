"""A process of Mooncake Store, run by a Python that has it: ``ROLE MASTER SEGMENT_BYTES [FD FD BYTES]``.

ROLE ``segment`` lends memory and waits. ROLE ``client`` reads a line of JSON, does it on memory that it shares with the
bench (what to send, what was received) and answers with a line of JSON. It imports nothing of ours.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import os
import sys
import threading
import time
from typing import Any

_LOCAL_BUFFER = 64 << 20
_mapped: list[mmap.mmap] = []


def address(fd: int, length: int) -> int:
    """Map shared memory for the life of this process."""
    mapped = mmap.mmap(fd, length)
    _mapped.append(mapped)
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def setup(master: str, segment: int) -> Any:
    store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    status = store.setup("127.0.0.1", "P2PHANDSHAKE", segment, _LOCAL_BUFFER, "tcp", "", master)
    if status:
        raise SystemExit(f"setup gave {status}")
    return store


class Client:
    """What the bench may order. ``places`` are offsets into the shared memory."""

    def __init__(self, store: Any, bases: dict[str, int]) -> None:
        self._store = store
        self._bases = bases

    def do(self, order: dict[str, Any]) -> dict[str, Any]:
        kind, names, sizes = order["do"], order["names"], order["sizes"]
        if kind == "find":
            return self._find(names, order["calls"])
        if kind == "remove":
            self._store.batch_remove(names, True)
            return {}
        base = self._bases["source" if kind.endswith("put") else "into"]
        places = [base + at for at in order["places"]]
        if kind.startswith("batch_"):
            return self._batches(kind, names, places, sizes, order["cuts"])
        return self._each(kind, names, places, sizes, order["threads"])

    def _find(self, names: list[str], calls: int) -> dict[str, Any]:
        latencies: list[float] = []
        found = 0
        for _ in range(calls):
            began = time.perf_counter()
            found = sum(self._store.batch_is_exist(names))
            latencies.append(time.perf_counter() - began)
        return {"seconds": sum(latencies), "latencies": latencies, "found": found}

    def _batches(
        self, kind: str, names: list[str], places: list[int], sizes: list[int], cuts: list[list[int]]
    ) -> dict[str, Any]:
        call = self._store.batch_put_from if kind == "batch_put" else self._store.batch_get_into
        latencies: list[float] = []
        failed: list[int] = []
        began = time.perf_counter()
        for start, end in cuts:
            at = time.perf_counter()
            failed += [status for status in call(names[start:end], places[start:end], sizes[start:end]) if status < 0]
            latencies.append(time.perf_counter() - at)
        return {"seconds": time.perf_counter() - began, "latencies": latencies, "failed": failed[:3]}

    def _each(self, kind: str, names: list[str], places: list[int], sizes: list[int], count: int) -> dict[str, Any]:
        call = self._store.put_from if kind == "put" else self._store.get_into
        line = threading.Barrier(count + 1)
        latencies: list[float] = []
        failed: list[int] = []

        def work(index: int) -> None:
            line.wait()
            for i in range(index * len(names) // count, (index + 1) * len(names) // count):
                at = time.perf_counter()
                status = call(names[i], places[i], sizes[i])
                latencies.append(time.perf_counter() - at)
                if status < 0:
                    failed.append(status)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
        for thread in threads:
            thread.start()
        line.wait()
        began = time.perf_counter()
        for thread in threads:
            thread.join()
        return {"seconds": time.perf_counter() - began, "latencies": latencies, "failed": failed[:3]}


def main() -> None:
    role, master, segment = sys.argv[1], sys.argv[2], int(sys.argv[3])
    # Mooncake logs to standard output too: ours goes to a copy of it.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    store = setup(master, segment)
    bases: dict[str, int] = {}
    if role == "client":
        length = int(sys.argv[6])
        for name, fd in (("source", sys.argv[4]), ("into", sys.argv[5])):
            bases[name] = address(int(fd), length)
            if store.register_buffer(bases[name], length):
                raise SystemExit("register_buffer failed")
    client = Client(store, bases)
    out.write('{"ready": true}\n')
    out.flush()
    for line in sys.stdin:
        out.write(json.dumps(client.do(json.loads(line))) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
