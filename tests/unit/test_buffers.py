"""Reusable memory: bounded, first come first served, and never two holders' at once."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from l3store.backend import BufferPool, PooledBuffer
from l3store.backend.buffers import _slab
from l3store.errors import RetryError, TooLargeError

PAGE = 4096


@given(st.integers(1, 1 << 30))
def test_a_slab_holds_what_was_asked_and_little_more(size: int) -> None:
    slab = _slab(size)
    assert slab >= size
    assert slab % PAGE == 0
    assert slab - size < max(PAGE, size / 8 + PAGE)
    assert _slab(slab) == slab


async def test_memory_is_used_again_and_has_the_size_that_was_asked() -> None:
    pool = BufferPool(10 * PAGE)
    first = await pool.acquire(5000)
    assert len(first.view) == 5000
    memory = first.view.obj
    first.release()
    second = await pool.acquire(6000)
    assert second.view.obj is memory
    assert pool.used == 2 * PAGE
    second.release()
    assert pool.used == 0


async def test_it_goes_back_with_its_last_holder() -> None:
    pool = BufferPool(PAGE)
    held = (await pool.acquire(1)).retain()
    held.release()
    assert pool.used == PAGE
    held.release()
    assert pool.used == 0
    with pytest.raises(AssertionError):
        held.release()


async def test_who_waits_is_served_in_turn() -> None:
    pool = BufferPool(10 * PAGE)
    first = await pool.acquire(6 * PAGE)
    order: list[str] = []

    async def take(name: str, size: int) -> None:
        with await pool.acquire(size):
            order.append(name)

    waiting = [asyncio.create_task(take(name, pages * PAGE)) for name, pages in [("large", 8), ("small", 1)]]
    await asyncio.sleep(0.01)
    # The small one could go at once, and then the large one might never.
    assert order == []
    first.release()
    await asyncio.gather(*waiting)
    assert order == ["large", "small"]
    assert pool.used == 0


async def test_more_than_there_is_is_refused_at_once() -> None:
    with pytest.raises(TooLargeError, match="4096 for bodies"):
        await BufferPool(PAGE).acquire(2 * PAGE)


async def test_who_waits_too_long_is_told_to_retry_and_holds_nobody_up() -> None:
    pool = BufferPool(4 * PAGE, timeout=0.02)
    held = await pool.acquire(4 * PAGE)
    with pytest.raises(RetryError, match="in flight"):
        await pool.acquire(2 * PAGE)
    later = asyncio.create_task(pool.acquire(PAGE))
    await asyncio.sleep(0)
    held.release()
    (await later).release()
    assert pool.used == 0


async def test_who_gives_up_is_passed_over_at_any_moment() -> None:
    """Cancelled while waiting, in the turn in which memory comes free, and in the one after."""
    for turns in range(4):
        pool = BufferPool(4 * PAGE)
        held = await pool.acquire(4 * PAGE)
        first, second = (asyncio.create_task(pool.acquire(3 * PAGE)) for _ in range(2))
        await asyncio.sleep(0)
        if turns % 2:
            first.cancel()
            if turns == 3:
                await asyncio.sleep(0)
            held.release()
        else:
            held.release()
            if turns == 2:
                await asyncio.sleep(0)
            first.cancel()
        outcome = (await asyncio.gather(first, return_exceptions=True))[0]
        if isinstance(outcome, PooledBuffer):
            outcome.release()
        (await asyncio.wait_for(second, 1)).release()
        assert pool.used == 0


async def test_what_is_only_kept_is_reclaimed_before_anybody_waits() -> None:
    pool = BufferPool(4 * PAGE, timeout=0.05)
    kept = [await pool.acquire(PAGE) for _ in range(3)]
    asked: list[int] = []

    def reclaim(wanted: int) -> int:
        asked.append(wanted)
        if not kept:
            return 0
        kept.pop().release()
        return PAGE

    pool.reclaim = reclaim
    with await pool.acquire(2 * PAGE):
        assert len(kept) == 2
        with pytest.raises(RetryError):
            await pool.acquire(4 * PAGE)
        assert kept == []
    assert asked[0] == PAGE
    assert pool.used == 0


async def test_random_holders_never_share_memory_and_never_exceed_the_bound() -> None:
    pool = BufferPool(64 * PAGE, timeout=5)
    sizes = random.Random(7)

    async def holder(number: int) -> None:
        for _ in range(60):
            size = sizes.randrange(1, 16 * PAGE)
            with await pool.acquire(size) as held:
                assert pool.used <= pool.total
                held.view[:] = bytes([number]) * size
                await asyncio.sleep(0)
                assert held.view.tobytes() == bytes([number]) * size

    await asyncio.gather(*(holder(number) for number in range(16)))
    assert pool.used == 0
