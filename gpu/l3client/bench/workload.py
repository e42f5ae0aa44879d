"""What is moved: the same bytes under the same names for every contender.

Geometry: cells of 64 KiB (64 tokens x 2 KV heads x 128 x bfloat16, K and V), as a 60-layer model with 8 KV heads in
head groups of 2 has them. Objects of 2 MiB are 32 such layers.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from l3store.layout import Coordinate, Fields, Geometry, Key, Namespace

PAGE_TOKENS = 64
CELL = 64 << 10
OBJECT_CELLS = 32
BATCH_LAYERS = 4
MATCH_LAYERS = 4
MODEL_LAYERS = 60
MODEL_GROUPS = 4
TOKEN_BYTES = MODEL_LAYERS * MODEL_GROUPS * CELL // PAGE_TOKENS
"""KV bytes of one token of the model above: 245,760."""


class Kind(StrEnum):
    """What a case does."""

    GET = "get"
    PUT = "put"
    READ = "read"
    WRITE = "write"
    SMALL = "small"
    LAYERS = "layers"
    MATCH = "match"
    MANY = "many"


WRITES = frozenset({Kind.PUT, Kind.WRITE})


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the measurement: a kind over a number of connections."""

    name: str
    title: str
    kind: Kind
    connections: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much one measurement moves.

    passes       how often a GET case reads each object: caches are cold when a contender's turn begins
    layers_...   the layer-major read: pages, and layers of the model
    many_...     tiny objects that are stored beside those that are read: in the one service, and in the other
    """

    objects: int = 64
    passes: int = 4
    batches: int = 4
    batch_pages: int = 128
    small_reads: int = 400
    layers_pages: int = 32
    layers: int = MODEL_LAYERS
    match_pages: int = 3125
    match_calls: int = 3
    many_objects: int = 1_000_000
    many_few: int = 1_000
    many_reads: int = 400

    @classmethod
    def quick(cls) -> Sizes:
        return cls(
            objects=8,
            passes=2,
            batches=2,
            batch_pages=16,
            small_reads=40,
            layers_pages=4,
            layers=8,
            match_pages=200,
            match_calls=2,
            many_objects=2_000,
            many_few=200,
            many_reads=40,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One object: its key, its bytes, and ``at``: where it belongs in the destination, and in a server's memory."""

    key: Key
    data: memoryview
    at: int
    cell_bytes: int = CELL

    @property
    def end(self) -> int:
        return self.at + len(self.data)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The objects of some pages, in page order: adjacent in the destination."""

    namespace: Namespace
    hashes: tuple[str, ...]
    items: tuple[Item, ...]

    @property
    def at(self) -> int:
        return self.items[0].at

    @property
    def length(self) -> int:
        return self.items[-1].end - self.at


def namespace(model: str, *, layers: int, partition: int, groups: int = 1, tiny: bool = False) -> Namespace:
    """A model of which one cell has 64 KiB; ``tiny``: 256 bytes, where only names are asked for."""
    return Namespace(
        fields=Fields(
            model_id=f"bench/{model}", dtype="bfloat16", page_size=1 if tiny else PAGE_TOKENS, rank_replicated=False,
            total_kv_heads=groups * (1 if tiny else 2), layer_partition=partition, head_group=1 if tiny else 2,
        ),
        geometry=Geometry(num_layers=layers, head_dim=64 if tiny else 128, itemsize=2),
    )  # fmt: skip


def page_hash() -> str:
    return os.urandom(32).hex()


def private_memory(length: int) -> memoryview:
    """Zeroed private memory, all of it in place: no page fault is measured."""
    view = memoryview(mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE))
    assert not view.readonly
    return view


@dataclass
class Workload:
    """Bytes, names and the caller's memory. Items of different cases share bytes, never names."""

    sizes: Sizes
    source: memoryview = field(init=False)
    into: memoryview = field(init=False)

    def __post_init__(self) -> None:
        length = max(self.moved_bytes, self.layers_batch_bytes)
        self.source = private_memory(length)
        for at in range(0, length, 16 << 20):
            part = self.source[at : at + (16 << 20)]
            part[:] = os.urandom(len(part))
        self.into = private_memory(length)

    @property
    def object_bytes(self) -> int:
        return OBJECT_CELLS * CELL

    @property
    def batch_bytes(self) -> int:
        return self.sizes.batch_pages * BATCH_LAYERS * CELL

    @property
    def moved_bytes(self) -> int:
        """The most that a case of objects or batches moves in one measurement."""
        return max(self.sizes.objects * self.object_bytes, self.sizes.batches * self.batch_bytes)

    @property
    def layers_batch_bytes(self) -> int:
        return self.sizes.layers_pages * self.sizes.layers * MODEL_GROUPS * CELL

    @cached_property
    def big_namespace(self) -> Namespace:
        return namespace("objects", layers=OBJECT_CELLS, partition=OBJECT_CELLS)

    @cached_property
    def batch_namespace(self) -> Namespace:
        return namespace("pages", layers=BATCH_LAYERS, partition=1)

    @cached_property
    def whole_namespace(self) -> Namespace:
        """As many cells in one object as a batch has in many."""
        cells = self.sizes.batch_pages * BATCH_LAYERS
        return namespace("whole", layers=cells, partition=cells)

    @cached_property
    def match_namespace(self) -> Namespace:
        return namespace("match", layers=MATCH_LAYERS, partition=1, tiny=True)

    @cached_property
    def layers_namespace(self) -> Namespace:
        return namespace(
            "layers", layers=self.sizes.layers, partition=max(1, self.sizes.layers // 2), groups=MODEL_GROUPS
        )

    @cached_property
    def big(self) -> tuple[Item, ...]:
        """Objects of 2 MiB."""
        return self._objects(self.big_namespace, turn=0)

    @property
    def gets(self) -> tuple[Item, ...]:
        """The big objects, as often as a GET case reads them.

        Each pass begins further on: connections that take a pass each do not read the same object at once.
        """
        step = max(1, len(self.big) // self.sizes.passes)
        return tuple(item for at in range(self.sizes.passes) for item in self.big[at * step :] + self.big[: at * step])

    @cached_property
    def batches(self) -> tuple[Batch, ...]:
        """Pages of 4 objects of 64 KiB."""
        return self._batches(self.batch_namespace, turn=0)

    @cached_property
    def whole(self) -> tuple[Item, ...]:
        """The bytes of each batch as one object."""
        coordinate = Coordinate(0, self.sizes.batch_pages * BATCH_LAYERS, 0)
        return tuple(
            Item(
                Key(page_hash(), self.whole_namespace.digest, coordinate),
                self.source[batch.at : batch.at + batch.length],
                batch.at,
            )
            for batch in self.batches
        )

    @cached_property
    def small(self) -> tuple[Item, ...]:
        """Objects of 64 KiB to read one at a time."""
        items = self.batches[0].items
        return tuple(items[i % len(items)] for i in range(self.sizes.small_reads))

    @cached_property
    def match(self) -> Batch:
        """Names to look up; tiny objects."""
        cell = self.match_namespace.cell_bytes
        hashes = tuple(page_hash() for _ in range(self.sizes.match_pages))
        items = tuple(
            Item(Key(h, self.match_namespace.digest, Coordinate(i, i + 1, 0)), self.source[:cell], 0, cell)
            for h in hashes
            for i in range(MATCH_LAYERS)
        )
        return Batch(self.match_namespace, hashes, items)

    @cached_property
    def layers(self) -> Batch:
        """Pages of a whole model, each in several objects."""
        hashes = tuple(page_hash() for _ in range(self.sizes.layers_pages))
        spaces = self.layers_namespace
        items: list[Item] = []
        at = 0
        for h in hashes:
            for group in range(MODEL_GROUPS):
                for run in spaces.layers.cut(spaces.fields.layer_partition):
                    length = len(run) * CELL
                    key = Key(h, spaces.digest, Coordinate(run.start, run.end, group))
                    items.append(Item(key, self.source[at : at + length], at))
                    at += length
        return Batch(spaces, hashes, tuple(items))

    def fresh_objects(self, turn: int) -> tuple[Namespace, tuple[Item, ...]]:
        """Objects that nobody has, in a namespace of their own. Their bytes are another turn's at another place."""
        spaces = self._fresh(self.big_namespace, turn)
        return spaces, self._objects(spaces, turn=turn)

    def fresh_batches(self, turn: int) -> tuple[Namespace, tuple[Batch, ...]]:
        """As `fresh_objects`."""
        spaces = self._fresh(self.batch_namespace, turn)
        return spaces, self._batches(spaces, turn=turn)

    def _fresh(self, like: Namespace, turn: int) -> Namespace:
        return dataclasses.replace(
            like, fields=dataclasses.replace(like.fields, model_id=f"{like.fields.model_id}/{turn}")
        )

    def _objects(self, spaces: Namespace, *, turn: int) -> tuple[Item, ...]:
        size, count = self.object_bytes, self.sizes.objects
        return tuple(
            Item(
                Key(page_hash(), spaces.digest, Coordinate(0, OBJECT_CELLS, 0)),
                _slot(self.source, (i + turn) % count, size),
                i * size,
            )
            for i in range(count)
        )

    def _batches(self, spaces: Namespace, *, turn: int) -> tuple[Batch, ...]:
        cells = self.sizes.batches * self.sizes.batch_pages * BATCH_LAYERS
        made: list[Batch] = []
        at = 0
        for _ in range(self.sizes.batches):
            hashes = tuple(page_hash() for _ in range(self.sizes.batch_pages))
            items: list[Item] = []
            for h in hashes:
                for layer in range(BATCH_LAYERS):
                    key = Key(h, spaces.digest, Coordinate(layer, layer + 1, 0))
                    items.append(Item(key, _slot(self.source, (at + turn) % cells, CELL), at * CELL))
                    at += 1
            made.append(Batch(spaces, hashes, tuple(items)))
        return tuple(made)


def _slot(memory: memoryview, index: int, size: int) -> memoryview:
    return memory[index * size : (index + 1) * size]


CASES = (
    Case("get/1", "GET 2 MiB, 1 connection", Kind.GET, 1),
    Case("get/4", "GET 2 MiB, 4 connections", Kind.GET, 4),
    Case("put/1", "PUT 2 MiB, 1 connection", Kind.PUT, 1),
    Case("put/4", "PUT 2 MiB, 4 connections", Kind.PUT, 4),
    Case("read", "read a batch of pages", Kind.READ, 4),
    Case("write", "write a batch of pages", Kind.WRITE, 4),
    Case("small", "GET 64 KiB, one at a time", Kind.SMALL, 1),
    Case("layers", "layer-major read: time to the first layer", Kind.LAYERS, 1),
    Case("match", "look names up, one call", Kind.MATCH, 1),
    Case("many", "GET 64 KiB where many objects are stored; start and memory", Kind.MANY, 1),
)


def items_of(batches: Sequence[Batch]) -> tuple[Item, ...]:
    return tuple(item for batch in batches for item in batch.items)
