"""l3store itself, through its client. One service may stand behind several contenders: they differ in how they read."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from l3client.bench.contender import CONNECTIONS, Handle, Threaded, Timing, check
from l3client.bench.least_http import HttpHandle
from l3client.bench.memory import clear
from l3client.bench.service import Service, whole, write_all
from l3client.bench.workload import CELL, MODEL_GROUPS, Batch, Case, Item, Kind, Workload, items_of
from l3client.transport import L3Client, Order
from l3store.layout import Namespace


@dataclass
class SharedService:
    """A service that the first contender who needs it starts, and the last one stops."""

    service: Service
    registered: set[str] = field(default_factory=set)
    users: int = 0

    def join(self) -> None:
        """Raises `StartError`."""
        self.users += 1
        if not self.service.running:
            self.service.start()

    def leave(self) -> None:
        self.users -= 1
        if self.users == 0:
            self.service.stop()


class L3Handle(Handle):
    """One thread's use of the client that all share."""

    def __init__(self, client: L3Client) -> None:
        self.client = client

    def get(self, item: Item, into: memoryview) -> None:
        self.client.get(item.key, into, cell_bytes=item.cell_bytes)

    def put(self, item: Item) -> None:
        self.client.put(item.key, item.data, cell_bytes=item.cell_bytes)


class Ours(Threaded):
    """Objects by GET and PUT, batches by one call of `read_pages` or `write_pages`, sums on."""

    name = "l3store"
    about = "l3store --ack file, through its client, sums on; a batch is one call, pages/read in page order"
    kinds = Threaded.kinds | {Kind.MATCH}
    required = True
    order = Order.PAGE

    def __init__(self, work: Workload, shared: SharedService) -> None:
        super().__init__(work, shared.service.folder)
        self.shared = shared
        self.service = shared.service
        self._client: L3Client | None = None
        self._joined = False

    @property
    def server_pids(self) -> list[int]:
        return self.service.pids

    @property
    def client(self) -> L3Client:
        assert self._client is not None
        return self._client

    def make_client(self) -> L3Client:
        return self.service.client(CONNECTIONS)

    def launch(self) -> None:
        self._joined = True
        self.shared.join()
        self._client = self.make_client()

    def connect(self) -> Handle:
        return L3Handle(self.client)

    def halt(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._joined:
            self.shared.leave()
            self._joined = False

    def load(self) -> None:
        """Once for all contenders of one service: what is there already is not sent again."""
        if Kind.GET in self.kinds:
            self._store(self.work.big_namespace, self.work.big)
        if self.kinds & {Kind.READ, Kind.SMALL}:
            self._store(self.work.batch_namespace, items_of(self.work.batches))
        if Kind.MATCH in self.kinds:
            self._store(self.work.match_namespace, self.work.match.items)

    def _store(self, spaces: Namespace, items: Sequence[Item]) -> None:
        if spaces.digest in self.shared.registered:
            return
        self._register(spaces)
        write_all(self.client, items)

    def _register(self, spaces: Namespace) -> None:
        self.client.register(spaces)
        self.shared.registered.add(spaces.digest)

    def prepare(self, case: Case, turn: int) -> None:
        super().prepare(case, turn)
        if case.kind is Kind.PUT:
            self._register(self.work.fresh_objects(turn)[0])
        elif case.kind is Kind.WRITE:
            self._register(self._batches[0].namespace)

    def read_batch(self, batch: Batch) -> None:
        self._read(batch, self.order)

    def _read(self, batch: Batch, order: Order) -> None:
        spaces = batch.namespace
        shape = spaces.shape()
        views = [
            self.work.into[batch.at + i * shape.page_bytes : batch.at + (i + 1) * shape.page_bytes]
            for i in range(len(batch.hashes))
        ]
        read = self.client.read_pages(whole(spaces), batch.hashes, shape, views, order=order)
        if read.good != len(batch.hashes):
            raise RuntimeError(f"{read.good} of {len(batch.hashes)} pages were good")

    def write_batch(self, batch: Batch) -> None:
        write_all(self.client, batch.items)

    def find(self, batch: Batch) -> int:
        return self.client.control.match(whole(batch.namespace), batch.hashes) * len(batch.items) // len(batch.hashes)

    def remove(self, items: Sequence[Item]) -> None:
        handle = HttpHandle(self.service.port)
        handle.skip(handle.request("DELETE", f"/v1/namespaces/{items[0].key.digest}"))
        handle.close()
        self.shared.registered.discard(items[0].key.digest)


class WithoutSums(Ours):
    """The client does not check what it receives."""

    name = "l3store, sums off"
    about = "as l3store, the client not checking sums"
    kinds = frozenset({Kind.GET})

    def make_client(self) -> L3Client:
        return self.service.client(CONNECTIONS, verify=False)


class LayerOrder(Ours):
    """A batch is one call of `read_pages` in layer order."""

    name = "l3store, layer order"
    about = "as l3store, pages/read in layer order"
    kinds = frozenset({Kind.READ})
    order = Order.LAYER


class OneObject(Ours):
    """As many bytes as a batch has, by one GET."""

    name = "l3store, one object"
    about = "as l3store, the bytes of a batch as one object: one GET"
    kinds = frozenset({Kind.READ})

    def load(self) -> None:
        if self.work.whole_namespace.digest not in self.shared.registered:
            self._register(self.work.whole_namespace)
            for item in self.work.whole:
                self.client.put(item.key, item.data, cell_bytes=CELL)

    def read_batch(self, batch: Batch) -> None:
        item = self.work.whole[self.work.batches.index(batch)]
        self.handles[0].get(item, self.work.into[item.at : item.end])


class AckRam(Ours):
    """Writes are acknowledged once they are in memory."""

    name = "l3store, ack ram"
    about = "l3store --ack ram: a write is acknowledged once it is in memory, its file follows"
    kinds = frozenset({Kind.PUT, Kind.WRITE})

    def load(self) -> None:
        """Nothing is read."""


class BareClient(Ours):
    """Our service through the client that the HTTP peers are measured with: what our own client costs."""

    name = "l3store, bare client"
    about = "as l3store, through the bench's own least HTTP client, without sums"
    kinds = frozenset({Kind.GET, Kind.SMALL})

    def connect(self) -> Handle:
        return HttpHandle(self.service.port, "/v1/objects/")


class FirstLayer(Ours):
    """A layer-major read of whole pages, with the time at which the first layer of all pages is there."""

    name = "l3store, first layer"
    about = "layer-major pages/read of pages of all layers; when the first layer is whole"
    kinds = frozenset({Kind.LAYERS})

    def load(self) -> None:
        self._store(self.work.layers_namespace, self.work.layers.items)

    def connect(self) -> Handle:
        return HttpHandle(self.service.port)

    def prepare(self, case: Case, turn: int) -> None:
        del case, turn
        clear(self.work.into[: self.work.layers_batch_bytes])

    def run(self, case: Case) -> Timing:
        del case
        batch, handle = self.work.layers, self.handles[0]
        assert isinstance(handle, HttpHandle)
        at = time.perf_counter()
        length = self._ask(handle, batch, 1, Order.PAGE)
        page = batch.length // len(batch.hashes)
        handle.receive(self.work.into[:page])
        handle.skip(length - page)
        one_page = time.perf_counter() - at
        clear(self.work.into[:page])
        began = time.perf_counter()
        length = self._ask(handle, batch, len(batch.hashes), Order.LAYER)
        # In the order of the wire; `verify` knows where each cell belongs.
        first = len(batch.hashes) * MODEL_GROUPS * CELL
        handle.receive(self.work.into[:first])
        whole_first = time.perf_counter() - began
        handle.receive(self.work.into[first : batch.length])
        handle.skip(length - batch.length)
        seconds = time.perf_counter() - began
        bound = seconds / self.work.sizes.layers * 1.5 + one_page
        parts = {"first_layer": whole_first, "one_page": one_page, "bound": bound, "of_bound": whole_first / bound}
        return Timing(seconds, batch.length, (whole_first,), parts)

    def verify(self, case: Case) -> int:
        del case
        batch, layers = self.work.layers, self.work.sizes.layers
        at = 0
        cells: list[Item] = []
        by_place = batch.items
        page = batch.length // len(batch.hashes)
        for layer in range(layers):
            for p in range(len(batch.hashes)):
                for group in range(MODEL_GROUPS):
                    start = p * page + (group * layers + layer) * CELL
                    cells.append(Item(by_place[0].key, self.work.source[start : start + CELL], at))
                    at += CELL
        check(cells, self.work.into, self.name)
        return batch.length

    def _ask(self, handle: HttpHandle, batch: Batch, pages: int, order: Order) -> int:
        body = json.dumps({**whole(batch.namespace).body(batch.hashes[:pages]), "order": order, "sums": True}).encode()
        return handle.request("POST", "/v1/pages/read", memoryview(body), "application/json")
