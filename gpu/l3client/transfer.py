"""The handle of a backup or a restore that is under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from l3client.streams import Event, Stream
from l3store.layout import Range

_CANCEL_SECONDS = 10.0


class TransferCancelledError(RuntimeError):
    """The transfer was told to end before its end."""


@dataclass(frozen=True, slots=True)
class _Step:
    """Work on some layers that has been submitted to the device."""

    layers: Range
    event: Event


class Transfer:
    """Pages on their way. Waiting never raises: what fails makes the result smaller, and `error` says why.

    A restore delivers layers in order. It is good for the pages that `wait` returns at its end; a layer waited for
    earlier may have promised more.

    The pages of the pool belong to the transfer until it is `done`: until then a restore may write to them, and a
    backup read them, also after a wait that ran out. Who cannot wait calls `cancel` first.
    """

    def __init__(self, asked: int, layers: Range) -> None:
        """``asked`` pages, of which ``layers`` (absolute) move."""
        self.asked = asked
        self.error: BaseException | None = None
        self.bytes = 0
        self._layers = layers
        self._pages = asked
        self._submitted = layers.start
        self._steps: list[_Step] = []
        self._finished = False
        self._began = time.monotonic()
        self._seconds = 0.0
        self._changed = threading.Condition()
        # Held while a copy begins, which may compile a kernel: `done` must not wait for that.
        self._beginning = threading.Lock()

    @property
    def done(self) -> bool:
        """Whether the transfer is over, well or not, and touches the pool no more. Never blocks."""
        # In this order: what began before the end is noted by the time that its lock is free.
        if not self.stopped or self._beginning.locked():
            return False
        with self._changed:
            steps = tuple(self._steps)
        return all(step.event.done() for step in steps)

    @property
    def stopped(self) -> bool:
        """Whether no further copy will begin. Those that have begun may be under way."""
        with self._changed:
            return self._finished

    @property
    def seconds(self) -> float:
        """From the request to the end of the last copy's submission; so far, while it is under way."""
        with self._changed:
            return self._seconds if self._finished else time.monotonic() - self._began

    def ready(self, layer: int) -> bool:
        """Whether `wait_layer` would return at once: all pages of the layer are in place, or never will be."""
        with self._changed:
            submitted = self._finished or self._submitted > layer
            steps = self._steps_before(layer + 1)
        return submitted and all(step.event.done() for step in steps)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it is over: the leading pages that are good.

        Where ``timeout`` seconds were not enough it is 0 and `done` is False: the transfer goes on, and may be waited
        for again.
        """
        return self._wait(self._layers.end, timeout, whole=True)

    def wait_layer(self, layer: int, timeout: float | None = None) -> int:
        """Wait until one layer (absolute) of all pages is in place: the leading pages that are good so far.

        Where ``timeout`` seconds were not enough it is 0 and `ready` of the layer is False. ValueError for a layer that
        is not moved.
        """
        self._require(layer)
        return self._wait(layer + 1, timeout, whole=False)

    def wait_layer_on(self, stream: Stream, layer: int, timeout: float | None = None) -> int:
        """Let work submitted to ``stream`` from now on begin after one layer is in place: the pages good so far.

        The caller waits, ``timeout`` seconds at most, until the bytes have arrived and their copies to the device are
        submitted; only the stream waits for the copies. An engine's own stream is ``CUDAStream(raw)``. What it returns
        is as with `wait_layer`, but knows nothing of a copy that fails later: `wait` at the end does.
        """
        self._require(layer)
        steps = self._submitted_steps(layer + 1, _deadline(timeout), whole=False)
        if steps is None:
            return 0
        for step in steps:
            if step.event.error is not None:
                self.fail(step.event.error)
                return 0
            stream.wait_event(step.event)
        with self._changed:
            return self._pages

    def cancel(self, timeout: float = _CANCEL_SECONDS) -> bool:
        """End it with 0 pages, unless it is over: no further copy into or out of the pool begins.

        Waits for the copies that have begun, ``timeout`` seconds at most, and returns whether they are over: the pages
        are then the caller's again, and hold anything. A call to the service may still run; it touches no page.
        """
        self.finish(0, TransferCancelledError("the transfer was cancelled"))
        return self.settle(timeout)

    def settle(self, timeout: float) -> bool:
        """Wait for the copies that have begun, of a transfer that is `stopped`; whether they are over."""
        deadline = time.monotonic() + timeout
        if not self._beginning.acquire(timeout=timeout):
            return False
        self._beginning.release()
        with self._changed:
            steps = tuple(self._steps)
        return all(step.event.wait(_left(deadline)) for step in steps)

    def begin(self, layers: Range, submit: Callable[[], Event]) -> Event:
        """Producer: begin a copy of these layers into or out of the pool; ``submit()`` returns its end.

        Raises TransferCancelledError where the transfer has ended.
        """
        with self._beginning:
            self.require_going()
            event = submit()
            with self._changed:
                self._steps.append(_Step(layers, event))
        return event

    def require_going(self) -> None:
        """Producer: raises TransferCancelledError where the transfer has ended, and work for it is in vain."""
        if self.stopped:
            raise TransferCancelledError("the transfer has ended")

    def moved(self, count: int) -> None:
        """Producer: ``count`` more bytes are moved."""
        with self._changed:
            self.bytes += count

    def advance(self, layer: int, pages: int) -> None:
        """Producer: all layers before ``layer`` are submitted, and ``pages`` leading pages are good in them."""
        with self._changed:
            self._submitted = layer
            self._pages = min(self._pages, pages)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Producer: why the result will be smaller. The first one is kept."""
        with self._changed:
            self.error = self.error or error

    def finish(self, pages: int, error: BaseException | None = None) -> None:
        """Producer: nothing more will be submitted. Only the first call counts."""
        with self._changed:
            if self._finished:
                return
            self._pages = min(self._pages, pages)
            self.error = self.error or error
            self._finished = True
            self._seconds = time.monotonic() - self._began
            self._changed.notify_all()

    def _wait(self, end: int, timeout: float | None, *, whole: bool) -> int:
        deadline = _deadline(timeout)
        steps = self._submitted_steps(end, deadline, whole=whole)
        if steps is None:
            return 0
        for step in steps:
            if not step.event.wait(_left(deadline)):
                return 0
            if step.event.error is not None:
                self.fail(step.event.error)
                return 0
        with self._changed:
            return self._pages

    def _submitted_steps(self, end: int, deadline: float | None, *, whole: bool) -> tuple[_Step, ...] | None:
        """The copies of the layers before ``end`` once all of them are submitted; None where that took too long."""
        with self._changed:
            reached = self._changed.wait_for(
                lambda: self._finished or (not whole and self._submitted >= end), _left(deadline)
            )
            if not whole:
                return self._steps_before(end) if reached else None
        # Ended by another thread, one of its copies may be just beginning.
        if not reached or not self._beginning.acquire(timeout=-1 if deadline is None else _left(deadline) or 0.0):
            return None
        self._beginning.release()
        with self._changed:
            return self._steps_before(end)

    def _steps_before(self, end: int) -> tuple[_Step, ...]:
        return tuple(step for step in self._steps if step.layers.start < end)

    def _require(self, layer: int) -> None:
        if layer not in self._layers:
            raise ValueError(f"layer {layer} is not among the layers {self._layers} of this transfer")


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
