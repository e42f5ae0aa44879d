"""The page index against a dictionary that does the same the obvious way."""

from __future__ import annotations

import gc

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from l3store.backend.file import footprint
from l3store.index.pages import NamespaceIndex, PageIndex
from l3store.index.runset import Need, RunSets
from l3store.layout import Coordinate, Key, Range
from tests.support import page_hashes, tiny

LAYERS = 6
GROUPS = 2
NAMESPACES = (tiny("a", layers=LAYERS), tiny("b", layers=LAYERS, page_size=64))
HASHES = page_hashes("index", 5)

pages = st.integers(0, len(HASHES) - 1)
spaces = st.integers(0, len(NAMESPACES) - 1)
runs = st.tuples(st.integers(0, LAYERS - 1), st.integers(1, LAYERS)).filter(lambda r: r[0] < r[1])
groups = st.integers(0, GROUPS - 1)
needs = st.builds(Need, runs.map(lambda r: Range(*r)), st.sampled_from([Range(0, 1), Range(1, 2), Range(0, 2)]))


class IndexMachine(RuleBasedStateMachine):
    """``stored`` is what is there, ``order`` the pages by their last use, the longest ago first."""

    @initialize()
    def start(self) -> None:
        self.index = PageIndex()
        self.entries: list[NamespaceIndex] = [self.index.open(namespace) for namespace in NAMESPACES]
        self.stored: dict[tuple[int, int], set[Coordinate]] = {}
        self.order: list[tuple[int, int]] = []

    def used(self, name: tuple[int, int]) -> None:
        if name in self.order:
            self.order.remove(name)
        self.order.append(name)

    @rule(space=spaces, page=pages, run=runs, group=groups)
    def add(self, space: int, page: int, run: tuple[int, int], group: int) -> None:
        coordinate = Coordinate(*run, group)
        new = coordinate not in self.stored.get((space, page), set())
        key = Key(HASHES[page], self.entries[space].digest, coordinate)
        assert self.index.add(self.entries[space], key) is new
        self.stored.setdefault((space, page), set()).add(coordinate)
        if (space, page) not in self.order:
            self.order.append((space, page))

    @rule(
        space=spaces, alike=st.lists(pages, unique=True), cut=st.sets(st.tuples(runs, groups), min_size=1, max_size=3)
    )
    def add_pages(self, space: int, alike: list[int], cut: set[tuple[tuple[int, int], int]]) -> None:
        coordinates = frozenset(Coordinate(*run, group) for run, group in cut)
        hashes = b"".join(bytes.fromhex(HASHES[page]) for page in alike)
        self.index.add_pages(self.entries[space], hashes, coordinates)
        for page in alike:
            self.stored.setdefault((space, page), set()).update(coordinates)
            if (space, page) not in self.order:
                self.order.append((space, page))

    @rule(
        space=spaces, page=pages, run=runs, group=groups, known=st.booleans(), which=st.randoms(use_true_random=False)
    )
    def remove(
        self, space: int, page: int, run: tuple[int, int], group: int, known: bool, which: st.DataObject
    ) -> None:
        there = self.stored.get((space, page), set())
        coordinate = which.choice(sorted(there)) if known and there else Coordinate(*run, group)  # type: ignore[attr-defined]
        key = Key(HASHES[page], self.entries[space].digest, coordinate)
        assert self.index.remove(self.entries[space], key) is (coordinate in there)
        there.discard(coordinate)
        if not there and (space, page) in self.order:
            self.order.remove((space, page))
            del self.stored[space, page]

    @rule(space=spaces, prefix=st.permutations(range(len(HASHES))), need=needs)
    def leading(self, space: int, prefix: list[int], need: Need) -> None:
        hits = []
        for page in prefix:
            have = {(c.head_group, layer) for c in self.stored.get((space, page), set()) for layer in c.layers}
            if not {(group, layer) for group in need.groups for layer in need.layers} <= have:
                break
            hits.append(page)
        assert self.index.leading(self.entries[space], [HASHES[page] for page in prefix], need) == len(hits)
        for page in reversed(hits):
            self.used((space, page))

    @rule(space=spaces, page=pages)
    def touch(self, space: int, page: int) -> None:
        self.index.touch(self.entries[space], HASHES[page])
        if (space, page) in self.order:
            self.used((space, page))

    @rule(space=spaces, page=pages, run=runs, group=groups)
    def pieces(self, space: int, page: int, run: tuple[int, int], group: int) -> None:
        wanted = Range(*run)
        there = self.stored.get((space, page), set())
        have = {layer for c in there if c.head_group == group for layer in c.layers}
        runset = self.index.runs(self.entries[space], HASHES[page])
        gaps = [layer for gap in runset.uncovered(wanted, group) for layer in gap]
        assert gaps == [layer for layer in wanted if layer not in have]
        found = runset.pieces(wanted, group)
        assert (found is None) is bool(gaps)
        if found is not None:
            assert [layer for piece in found for layer in piece.taken] == list(wanted)
            assert all(Coordinate(p.source.start, p.source.end, group) in there for p in found)
            assert all(p.source.contains(p.taken) for p in found)
        assert set(runset.overlapping(wanted, group)) == {
            c for c in there if c.head_group == group and set(c.layers) & set(wanted)
        }

    @rule(disk_bytes=st.integers(1, 60_000))
    def evict(self, disk_bytes: int) -> None:
        expected: set[Key] = set()
        free = 0
        while free < disk_bytes and self.order:
            space, page = self.order.pop(0)
            for coordinate in self.stored.pop((space, page)):
                expected.add(Key(HASHES[page], self.entries[space].digest, coordinate))
                free += footprint(len(coordinate.layers), NAMESPACES[space].cell_bytes)
        evicted = self.index.evict(disk_bytes)
        assert len(evicted) == len(set(evicted))
        assert set(evicted) == expected

    @rule(space=spaces)
    def close(self, space: int) -> None:
        expected = {
            Key(HASHES[page], self.entries[space].digest, coordinate)
            for (other, page), there in self.stored.items()
            if other == space
            for coordinate in there
        }
        assert set(self.index.close(self.entries[space].digest)) == expected
        self.order = [name for name in self.order if name[0] != space]
        self.stored = {name: there for name, there in self.stored.items() if name[0] != space}
        self.entries[space] = self.index.open(NAMESPACES[space])

    @invariant()
    def totals_are_exact(self) -> None:
        total = [0, 0, 0]
        for space, entry in enumerate(self.entries):
            lengths = [len(c.layers) for (other, _), there in self.stored.items() if other == space for c in there]
            cell = NAMESPACES[space].cell_bytes
            usage = [len(lengths), sum(lengths) * cell, sum(footprint(n, cell) for n in lengths)]
            assert [entry.usage.objects, entry.usage.bytes, entry.usage.disk_bytes] == usage
            total = [a + b for a, b in zip(total, usage, strict=True)]
        assert [self.index.total.objects, self.index.total.bytes, self.index.total.disk_bytes] == total
        assert len(self.index) == len(self.stored)

    @invariant()
    def keys_are_all_there_is_in_order_of_use(self) -> None:
        for space, entry in enumerate(self.entries):
            listed = list(self.index.keys(entry))
            assert set(listed) == {
                Key(HASHES[page], entry.digest, coordinate)
                for (other, page), there in self.stored.items()
                if other == space
                for coordinate in there
            }
            hashes = list(dict.fromkeys(key.page_hash for key in listed))
            assert hashes == [HASHES[page] for other, page in self.order if other == space]


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestIndex = IndexMachine.TestCase


def test_pages_that_are_stored_alike_share_one_set() -> None:
    index = PageIndex()
    entry = index.open(NAMESPACES[0])
    hashes = page_hashes("alike", 100)
    for coordinate in (Coordinate(0, 3, 0), Coordinate(3, 6, 0), Coordinate(0, 6, 1)):
        for page_hash in hashes:
            index.add(entry, Key(page_hash, entry.digest, coordinate))
    assert len({id(index.runs(entry, page_hash)) for page_hash in hashes}) == 1


def test_a_set_that_no_page_uses_is_let_go() -> None:
    sets = RunSets()
    held = sets.added(sets.empty, Coordinate(0, 1, 0))
    for layer in range(1, 50):
        sets.added(held, Coordinate(layer, layer + 1, 0))
    gc.collect()
    assert len(sets._known) == 2


def test_the_head_of_a_prefix_is_evicted_last() -> None:
    index = PageIndex()
    entry = index.open(NAMESPACES[0])
    for page_hash in HASHES:
        index.add(entry, Key(page_hash, entry.digest, Coordinate(0, 6, 0)))
    assert index.leading(entry, HASHES, Need(Range(0, 6), Range(0, 1))) == 5
    evicted = [index.evict(1)[0].page_hash for _ in HASHES]
    assert evicted == list(reversed(HASHES))


def test_memoised_answers_are_bounded_and_right() -> None:
    sets = RunSets()
    runset = sets.added(sets.empty, Coordinate(0, 2000, 0))
    for end in range(1, 2000):
        assert runset.serves(Need(Range(0, end), Range(0, 1)))
        assert not runset.serves(Need(Range(0, end), Range(0, 2)))
    assert len(runset._serves) <= 256
    assert len(runset._pieces) <= 256
