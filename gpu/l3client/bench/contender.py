"""What takes part: the protocol, and the base of those whose client runs in this process.

The load is made by threads of one process, one for each connection. Python's socket calls release the interpreter lock,
and with bare sockets four threads moved no fewer bytes than four client processes did (more, on two cores), so that
threads are used for the ceiling, for us and for every peer alike.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from l3client.bench.memory import clear, equal
from l3client.bench.workload import WRITES, Batch, Case, Item, Kind, Workload, items_of

CONNECTIONS = 4


class NotFoundError(Exception):
    """A peer is not installed: what was looked for."""


class MismatchError(Exception):
    """Other bytes came than were written."""


@dataclass(frozen=True, slots=True)
class Timing:
    """What one measurement gave. ``latencies`` are seconds of single operations; ``parts`` are times of its own."""

    seconds: float
    moved: int
    latencies: tuple[float, ...]
    parts: dict[str, float] = field(default_factory=dict)


class Contender(Protocol):
    """Someone who can do some of the cases. Only `run` is timed.

    start    start servers and store what the reading cases read. Raises `NotFoundError` and `StartError`.
    prepare  make the next `run` possible, and its result impossible to take for an older one's
    run      do the case once
    verify   compare every byte; how many were. Raises `MismatchError`
    clean    remove what the run stored

    ``required``: its failure is the run's; others are named and left out. ``server_pids`` and ``client_pids`` are
    those of its own processes now; a client in this process is not among them.
    """

    @property
    def name(self) -> str: ...

    @property
    def about(self) -> str: ...

    @property
    def kinds(self) -> frozenset[Kind]: ...

    @property
    def required(self) -> bool: ...

    @property
    def server_pids(self) -> list[int]: ...

    @property
    def client_pids(self) -> list[int]: ...

    def start(self) -> None: ...

    def prepare(self, case: Case, turn: int) -> None: ...

    def run(self, case: Case) -> Timing: ...

    def verify(self, case: Case) -> int: ...

    def clean(self, case: Case) -> None: ...

    def stop(self) -> None: ...


class Handle:
    """One connection of a contender, used by one thread at a time."""

    def get(self, item: Item, into: memoryview) -> None:
        """Read an object into ``into``, of exactly its length."""
        raise NotImplementedError

    def put(self, item: Item) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """Return once everything that was put is there; timed."""

    def close(self) -> None:
        """Disconnect."""


class Threaded:
    """A contender of handles in this process. Subclasses say how to start, connect and remove."""

    name = ""
    about = ""
    kinds: frozenset[Kind] = frozenset({Kind.GET, Kind.PUT, Kind.READ, Kind.WRITE, Kind.SMALL})
    required = False

    def __init__(self, work: Workload, folder: Path) -> None:
        self.work = work
        self.folder = folder
        self.handles: list[Handle] = []
        self._items: tuple[Item, ...] = ()
        self._batches: tuple[Batch, ...] = ()

    @property
    def server_pids(self) -> list[int]:
        return []

    @property
    def client_pids(self) -> list[int]:
        return []

    def launch(self) -> None:
        """Start the servers."""

    def connect(self) -> Handle:
        raise NotImplementedError

    def remove(self, items: Sequence[Item]) -> None:
        """Forget what was put."""

    def halt(self) -> None:
        """Stop the servers."""

    def load(self) -> None:
        """Store what the reading cases read."""
        items: list[Item] = []
        if Kind.GET in self.kinds:
            items += self.work.big
        if self.kinds & {Kind.READ, Kind.SMALL}:
            items += items_of(self.work.batches)
        if Kind.MATCH in self.kinds:
            items += self.work.match.items
        for item in items:
            self.handles[0].put(item)
        self.handles[0].finish()

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.launch()
        self.handles = [self.connect() for _ in range(CONNECTIONS)]
        self.load()

    def stop(self) -> None:
        for handle in self.handles:
            handle.close()
        self.handles = []
        self.halt()

    def prepare(self, case: Case, turn: int) -> None:
        if case.kind is Kind.GET:
            self._items = self.work.gets
        elif case.kind is Kind.SMALL:
            self._items = self.work.small
        elif case.kind is Kind.READ:
            self._batches = self.work.batches
        elif case.kind is Kind.PUT:
            self._items = self.fresh_objects(turn)
        elif case.kind is Kind.WRITE:
            self._batches = self.fresh_batches(turn)
        clear(self.work.into[: self.work.moved_bytes])

    def fresh_objects(self, turn: int) -> tuple[Item, ...]:
        return self.work.fresh_objects(turn)[1]

    def fresh_batches(self, turn: int) -> tuple[Batch, ...]:
        return self.work.fresh_batches(turn)[1]

    def run(self, case: Case) -> Timing:
        if case.kind in {Kind.GET, Kind.SMALL}:
            return self._each(self._items, case.connections, self._get)
        if case.kind is Kind.PUT:
            return self._each(self._items, case.connections, self._put)
        if case.kind is Kind.MATCH:
            return self._match()
        work = self.read_batch if case.kind is Kind.READ else self.write_batch
        latencies: list[float] = []
        began = time.perf_counter()
        for batch in self._batches:
            at = time.perf_counter()
            work(batch)
            latencies.append(time.perf_counter() - at)
        return Timing(time.perf_counter() - began, sum(b.length for b in self._batches), tuple(latencies))

    def verify(self, case: Case) -> int:
        into = self.work.into
        if case.kind is Kind.MATCH:
            return 0
        items = items_of(self._batches) if case.kind in {Kind.READ, Kind.WRITE} else self._items
        if case.kind is Kind.PUT:
            for item in items:
                self.handles[0].get(item, into[item.at : item.end])
        elif case.kind is Kind.WRITE:
            for batch in self._batches:
                self.read_batch(batch)
        check(items, into, self.name)
        return sum(len(item.data) for item in items)

    def clean(self, case: Case) -> None:
        if case.kind in WRITES:
            self.remove(self._items if case.kind is Kind.PUT else items_of(self._batches))

    def read_batch(self, batch: Batch) -> None:
        """All objects of a batch into their places: here one by one, over all connections."""
        self._each(batch.items, CONNECTIONS, self._get)

    def write_batch(self, batch: Batch) -> None:
        self._each(batch.items, CONNECTIONS, self._put)

    def find(self, batch: Batch) -> int:
        """How many objects of a batch are there."""
        raise NotImplementedError

    def _match(self) -> Timing:
        latencies: list[float] = []
        began = time.perf_counter()
        for _ in range(self.work.sizes.match_calls):
            at = time.perf_counter()
            found = self.find(self.work.match)
            latencies.append(time.perf_counter() - at)
            if found != len(self.work.match.items):
                raise MismatchError(f"{self.name} found {found} of {len(self.work.match.items)} objects")
        return Timing(time.perf_counter() - began, 0, tuple(latencies))

    def _get(self, handle: Handle, item: Item) -> None:
        handle.get(item, self.work.into[item.at : item.end])

    @staticmethod
    def _put(handle: Handle, item: Item) -> None:
        handle.put(item)

    def _each(self, items: Sequence[Item], connections: int, act: Callable[[Handle, Item], None]) -> Timing:
        """Each connection takes a run of the items, in a thread of its own; one alone works in this thread."""
        shares = [
            items[i * len(items) // connections : (i + 1) * len(items) // connections] for i in range(connections)
        ]

        def work(index: int) -> list[float]:
            handle = self.handles[index]
            took: list[float] = []
            for item in shares[index]:
                at = time.perf_counter()
                act(handle, item)
                took.append(time.perf_counter() - at)
            handle.finish()
            return took

        seconds, latencies = together(work, connections)
        return Timing(seconds, sum(len(item.data) for item in items), tuple(latencies))


def together(work: Callable[[int], list[float]], count: int) -> tuple[float, list[float]]:
    """Run ``work(0)`` to ``work(count - 1)`` at once; seconds from the common start to the last end, and results.

    Raises what one of them raised.
    """
    if count == 1:
        began = time.perf_counter()
        alone = work(0)
        return time.perf_counter() - began, alone
    line = threading.Barrier(count + 1)
    results: list[list[float]] = [[] for _ in range(count)]
    errors: list[BaseException] = []

    def run(index: int) -> None:
        line.wait()
        try:
            results[index] = work(index)
        except BaseException as error:  # noqa: BLE001  # it is raised in the thread that waits
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    line.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    if errors:
        raise errors[0]
    return seconds, [latency for result in results for latency in result]


def check(items: Sequence[Item], into: memoryview, name: str) -> None:
    """Compare what lies in ``into`` with what was written. Raises `MismatchError` naming the first that differs."""
    for item in items:
        if not equal(into[item.at : item.end], item.data):
            raise MismatchError(f"{name} gave other bytes of {item.key} than were written")
