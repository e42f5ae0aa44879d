"""The page index: which runs of which pages are stored, and which pages were used longest ago.

One ordered map, least recently used first, from (page hash, namespace) to a shared `RunSet`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from l3store.backend import file
from l3store.index.names import HASH_BYTES
from l3store.index.runset import Need, RunSet, RunSets
from l3store.layout import Coordinate, InvalidKeyError, Key, Namespace, OutOfModelError

_TAG_BYTES = 4
_MEMO = 4096
"""Coordinates that one namespace remembers to be sound."""


@dataclass(slots=True)
class Usage:
    """What one namespace stores. ``bytes`` are of objects, ``disk_bytes`` of their files, in whole blocks."""

    objects: int = 0
    bytes: int = 0
    disk_bytes: int = 0


@dataclass(slots=True)
class NamespaceIndex:
    """A namespace inside the index: its tag in page names, its run sets and totals."""

    namespace: Namespace
    digest: str
    tag: bytes
    usage: Usage = field(default_factory=Usage)
    runsets: RunSets = field(default_factory=RunSets)
    _sound: set[Coordinate] = field(default_factory=set)

    def check(self, coordinate: Coordinate) -> None:
        """Raise a layout error where the model has no such layers or head group."""
        if coordinate in self._sound:
            return
        _check_coordinate(self.namespace, coordinate)
        if len(self._sound) >= _MEMO:
            self._sound.clear()
        self._sound.add(coordinate)


class PageIndex:
    """Pages by namespace and hash. Not thread-safe: the event loop owns it."""

    def __init__(self) -> None:
        self._pages: OrderedDict[bytes, RunSet] = OrderedDict()
        self._namespaces: dict[str, NamespaceIndex] = {}
        self._by_tag: dict[bytes, NamespaceIndex] = {}
        self._next_tag = 0
        self.total = Usage()

    def __len__(self) -> int:
        return len(self._pages)

    def open(self, namespace: Namespace) -> NamespaceIndex:
        """Begin to index a namespace."""
        tag = self._next_tag.to_bytes(_TAG_BYTES, "little")
        self._next_tag += 1
        entry = NamespaceIndex(namespace, namespace.digest, tag)
        self._namespaces[entry.digest] = self._by_tag[tag] = entry
        return entry

    def close(self, digest: str) -> list[Key]:
        """Forget a namespace; the keys of all its objects."""
        entry = self._namespaces[digest]
        names = [name for name in self._pages if name.endswith(entry.tag)]
        keys = [key for name in names for key in self._take(name)]
        del self._namespaces[digest], self._by_tag[entry.tag]
        return keys

    def get(self, digest: str) -> NamespaceIndex | None:
        return self._namespaces.get(digest)

    def namespaces(self) -> Iterable[NamespaceIndex]:
        return self._namespaces.values()

    def runs(self, entry: NamespaceIndex, page_hash: str) -> RunSet:
        """What is stored of a page; the empty set where nothing is."""
        return self._pages.get(_name(entry, page_hash), entry.runsets.empty)

    def leading(self, entry: NamespaceIndex, page_hashes: Sequence[str], need: Need) -> int:
        """How many leading pages have every cell of the need. They become the most recently used, the first most."""
        get, tag = self._pages.get, entry.tag
        hits = []
        serving: RunSet | None = None
        for page_hash in page_hashes:
            name = bytes.fromhex(page_hash) + tag
            runs = get(name)
            # Nearly always the set of the page before, which is known to serve.
            if runs is None or (runs is not serving and not runs.serves(need)):
                break
            serving = runs
            hits.append(name)
        move_to_end = self._pages.move_to_end
        for name in reversed(hits):
            move_to_end(name)
        return len(hits)

    def keys(self, entry: NamespaceIndex) -> Iterator[Key]:
        """All stored objects of a namespace, least recently used page first. The index must not change meanwhile."""
        for name, runs in self._pages.items():
            if name.endswith(entry.tag):
                for coordinate in runs.coordinates:
                    yield Key(name[:-_TAG_BYTES].hex(), entry.digest, coordinate)

    def touch(self, entry: NamespaceIndex, page_hash: str) -> None:
        """Make a page the most recently used, where it is stored."""
        name = _name(entry, page_hash)
        if name in self._pages:
            self._pages.move_to_end(name)

    def add(self, entry: NamespaceIndex, key: Key) -> bool:
        """Note an object as stored; False where it was noted already."""
        name = _name(entry, key.page_hash)
        runs = self._pages.get(name, entry.runsets.empty)
        if key.coordinate in runs.coordinates:
            return False
        self._pages[name] = entry.runsets.added(runs, key.coordinate)
        self._count(entry, key.coordinate, 1)
        return True

    def add_pages(self, entry: NamespaceIndex, page_hashes: bytes, coordinates: frozenset[Coordinate]) -> None:
        """Note the same objects of many pages as stored; the hashes lie back to back, each once."""
        pages, tag = self._pages, entry.tag
        runs = entry.runsets.of(coordinates)
        known = []
        for at in range(0, len(page_hashes), HASH_BYTES):
            name = page_hashes[at : at + HASH_BYTES] + tag
            if name in pages:
                known.append(name[:HASH_BYTES].hex())
            else:
                pages[name] = runs
        added = len(page_hashes) // HASH_BYTES - len(known)
        for coordinate in coordinates:
            self._count(entry, coordinate, added)
            for page_hash in known:
                self.add(entry, Key(page_hash, entry.digest, coordinate))

    def remove(self, entry: NamespaceIndex, key: Key) -> bool:
        """Note an object as gone; False where it was not noted."""
        name = _name(entry, key.page_hash)
        runs = self._pages.get(name)
        if runs is None or key.coordinate not in runs.coordinates:
            return False
        left = entry.runsets.removed(runs, key.coordinate)
        if left.coordinates:
            self._pages[name] = left
        else:
            del self._pages[name]
        self._count(entry, key.coordinate, -1)
        return True

    def evict(self, disk_bytes: int) -> list[Key]:
        """Take whole pages, least recently used first, until at least ``disk_bytes`` are free of them."""
        target = self.total.disk_bytes - disk_bytes
        keys: list[Key] = []
        while self._pages and self.total.disk_bytes > target:
            keys += self._take(next(iter(self._pages)))
        return keys

    def _take(self, name: bytes) -> Iterator[Key]:
        entry = self._by_tag[name[-_TAG_BYTES:]]
        page_hash = name[:-_TAG_BYTES].hex()
        for coordinate in self._pages.pop(name).coordinates:
            self._count(entry, coordinate, -1)
            yield Key(page_hash, entry.digest, coordinate)

    def _count(self, entry: NamespaceIndex, coordinate: Coordinate, objects: int) -> None:
        cells = coordinate.end_layer - coordinate.start_layer
        length = cells * entry.namespace.cell_bytes
        footprint = file.footprint(cells, entry.namespace.cell_bytes)
        for usage in (entry.usage, self.total):
            usage.objects += objects
            usage.bytes += objects * length
            usage.disk_bytes += objects * footprint


def _name(entry: NamespaceIndex, page_hash: str) -> bytes:
    return bytes.fromhex(page_hash) + entry.tag


def _check_coordinate(namespace: Namespace, coordinate: Coordinate) -> None:
    namespace.check_layers(coordinate.layers)
    if namespace.fields.rank_replicated:
        if coordinate.head_group is not None:
            raise InvalidKeyError(f"{coordinate} has a head group, the model (MLA) has none: leave _H out")
    elif coordinate.head_group is None:
        raise InvalidKeyError(f"{coordinate} has no head group, the model has {namespace.num_groups}: add _H0 ...")
    elif coordinate.head_group >= namespace.num_groups:
        raise OutOfModelError(f"{coordinate}: the model has head groups 0 to {namespace.num_groups - 1}")
