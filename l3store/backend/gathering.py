"""Calls that come while one is being done are done together: one trip to a thread for all of them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")


class Gathering(Generic[_T, _R]):
    """``run`` for the items of many callers, ``lanes`` times at once and ``most`` items at a time, in their order.

    Where a lane is free, nothing is waited for. Owned by one event loop.
    """

    def __init__(self, run: Callable[[Sequence[_T]], Awaitable[Sequence[_R]]], *, lanes: int, most: int) -> None:
        self._run = run
        self._free = lanes
        self._most = most
        self._waiting: deque[tuple[Sequence[_T], asyncio.Future[Sequence[_R]]]] = deque()
        self._draining: set[asyncio.Task[None]] = set()

    async def __call__(self, items: Sequence[_T]) -> Sequence[_R]:
        """The results of one's own items. Also when it is cancelled, nothing is done with them when this has ended."""
        if self._free:
            self._free -= 1
            try:
                return await self._run(items)
            finally:
                self._free += 1
                self._go_on()
        done: asyncio.Future[Sequence[_R]] = asyncio.get_running_loop().create_future()
        self._waiting.append((items, done))
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            await asyncio.wait([done])
            raise

    def _go_on(self) -> None:
        if self._waiting and self._free:
            self._free -= 1
            task = asyncio.get_running_loop().create_task(self._drain())
            self._draining.add(task)
            task.add_done_callback(self._draining.discard)

    async def _drain(self) -> None:
        try:
            while self._waiting:
                await self._run_together(self._take())
        finally:
            self._free += 1

    def _take(self) -> list[tuple[Sequence[_T], asyncio.Future[Sequence[_R]]]]:
        taken = [self._waiting.popleft()]
        count = len(taken[0][0])
        while self._waiting and count + len(self._waiting[0][0]) <= self._most:
            taken.append(self._waiting.popleft())
            count += len(taken[-1][0])
        return taken

    async def _run_together(self, taken: list[tuple[Sequence[_T], asyncio.Future[Sequence[_R]]]]) -> None:
        try:
            results = await self._run([item for items, _ in taken for item in items])
        except BaseException as error:
            for _, done in taken:
                done.set_exception(error)
                # Also one who was cancelled has it looked at.
                done.exception()
            if not isinstance(error, Exception):
                raise
            return
        at = 0
        for items, done in taken:
            done.set_result(results[at : at + len(items)])
            at += len(items)
