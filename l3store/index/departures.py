"""Objects on their way out: the index has given them up, the backend may still have them.

A write of such an object waits until it is gone. And a write that was under way when its object began to go cannot know
whether its own file went with it: it is told, and writes again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence

from l3store.layout import Key


class Departures:
    """Not thread-safe: the event loop owns it. ``count`` grows with each departure, of however many objects."""

    def __init__(self) -> None:
        self.count = 0
        self._going: dict[Key, asyncio.Future[None]] = {}
        # For each write under way: its keys, and those of them that began to go meanwhile.
        self._writes: list[tuple[set[Key], set[Key]]] = []

    def __len__(self) -> int:
        return len(self._going)

    async def over(self, keys: Sequence[Key]) -> None:
        """Wait until none of these is going."""
        # All at once: while one is waited for, another may begin to go.
        while leaving := next((self._going[key] for key in keys if key in self._going), None):
            await asyncio.shield(leaving)

    @contextlib.contextmanager
    def watched(self, keys: Sequence[Key]) -> Iterator[set[Key]]:
        """The keys that begin to go while this is open."""
        departed: set[Key] = set()
        watch = (set(keys), departed)
        self._writes.append(watch)
        try:
            yield departed
        finally:
            self._writes = [other for other in self._writes if other is not watch]

    @contextlib.asynccontextmanager
    async def leaving(self, keys: Sequence[Key]) -> AsyncIterator[None]:
        """Hold writes of these keys back until the backend has done with what it had under them."""
        gone = asyncio.get_running_loop().create_future()
        self.count += 1
        for written, departed in self._writes:
            departed.update(written.intersection(keys))
        self._going.update(dict.fromkeys(keys, gone))
        try:
            yield
        finally:
            for key in keys:
                if self._going.get(key) is gone:
                    del self._going[key]
            gone.set_result(None)
