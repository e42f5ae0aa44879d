"""Host buffers between the transport and the pools: made once, used again and again, and never more than were made."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from l3client.streams import Event

# A buffer released after an event of a GPU has nobody to announce it: a waiter looks again after this long.
_POLL_SECONDS = 0.5e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingOptions:
    """``buffers`` host buffers of ``buffer_bytes``, shared by both directions.

    Who finds none free for ``timeout`` seconds gives its transfer up.
    """

    buffer_bytes: int = 32 << 20
    buffers: int = 4
    timeout: float = 30.0


class StagingTimeoutError(TimeoutError):
    """No staging buffer came free in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingStats:
    """What a staging pool has been doing.

    buffers       buffers there are
    in_use        of them, those acquired and not released
    pending       of them, those released whose event had not completed when last looked at
    acquired      buffers handed out so far
    waits         acquires that found none free, those that timed out included
    wait_seconds  how long these waited, together
    timeouts      acquires that gave up
    """

    buffers: int
    in_use: int
    pending: int
    acquired: int
    waits: int
    wait_seconds: float
    timeouts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    """One buffer's memory, through both of its doors."""

    tensor: Tensor
    view: memoryview


class StagingBuffer:
    """One buffer, held until released. As a context manager it is released at the end, unless it was already."""

    __slots__ = ("_memory", "_pool")

    def __init__(self, pool: StagingPool, memory: _Memory) -> None:
        self._pool = pool
        self._memory: _Memory | None = memory

    @property
    def tensor(self) -> Tensor:
        """The bytes, uint8 ``[buffer_bytes]``. Raises RuntimeError once released."""
        return self._held().tensor

    @property
    def view(self) -> memoryview:
        """The same bytes, writable, for a socket or a file. Raises RuntimeError once released."""
        return self._held().view

    def release(self, after: Event | None = None) -> None:
        """Give the buffer back, to be used again when ``after`` is over; returns at once.

        Raises RuntimeError if it was released before.
        """
        # The pool's lock decides between two threads that release at the same time.
        self._pool._take_back(self, after)  # noqa: SLF001 - the pool and its buffers are one thing

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._memory is not None:
            self.release()

    def _held(self) -> _Memory:
        if self._memory is None:
            raise RuntimeError("this staging buffer was released: its bytes may be another holder's by now")
        return self._memory

    def _surrender(self) -> _Memory:
        memory = self._held()
        self._memory = None
        return memory


class StagingPool:
    """``buffers`` host buffers of ``buffer_bytes`` bytes each; who wants one when all are taken waits.

    pinned  whether they are page-locked, so that a GPU reads and writes them: asked for, and CUDA is there
    """

    def __init__(self, buffer_bytes: int, buffers: int, *, pinned: bool) -> None:
        """Allocate everything now. Torch rounds what it pins up to a power of two; such sizes waste nothing."""
        if buffer_bytes < 1 or buffers < 1:
            raise ValueError(
                f"{buffers} buffers of {buffer_bytes} bytes: a staging pool needs at least 1 of at least 1"
            )
        self.buffer_bytes = buffer_bytes
        self.buffers = buffers
        self.pinned = pinned and torch.cuda.is_available()
        self._free = deque(_allocate(buffer_bytes, pinned=self.pinned) for _ in range(buffers))
        self._pending: deque[tuple[Event, _Memory]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._in_use = self._acquired = self._waits = self._timeouts = 0
        self._wait_seconds = 0.0

    def acquire(self, timeout: float | None = None) -> StagingBuffer:
        """A buffer that nothing else uses, with whatever bytes it last held.

        Waits ``timeout`` seconds at most (None: as long as it takes; 0: not at all). Raises StagingTimeoutError then,
        and RuntimeError if the pool is or gets closed.
        """
        with self._changed:
            memory = self._try_take() or self._wait(timeout)
            self._in_use += 1
            self._acquired += 1
            return StagingBuffer(self, memory)

    def stats(self) -> StagingStats:
        with self._changed:
            return StagingStats(
                buffers=self.buffers,
                in_use=self._in_use,
                pending=len(self._pending),
                acquired=self._acquired,
                waits=self._waits,
                wait_seconds=self._wait_seconds,
                timeouts=self._timeouts,
            )

    def close(self) -> None:
        """Hand out no more buffers, and end every wait with RuntimeError; those held stay valid.

        Never blocks: keep the pool until the events that its buffers were released after are over.
        """
        with self._changed:
            self._closed = True
            self._free.clear()
            self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _try_take(self) -> _Memory | None:
        if self._closed:
            raise RuntimeError("this staging pool is closed")
        if not self._free:
            for _ in range(len(self._pending)):
                event, memory = self._pending.popleft()
                if event.done():
                    self._free.append(memory)
                else:
                    self._pending.append((event, memory))
        # The last one given back first: its bytes are the likeliest to be in a cache still.
        return self._free.pop() if self._free else None

    def _wait(self, timeout: float | None) -> _Memory:
        start = time.monotonic()
        self._waits += 1
        try:
            while True:
                left = None if timeout is None else timeout - (time.monotonic() - start)
                if left is not None and left <= 0:
                    self._timeouts += 1
                    raise StagingTimeoutError(
                        f"no staging buffer of {self.buffers} x {self.buffer_bytes} bytes came free in {timeout} s: "
                        f"{self._in_use} held, {len(self._pending)} still being read or written"
                    )
                if self._pending:
                    left = _POLL_SECONDS if left is None else min(left, _POLL_SECONDS)
                self._changed.wait(left)
                memory = self._try_take()
                if memory is not None:
                    return memory
        finally:
            self._wait_seconds += time.monotonic() - start

    def _take_back(self, buffer: StagingBuffer, after: Event | None) -> None:
        with self._changed:
            memory = buffer._surrender()  # noqa: SLF001 - the pool and its buffers are one thing
            self._in_use -= 1
            if after is not None:
                self._pending.append((after, memory))
            elif not self._closed:
                self._free.append(memory)
            # All of them: one that polls for a pending buffer and one that sleeps are alike to notify().
            self._changed.notify_all()


def _allocate(size: int, *, pinned: bool) -> _Memory:
    tensor = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    # Touch every page of memory now rather than in the first request.
    tensor.zero_()
    return _Memory(tensor=tensor, view=tensor.numpy().data)
