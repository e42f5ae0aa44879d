"""Calls that are done together: whose results are whose, in what order, and what failures and cancellations do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from l3store.backend.gathering import Gathering


class Slow:
    """Answers each number with its square, when it is let go on; 13 fails."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = asyncio.Semaphore(0)

    async def __call__(self, items: Sequence[int]) -> list[int]:
        self.batches.append(list(items))
        await self.gate.acquire()
        if 13 in items:
            raise OSError("thirteen")
        return [item * item for item in items]

    def go(self, times: int = 1) -> None:
        for _ in range(times):
            self.gate.release()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_what_comes_meanwhile_is_done_together_in_order() -> None:
    slow = Slow()
    gathering = Gathering(slow, lanes=1, most=4)
    calls = [asyncio.create_task(gathering(items)) for items in ([1], [2, 3], [4], [5, 6, 7], [8, 9, 10, 11, 12])]
    await settle()
    assert slow.batches == [[1]]
    slow.go(10)
    assert await asyncio.gather(*calls) == [[1], [4, 9], [16], [25, 36, 49], [64, 81, 100, 121, 144]]
    assert slow.batches == [[1], [2, 3, 4], [5, 6, 7], [8, 9, 10, 11, 12]]
    assert await gathering([2]) == [4]


async def test_as_many_run_at_once_as_there_are_lanes() -> None:
    slow = Slow()
    gathering = Gathering(slow, lanes=2, most=8)
    calls = [asyncio.create_task(gathering([at])) for at in range(5)]
    await settle()
    assert slow.batches == [[0], [1]]
    slow.go()
    await settle()
    assert slow.batches == [[0], [1], [2, 3, 4]]
    slow.go(2)
    assert await asyncio.gather(*calls) == [[0], [1], [4], [9], [16]]


async def test_a_failure_is_that_of_all_who_were_in_it_and_of_nobody_else() -> None:
    slow = Slow()
    gathering = Gathering(slow, lanes=1, most=2)
    calls = [asyncio.create_task(gathering([at])) for at in (1, 13, 2, 3)]
    await settle()
    slow.go(10)
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert results[0] == [1]
    assert isinstance(results[1], OSError)
    assert isinstance(results[2], OSError)
    assert results[3] == [9]
    assert await gathering([4]) == [16]


@pytest.mark.parametrize("which", [0, 1, 2])
async def test_a_cancelled_caller_ends_after_its_items_and_harms_nobody(which: int) -> None:
    slow = Slow()
    gathering = Gathering(slow, lanes=1, most=8)
    calls = [asyncio.create_task(gathering([at])) for at in range(3)]
    await settle()
    calls[which].cancel()
    await settle()
    if which:
        # Its items are still in hand, and so is the memory that they lie in.
        assert not calls[which].done()
    slow.go(10)
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(results[which], asyncio.CancelledError)
    assert [r for at, r in enumerate(results) if at != which] == [[at * at] for at in range(3) if at != which]
    assert await gathering([4]) == [16]
