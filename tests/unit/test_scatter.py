"""Scatter against a naive model: the bytes land in order in the views, and every completed cell is summed once."""

from __future__ import annotations

import random

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from l3client.transport.scatter import Scatter

CANARY = 0xEE


@st.composite
def scatters(draw: st.DrawFn) -> tuple[int, list[int], int, int]:
    """Bytes of a cell, cells of each view, bytes that come with the head, and a seed of the arrival."""
    cell = draw(st.integers(1, 9))
    views = draw(st.lists(st.integers(0, 5), max_size=12))
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
    assert scatter.length == total
    done = scatter.copy(memoryview(wire)[:early])
    assert done == min(early, total)
    while not scatter.full:
        want = scatter.targets()
        room = sum(map(len, want))
        count = chance.randint(1, min(room, total - done))
        left = count
        for target in want:
            part = min(len(target), left)
            target[:part] = wire[done + count - left : done + count - left + part]
            left -= part
        scatter.advance(count)
        done += count

    assert done == total
    assert b"".join(targets) == wire[:total]
    assert scatter.sums == [xxhash.xxh3_64_intdigest(wire[i : i + cell]) for i in range(0, total, cell)]
    inside = {i for _, start, size in places for i in range(start, start + size)}
    assert all(block[i] == CANARY for i in range(len(block)) if i not in inside)


def test_without_cells_nothing_is_summed() -> None:
    data = bytearray(10)
    scatter = Scatter([memoryview(data)])
    assert scatter.copy(memoryview(b"0123456789ab")) == 10
    assert (bytes(data), scatter.sums, scatter.full) == (b"0123456789", [], True)


def test_a_system_call_is_not_given_more_views_than_it_takes() -> None:
    views = [memoryview(bytearray(1)) for _ in range(5000)]
    scatter = Scatter(views)
    while not scatter.full:
        targets = scatter.targets()
        assert 0 < len(targets) <= 1024
        scatter.advance(len(targets))
