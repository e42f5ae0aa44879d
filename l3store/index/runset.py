"""What is stored of one page: a set of runs, shared by all pages that are stored alike.

Nearly all pages of a namespace are cut the same way, so a page's entry in the index is a reference to one shared set,
and what a set serves is worked out once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakValueDictionary

from l3store.layout import Coordinate, Piece, Range, cover, uncovered

_MEMO = 256
"""Answers kept by one set; readers of a fleet ask for few different shards."""


@dataclass(frozen=True, slots=True)
class Need:
    """The cells that a shard needs of a page: layers of head groups. MLA counts as group 0."""

    layers: Range
    groups: Range


class RunSet:
    """An immutable set of stored coordinates of one page. Made by `RunSets`."""

    __slots__ = ("__weakref__", "_by_group", "_pieces", "_serves", "coordinates")

    def __init__(self, coordinates: frozenset[Coordinate]) -> None:
        self.coordinates = coordinates
        self._by_group: dict[int, list[Range]] = {}
        for coordinate in sorted(coordinates):
            self._by_group.setdefault(coordinate.head_group or 0, []).append(coordinate.layers)
        self._serves: dict[Need, bool] = {}
        self._pieces: dict[tuple[int, int, int], list[Piece] | None] = {}

    def serves(self, need: Need) -> bool:
        """Whether every cell of the need is stored."""
        known = self._serves.get(need)
        if known is None:
            known = all(self.pieces(need.layers, group) is not None for group in need.groups)
            _remember(self._serves, need, known)
        return known

    def pieces(self, layers: Range, group: int) -> list[Piece] | None:
        """The stored runs that serve these layers of a group, in order; None where a cell is missing."""
        key = (layers.start, layers.end, group)
        if key in self._pieces:
            return self._pieces[key]
        pieces = cover(self._by_group.get(group, ()), layers)
        _remember(self._pieces, key, pieces)
        return pieces

    def uncovered(self, layers: Range, group: int) -> list[Range]:
        """The runs of these layers of a group that are not stored."""
        return uncovered(self._by_group.get(group, ()), layers)

    def overlapping(self, layers: Range, group: int) -> Iterator[Coordinate]:
        """The stored coordinates that hold any of these cells."""
        for c in self.coordinates:
            if (c.head_group or 0) == group and c.start_layer < layers.end and layers.start < c.end_layer:
                yield c


class RunSets:
    """Hands out one `RunSet` for each distinct set of coordinates, for as long as a page uses it."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[frozenset[Coordinate], RunSet] = WeakValueDictionary()
        self.empty = self.of(frozenset())

    def added(self, runs: RunSet, coordinate: Coordinate) -> RunSet:
        return self.of(runs.coordinates | {coordinate})

    def removed(self, runs: RunSet, coordinate: Coordinate) -> RunSet:
        return self.of(runs.coordinates - {coordinate})

    def of(self, coordinates: frozenset[Coordinate]) -> RunSet:
        """The set of these coordinates."""
        known = self._known.get(coordinates)
        if known is None:
            known = self._known[coordinates] = RunSet(coordinates)
        return known


def _remember(memo: dict, key: object, value: object) -> None:  # type: ignore[type-arg]
    if len(memo) >= _MEMO:
        memo.clear()
    memo[key] = value
