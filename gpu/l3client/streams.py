"""Ordered asynchronous work, on a CPU thread or on a CUDA stream, behind one interface.

Events order work and say when it is over; they do not stop later work. One that failed is over too: whoever depends on
its outcome reads ``error``.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

_names = itertools.count()

# Waits that a close must be able to end wake up this often; an event that completes ends them at once.
_CLOSE_CHECK_SECONDS = 0.05
# CUDA has no wait with a limit: the event is asked again after this long, then twice as long, up to the second value.
_POLL_SECONDS = (20e-6, 1e-3)
_JOIN_SECONDS = 5.0


class StreamClosedError(RuntimeError):
    """The stream was closed before this work began, so it never will."""


@runtime_checkable
class Event(Protocol):
    """The end of one piece of work on a stream."""

    @property
    def error(self) -> BaseException | None:
        """What the work raised; None if it did not, or has not yet."""

    def done(self) -> bool:
        """Whether the work is over, well or not. Never blocks."""

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the work is over, ``timeout`` seconds at most (None: as long as it takes); returns ``done()``."""


class Stream(Protocol):
    """Work done one piece after the other, in the order of submission."""

    def submit(self, fn: Callable[[], object]) -> Event:
        """Do ``fn()`` after everything submitted before. Raises StreamClosedError once closed."""

    def wait_event(self, event: Event) -> None:
        """Let work submitted from now on begin after ``event``, of any stream. Raises StreamClosedError once closed."""

    def close(self, seconds: float = _JOIN_SECONDS) -> Event:
        """Take no more work. What has not begun ends with StreamClosedError; what has begun is not interrupted.

        A thread is waited for, ``seconds`` at most; what a device does is not. Returns the end of all work that the
        stream ever took. May be called again, to wait longer.
        """


def open_stream(device: torch.device | str) -> Stream:
    """A new stream: CUDA work of ``device``, or a thread for a device that has no streams."""
    device = torch.device(device)
    if device.type == "cuda":
        return CUDAStream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    return CPUStream()


def as_event(after: Event | torch.cuda.Event) -> Event:
    """What a caller orders work with, as an `Event`. Raises TypeError for what cannot be waited for."""
    if isinstance(after, torch.cuda.Event):
        return CUDAEvent(after, None)
    if not isinstance(after, Event):
        raise TypeError(f"{after!r:.80} is neither a torch.cuda.Event nor has it error, done() and wait(timeout)")
    return after


def work_so_far(device: torch.device) -> Event | None:
    """The end of what the caller has enqueued on its current stream of ``device``; None for a device without streams.

    The caller's thread counts: torch keeps a current stream for each.
    """
    if device.type != "cuda":
        return None
    raw = torch.cuda.Event()  # type: ignore[no-untyped-call]
    raw.record(torch.cuda.current_stream(device))
    return CUDAEvent(raw, None)


def wait_for(event: Event, stop: Callable[[], bool]) -> bool:
    """Wait for anybody's event here; False where ``stop()`` came first. Raises what its ``wait`` raises."""
    while not stop():
        asked = time.monotonic()
        if event.wait(_CLOSE_CHECK_SECONDS):
            return True
        # One that answers at once, against its contract, must not make us spin.
        time.sleep(max(0.0, asked + _CLOSE_CHECK_SECONDS - time.monotonic()))
    return False


class CPUEvent:
    """The end of work on a thread."""

    __slots__ = ("_error", "_over")

    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: BaseException | None = None

    @property
    def error(self) -> BaseException | None:
        return self._error

    def done(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        return self._over.wait(timeout)

    def complete(self, error: BaseException | None = None) -> None:
        """Say that the work is over, and how it failed if it did."""
        self._error = error
        self._over.set()


class CPUStream:
    """Work on one daemon thread of its own."""

    def __init__(self, *, join_seconds: float = _JOIN_SECONDS) -> None:
        """``close`` waits ``join_seconds`` at most for the piece of work that has begun, unless it is told."""
        self._join_seconds = join_seconds
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._order = threading.Lock()
        self._end = CPUEvent()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"l3client-stream-{next(_names)}", daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[[], object]) -> Event:
        event = CPUEvent()

        def task() -> None:
            if self._closed.is_set():
                event.complete(StreamClosedError(f"{self._thread.name} was closed before this work began"))
                return
            if self._failure is not None:
                event.complete(self._failure)
                return
            try:
                fn()
            except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to the event, and the thread lives on
                event.complete(error)
            else:
                event.complete()

        self._put(task)
        return event

    def wait_event(self, event: Event) -> None:
        """Where waiting itself fails, what was to come after it never may: later work ends with that error."""

        def task() -> None:
            try:
                wait_for(event, self._closed.is_set)
            except BaseException as error:  # noqa: BLE001 - it belongs to the work that depends on this, and the thread lives on
                self._failure = self._failure or error

        self._put(task)

    def close(self, seconds: float | None = None) -> Event:
        with self._order:
            if not self._closed.is_set():
                self._closed.set()
                self._end_waiting_tasks()
                self._tasks.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(self._join_seconds if seconds is None else seconds)
        return self._end

    def _end_waiting_tasks(self) -> None:
        # Here and not on the thread, which may be stuck in its last piece: nobody may wait for what will not begin.
        while True:
            try:
                task = self._tasks.get_nowait()
            except queue.Empty:
                return
            if task is not None:
                task()

    def _put(self, task: Callable[[], None]) -> None:
        with self._order:
            if self._closed.is_set():
                raise StreamClosedError(f"{self._thread.name} is closed: it takes no more work")
            self._tasks.put(task)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            # An idle thread must not keep the buffers of the last piece alive.
            del task
        self._end.complete()


class CUDAEvent:
    """The end of work enqueued on a CUDA stream; ``error`` is what enqueueing raised, or CUDA when asked."""

    __slots__ = ("_error", "raw")

    def __init__(self, raw: torch.cuda.Event, error: BaseException | None) -> None:
        self.raw = raw
        self._error = error

    @property
    def error(self) -> BaseException | None:
        return self._error

    def done(self) -> bool:
        try:
            return bool(self.raw.query())  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            # The device is lost to this process: nothing on it will run again, and a waiter must not wait for it.
            self._error = self._error or error
            return True

    def wait(self, timeout: float | None = None) -> bool:
        end = None if timeout is None else time.monotonic() + timeout
        pause, longest = _POLL_SECONDS
        while not self.done():
            left = longest if end is None else end - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, longest)
        return True


class CUDAStream:
    """Work enqueued on a CUDA stream, one of its own or one of the engine's, by the thread that submits it."""

    def __init__(self, raw: torch.cuda.Stream) -> None:
        self.raw = raw
        self._closed = threading.Event()
        self._end: CUDAEvent | None = None
        # Held while enqueueing, or the work of two submitters would mix. A piece of work may submit to its own stream.
        self._order = threading.RLock()

    def submit(self, fn: Callable[[], object]) -> Event:
        """Call ``fn()`` now, with this stream current: what it enqueues runs in order, what it does runs at once."""
        with self._order:
            self._require_open()
            error: BaseException | None = None
            with torch.cuda.stream(self.raw):
                try:
                    fn()
                except Exception as raised:  # noqa: BLE001 - it belongs to the event
                    error = raised
                # After a failure as well: what was enqueued before it still runs.
                raw = torch.cuda.Event()  # type: ignore[no-untyped-call]
                raw.record(self.raw)
            return CUDAEvent(raw, error)

    def wait_event(self, event: Event) -> None:
        """A CUDA event holds up the stream; any other holds up the caller, as the device cannot see it."""
        self._require_open()
        if isinstance(event, CUDAEvent):
            with self._order:
                self.raw.wait_event(event.raw)
            return
        wait_for(event, self._closed.is_set)

    def close(self, seconds: float = 0.0) -> Event:  # the device is waited for by whoever has the event
        """Take no more work; what was enqueued runs on, and its events complete."""
        self._closed.set()
        # Under the lock of those who enqueue: nothing comes after this event.
        with self._order:
            if self._end is None:
                raw = torch.cuda.Event()  # type: ignore[no-untyped-call]
                error: RuntimeError | None = None
                try:
                    raw.record(self.raw)
                except RuntimeError as raised:  # the device is lost to this process
                    error = raised
                self._end = CUDAEvent(raw, error)
            return self._end

    def _require_open(self) -> None:
        if self._closed.is_set():
            raise StreamClosedError("this CUDA stream is closed: it takes no more work")
