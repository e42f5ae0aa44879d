"""Scatter against a naive model: bytes land in order in the views, and the cells of all that is complete are summed."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from l3client.transport import scatter as scattering
from l3client.transport.scatter import Scatter
from l3store.layout.sums import pack_sums

CANARY = 0xEE


CHUNK = 16


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scattering, "_CHUNK", CHUNK)
        patch.setattr(scattering, "MAX_VECTORS", 4)
        yield


@st.composite
def scatters(draw: st.DrawFn) -> tuple[int, list[int], int, int]:
    """Bytes of a cell, cells of each view, bytes that come with the head, and a seed of the arrival."""
    cell = draw(st.integers(1, 40))
    even = st.tuples(st.integers(1, 5), st.integers(1, 12)).map(lambda drawn: [drawn[0]] * drawn[1])
    views = draw(st.lists(st.integers(0, 5), max_size=12) | even)
    return cell, views, draw(st.integers(0, 60)), draw(st.integers(0, 2**32))


@given(scatters())
def test_bytes_land_in_order_and_cells_are_summed_as_in_a_naive_model(case: tuple[int, list[int], int, int]) -> None:
    cell, views, early, seed = case
    chance = random.Random(seed)
    # Views lie anywhere in one block of memory, with canaries between them.
    block = bytearray([CANARY]) * (sum(n * cell + 3 for n in views) + 3)
    places = []
    at = 3
    for index in chance.sample(range(len(views)), len(views)):
        places.append((index, at, views[index] * cell))
        at += views[index] * cell + 3
    targets = [memoryview(block)[start : start + size] for _, start, size in sorted(places)]
    wire = chance.randbytes(sum(views) * cell + 7)  # more than fits, as of an over-long body
    total = sum(views) * cell

    scatter = Scatter(targets, cell_bytes=cell)
    done = scatter.take(wire[:early])
    assert done == min(early, total)
    while want := scatter.targets:
        assert all(len(target) for target in want)
        assert len(want) <= 4
        room = sum(map(len, want))
        assert room <= max(CHUNK, cell)
        count = chance.choice([room, chance.randint(1, room)])
        left = count
        for target in want:
            part = min(len(target), left)
            target[:part] = wire[done + count - left : done + count - left + part]
            left -= part
        scatter.advance(count)
        done += count

    assert done == total
    assert b"".join(targets) == wire[:total]
    sums = [xxhash.xxh3_64_intdigest(wire[i : i + cell]) for i in range(0, total, cell)]
    assert scatter.sums == sums
    inside = {i for _, start, size in places for i in range(start, start + size)}
    assert all(block[i] == CANARY for i in range(len(block)) if i not in inside)

    assert scatter.differing(pack_sums(sums)) == []
    wrong = sorted(chance.sample(range(len(sums)), chance.randint(0, len(sums))))
    for i in wrong:
        sums[i] ^= 1 << chance.randrange(64)
    assert scatter.differing(bytearray(pack_sums(sums))) == wrong


def test_without_cells_nothing_is_summed() -> None:
    data = bytearray(10)
    scatter = Scatter([memoryview(data)])
    assert scatter.take(b"0123456789ab") == 10
    assert (bytes(data), scatter.sums, scatter.targets) == (b"0123456789", [], [])


def test_nothing_to_fill_is_filled() -> None:
    assert Scatter([]).targets == []
    scatter = Scatter([memoryview(b"")] * 3, cell_bytes=8)
    assert (scatter.take(b"more"), scatter.targets, scatter.differing(b"")) == (0, [], [])
