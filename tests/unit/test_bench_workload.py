"""What the bench moves: names and places that do not meet, and bytes that an older run cannot pass for."""

from __future__ import annotations

import os
import time

import pytest

from l3client.bench.bare import runs
from l3client.bench.memory import clear, equal
from l3client.bench.process import cpu_seconds, family, peak_bytes, resident_bytes
from l3client.bench.workload import CELL, TOKEN_BYTES, Batch, Item, Sizes, Workload, items_of

SIZES = Sizes(
    objects=3, batches=2, batch_pages=4, small_reads=5, layers_pages=2, layers=4, match_pages=3, match_calls=1
)


@pytest.fixture(scope="module")
def work() -> Workload:
    return Workload(SIZES)


def check_places(items: tuple[Item, ...]) -> None:
    """They fill the destination from its start, one after the other."""
    at = 0
    for item in items:
        assert item.at == at
        at = item.end


def check_sizes(items: tuple[Item, ...]) -> None:
    """An object has as many bytes as its key says."""
    assert all(len(item.data) == len(item.key.coordinate.layers) * item.cell_bytes for item in items)


def test_items_have_names_of_their_own_and_places_that_do_not_meet(work: Workload) -> None:
    for items in (work.big, items_of(work.batches), work.whole, work.layers.items):
        check_places(items)
        check_sizes(items)
        assert len({str(item.key) for item in items}) == len(items)
    check_sizes(work.match.items)
    assert (len(work.big), len(work.batches), len(work.small)) == (3, 2, 5)
    assert len(work.match.items) == 3 * 4


def test_a_batch_is_the_bytes_of_one_object(work: Workload) -> None:
    for batch, whole in zip(work.batches, work.whole, strict=True):
        assert (whole.at, len(whole.data)) == (batch.at, batch.length)
        assert b"".join(item.data for item in batch.items) == bytes(whole.data)


def test_what_is_written_is_another_in_every_turn(work: Workload) -> None:
    """New names, and at every place other bytes than in the turn before: what was not stored shows."""
    turns = [work.fresh_objects(turn)[1] for turn in (1, 2)]
    for one, other in zip(*turns, strict=True):
        assert one.key != other.key
        assert one.at == other.at
        assert not equal(one.data, other.data)
    before, after = (items_of(work.fresh_batches(turn)[1]) for turn in (1, 2))
    assert not any(equal(a.data, b.data) for a, b in zip(before, after, strict=True))


def test_the_model_that_tokens_are_counted_of() -> None:
    assert TOKEN_BYTES == 60 * 8 * 2 * 128 * 2
    assert CELL == 64 * 2 * 2 * 128 * 2


def test_equal_sees_one_byte_and_clear_clears() -> None:
    a, b = (memoryview(bytearray(os.urandom(8)) * 1000) for _ in range(2))
    b[:] = a
    assert equal(a, b)
    b[-1] ^= 1
    assert not equal(a, b)
    assert equal(a[:-1], b[:-1])
    assert not equal(a, b[:-1])
    assert equal(a[:0], b[:0])
    clear(b[1:])
    assert (b[0], sum(b[1:])) == (a[0], 0)


def test_runs_are_few_views_of_the_same_bytes(work: Workload) -> None:
    batches: tuple[Batch, ...] = work.fresh_batches(1)[1]
    for batch in batches:
        views = runs(batch.items, work.source)
        assert len(views) <= 2
        assert b"".join(views) == b"".join(item.data for item in batch.items)


def test_processes_are_looked_at_by_pid() -> None:
    assert family(os.getpid())[0] == os.getpid()
    assert peak_bytes([os.getpid()]) >= resident_bytes([os.getpid()]) > 1 << 20
    before = cpu_seconds([os.getpid()])
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    assert 0.04 < cpu_seconds([os.getpid()]) - before < 1
