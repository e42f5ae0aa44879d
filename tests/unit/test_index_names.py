"""Names of objects read in bulk, against each read alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from l3store.index.names import Alike, pages_alike
from l3store.layout import Coordinate, InvalidKeyError, Key, parse_key
from tests.support import page_hashes

DIGESTS = ("ukv1-0123456789abcdef", "ukv1-fedcba9876543210", "l3x1-" + "a" * 32)
HASHES = page_hashes("names", 40)

coordinates = st.builds(Coordinate, st.integers(0, 2), st.integers(3, 6), st.sampled_from([None, 0, 1]))
keys = st.builds(Key, st.sampled_from(HASHES[:6]), st.sampled_from(DIGESTS), coordinates)
# Nearly keys: a letter more, less or other, somewhere.
strangers = st.builds(
    lambda key, at, put: str(key)[: at % len(str(key))] + put + str(key)[at % len(str(key)) + 1 :],
    keys,
    st.integers(0, 200),
    st.sampled_from(["", " ", "A", "F", "0", "00", "_", "\n", "é", "\udcff", "L"]),
)


def one_by_one(names: list[str]) -> set[Key]:
    found = set()
    for name in names:
        try:
            found.add(parse_key(name))
        except InvalidKeyError:
            continue
    return found


def in_bulk(names: list[str]) -> list[Key]:
    return [
        Key(page_hash.hex(), alike.digest, coordinate)
        for alike in pages_alike(sorted(names))
        for page_hash in split(alike)
        for coordinate in alike.coordinates
    ]


def split(alike: Alike) -> list[bytes]:
    assert len(alike.page_hashes) == 32 * alike.pages
    return [alike.page_hashes[at : at + 32] for at in range(0, len(alike.page_hashes), 32)]


@settings(max_examples=300, deadline=None)
@given(st.sets(keys.map(str) | strangers | st.text(max_size=90).filter(bool), max_size=40))
def test_names_in_bulk_are_what_they_are_alone(names: set[str]) -> None:
    found = in_bulk(list(names))
    assert len(found) == len(set(found))
    assert set(found) == one_by_one(list(names))


def test_pages_that_are_stored_alike_come_together() -> None:
    rng = random.Random(3)
    shapes = [
        frozenset({Coordinate(0, 3, 0), Coordinate(3, 6, 0)}),
        frozenset({Coordinate(0, 3, 0)}),
        frozenset({Coordinate(0, 6, 1)}),
    ]
    expected = {page_hash: rng.choice(shapes) for page_hash in HASHES}
    names = [str(Key(page_hash, DIGESTS[0], c)) for page_hash, shape in expected.items() for c in shape]
    found = list(pages_alike(sorted(names)))
    assert {alike.coordinates for alike in found} == set(shapes)
    assert len(found) == len(shapes)
    assert {raw.hex(): alike.coordinates for alike in found for raw in split(alike)} == expected


def test_one_page_in_several_namespaces_is_each_ones() -> None:
    stored = [Key(HASHES[0], DIGESTS[0], Coordinate(0, 3, 0)), Key(HASHES[0], DIGESTS[2], Coordinate(0, 1))]
    found = {alike.digest: alike.coordinates for alike in pages_alike(sorted(map(str, stored)))}
    assert found == {key.digest: frozenset({key.coordinate}) for key in stored}


@pytest.mark.parametrize("names", [[], ["README"], ["\udcff" * 100], ["0" * 63 + "g" + f"_{DIGESTS[0]}_L0-3"]])
def test_there_may_be_no_keys(names: list[str]) -> None:
    assert in_bulk(names) == []
