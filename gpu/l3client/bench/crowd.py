"""One of the services of the case ``many``: filled, killed and started again, read from, and its figures of a round."""

from __future__ import annotations

import time
from collections.abc import Sequence

from l3client.bench.contender import MismatchError
from l3client.bench.memory import clear, equal
from l3client.bench.process import cpu_seconds, resident_bytes, settled_cpu_seconds
from l3client.bench.rounds import Sample
from l3client.bench.service import WRITE_OBJECTS, Service, whole, write_all
from l3client.bench.workload import CELL, Item, Workload, namespace, page_hash
from l3client.transport import L3Client
from l3store.layout import Coordinate, Key, Namespace

PAGE_OBJECTS = 4
_MATCH_PAGES = 8192


class Crowd:
    """A service that stores ``tiny`` objects of 256 bytes besides those that are read.

    ``resident`` are the bytes of memory that it had when it had started and came to rest; ``parts`` go into `sample`.
    """

    def __init__(self, name: str, service: Service, work: Workload, tiny: int) -> None:
        self.name = name
        self.service = service
        self.tiny = tiny
        self.resident = 0
        self.parts: dict[str, float] = {}
        self._work = work
        self._client: L3Client | None = None
        self._stored_in = 0.0
        self._spaces = namespace("many/tiny", layers=1, partition=1, groups=PAGE_OBJECTS, tiny=True)
        self._hashes: list[str] = []
        self._begin()

    @property
    def about(self) -> str:
        rate = self.tiny / self._stored_in
        return f"l3store --ack file with {self.tiny:,} tiny objects, stored by pages/write at {rate:,.0f} a second"

    def fill(self, spaces: Namespace, items: Sequence[Item]) -> None:
        """Start, and store everything. Raises RuntimeError where an object was not stored."""
        self.service.start()
        self._client = client = self.service.client(1)
        client.register(spaces)
        write_all(client, items)
        client.register(self._spaces)
        began = time.perf_counter()
        for at in range(0, self.tiny, WRITE_OBJECTS):
            write_all(client, self._tiny(min(WRITE_OBJECTS, self.tiny - at)))
        self._stored_in = time.perf_counter() - began

    def kill(self) -> None:
        """By SIGKILL: nothing is written down at the end that would help the next start."""
        self._disconnect()
        self.service.kill()

    def start(self) -> None:
        """Start until ready and at rest; a new sample begins."""
        self._begin()
        self.parts["ready"] = self.service.start()
        settled_cpu_seconds(self.service.pids)
        self.resident = resident_bytes(self.service.pids)
        self.parts["resident_bytes"] = self.resident
        self._client = self.service.client(1)

    def read(self, items: Sequence[Item], *, timed: bool = True) -> None:
        """GET objects of 64 KiB one after the other, then compare. Raises `MismatchError`."""
        client = self._client
        assert client is not None
        # Any of them may come together in a group: their places are those of the group.
        into = [self._work.into[i * CELL : (i + 1) * CELL] for i in range(len(items))]
        clear(self._work.into[: len(items) * CELL])
        pids = self.service.pids
        server_before, client_before = cpu_seconds(pids), time.process_time()
        latencies: list[float] = []
        for item, view in zip(items, into, strict=True):
            at = time.perf_counter()
            client.get(item.key, view, cell_bytes=CELL)
            latencies.append(time.perf_counter() - at)
        client_cpu, server_cpu = time.process_time() - client_before, cpu_seconds(pids) - server_before
        for item, view in zip(items, into, strict=True):
            if not equal(view, item.data):
                raise MismatchError(f"{self.name} gave other bytes of {item.key} than were written")
        if timed:
            self._latencies += latencies
            self._moved += sum(len(item.data) for item in items)
            self._client_cpu += client_cpu
            self._server_cpu += server_cpu

    def check_known(self) -> None:
        """Raises `MismatchError` unless the service knows every page that was stored."""
        assert self._client is not None
        for at in range(0, len(self._hashes), _MATCH_PAGES):
            asked = self._hashes[at : at + _MATCH_PAGES]
            found = self._client.control.match(whole(self._spaces), asked)
            if found != len(asked):
                raise MismatchError(f"{self.name} started without the page {asked[found]}, which was stored")

    def sample(self) -> Sample:
        """What was measured since the start."""
        return Sample(
            seconds=sum(self._latencies),
            moved=self._moved,
            latencies=tuple(self._latencies),
            client_cpu=self._client_cpu,
            server_cpu=self._server_cpu,
            settled_cpu=self._server_cpu,
            parts=self.parts,
        )

    def stop(self) -> None:
        """Stopped for good; what it stores is about to be removed."""
        self.kill()

    def _begin(self) -> None:
        self.parts = {}
        self._latencies: list[float] = []
        self._moved = 0
        self._client_cpu = self._server_cpu = 0.0

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _tiny(self, count: int) -> list[Item]:
        """Objects of new pages, `PAGE_OBJECTS` each; all of the same bytes."""
        cell = self._spaces.cell_bytes
        data = self._work.source[:cell]
        hashes = [page_hash() for _ in range(0, count, PAGE_OBJECTS)]
        self._hashes += hashes
        return [
            Item(Key(hashes[i // PAGE_OBJECTS], self._spaces.digest, Coordinate(0, 1, i % PAGE_OBJECTS)), data, 0, cell)
            for i in range(count)
        ]
