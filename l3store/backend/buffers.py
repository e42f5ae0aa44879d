"""Reusable memory for bodies and cells, bounded in bytes.

Fresh memory costs a page fault every 4 KiB, more than copying into it does; so what was used is used again. Everything
that holds object bytes in this process holds buffers of one pool, so its size is the bound of them all.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from l3store.errors import RetryError, TooLargeError

_GRAIN = 4096
_STEPS = 8
_HUGE_BYTES = 2 << 20

Memory = bytearray | mmap.mmap


class PooledBuffer:
    """``view`` is memory of the size that was asked. It goes back to the pool when its last holder has released it."""

    __slots__ = ("_holders", "_memory", "_pool", "view")

    def __init__(self, pool: BufferPool, memory: Memory, size: int) -> None:
        self._pool = pool
        self._memory = memory
        self._holders = 1
        self.view = memoryview(memory)[:size]

    def retain(self) -> Self:
        """One more holder."""
        assert self._holders > 0, "a buffer that was given back"
        self._holders += 1
        return self

    def release(self) -> None:
        """One holder less."""
        assert self._holders > 0, "a buffer that was given back"
        self._holders -= 1
        if not self._holders:
            self._pool._take_back(self._memory)  # noqa: SLF001 - the pool and its buffers are one thing

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.release()


class BufferPool:
    """At most ``total`` bytes. Owned by one event loop; first come, first served.

    ``reclaim`` is asked for bytes before anybody has to wait: whoever keeps buffers only because they may be useful
    releases some, and says how many bytes those were.
    """

    def __init__(self, total: int, *, timeout: float = 10.0) -> None:
        self.total = total
        self.reclaim: Callable[[int], int] = lambda _: 0
        self._timeout = timeout
        self._allocated = 0
        self._free: dict[int, list[Memory]] = {}
        self._free_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[Memory]]] = deque()
        self._serving = False

    @property
    def used(self) -> int:
        """Bytes in buffers that somebody holds."""
        return self._allocated - self._free_bytes

    async def acquire(self, size: int) -> PooledBuffer:
        """A buffer with whatever bytes it last held.

        Raises `RetryError` where none comes free in time, and `TooLargeError` for more than there is.
        """
        slab = _slab(size)
        if slab > self.total:
            raise TooLargeError(f"{size} bytes at once; the service has {self.total} for bodies", limit=self.total)
        memory = None if self._waiting else self._try(slab)
        return PooledBuffer(self, memory or await self._wait(slab), size)

    def reconsider(self) -> None:
        """Something that was kept may be reclaimed now: look again on behalf of those who wait."""
        self._serve()

    def _try(self, slab: int) -> Memory | None:
        free = self._free.get(slab)
        if free:
            self._free_bytes -= slab
            return free.pop()
        self._drop_free(self._allocated + slab - self.total)
        while (excess := self._allocated + slab - self.total) > 0:
            # What is reclaimed comes back as free memory, perhaps of this very size, perhaps shared and not yet free.
            if not self.reclaim(excess):
                return None
            if free := self._free.get(slab):
                self._free_bytes -= slab
                return free.pop()
            self._drop_free(excess)
        self._allocated += slab
        return _allocate(slab)

    def _drop_free(self, excess: int) -> None:
        """Give unused memory of any size back to the system, until ``excess`` bytes are gone or none is left."""
        for slab in list(self._free) if excess > 0 else ():
            free = self._free[slab]
            while free and excess > 0:
                free.pop()
                excess -= slab
                self._allocated -= slab
                self._free_bytes -= slab
            if not free:
                del self._free[slab]

    async def _wait(self, slab: int) -> Memory:
        granted: asyncio.Future[Memory] = asyncio.get_running_loop().create_future()
        self._waiting.append((slab, granted))
        try:
            async with asyncio.timeout(self._timeout):
                return await granted
        except BaseException as error:
            if granted.done() and not granted.cancelled():
                self._take_back(granted.result())
            if isinstance(error, TimeoutError):
                raise RetryError("too many bytes are in flight; try again in a second") from error
            raise
        finally:
            self._serve()

    def _take_back(self, memory: Memory) -> None:
        self._free.setdefault(len(memory), []).append(memory)
        self._free_bytes += len(memory)
        self._serve()

    def _serve(self) -> None:
        """Give what is free to those who wait, in their order."""
        if self._serving:
            # What is reclaimed for the first of them comes back through here.
            return
        self._serving = True
        try:
            while self._waiting:
                slab, granted = self._waiting[0]
                if not granted.done():
                    memory = self._try(slab)
                    if memory is None:
                        return
                    granted.set_result(memory)
                self._waiting.popleft()
        finally:
            self._serving = False


def _allocate(slab: int) -> Memory:
    """Memory from the system. Large pages, where it has them: one fault and one entry of the TLB in place of 512."""
    if slab < _HUGE_BYTES:
        return bytearray(slab)
    memory = mmap.mmap(-1, slab, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _slab(size: int) -> int:
    """The size that is allocated for ``size`` bytes: few different ones, none more than an eighth too large."""
    if size <= _GRAIN:
        return _GRAIN
    step = max(_GRAIN, 1 << max(0, size.bit_length() - 1 - _STEPS.bit_length() + 1))
    return -(-size // step) * step
