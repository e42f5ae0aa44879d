"""The page index: which runs of which pages are stored, and which pages were used longest ago.

One ordered map, least recently used first, from (page hash, namespace) to a shared `RunSet`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from l3store.backend import file
from l3store.index.runset import Need, RunSet, RunSets
from l3store.layout import Coordinate, Key, Namespace

_TAG_BYTES = 4


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
        pages = self._pages
        hits = []
        for page_hash in page_hashes:
            name = _name(entry, page_hash)
            runs = pages.get(name)
            if runs is None or not runs.serves(need):
                break
            hits.append(name)
        for name in reversed(hits):
            pages.move_to_end(name)
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

    def _count(self, entry: NamespaceIndex, coordinate: Coordinate, sign: int) -> None:
        cells = coordinate.end_layer - coordinate.start_layer
        length = cells * entry.namespace.cell_bytes
        for usage in (entry.usage, self.total):
            usage.objects += sign
            usage.bytes += sign * length
            usage.disk_bytes += sign * file.footprint(cells, entry.namespace.cell_bytes)


def _name(entry: NamespaceIndex, page_hash: str) -> bytes:
    return bytes.fromhex(page_hash) + entry.tag
