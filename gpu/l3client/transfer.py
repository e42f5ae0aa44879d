"""The handle of a backup or a restore that is under way."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from l3client.streams import Event
from l3store.layout import Range


@dataclass(frozen=True, slots=True)
class _Step:
    """Work on some layers that has been submitted to the device."""

    layers: Range
    event: Event


class Transfer:
    """Pages on their way. Waiting never raises: what fails makes the result smaller, and `error` says why.

    A restore delivers layers in order. It is good for the pages that `wait` returns at its end; a layer waited for
    earlier may have promised more.
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

    @property
    def done(self) -> bool:
        """Whether the transfer is over, well or not. Never blocks."""
        with self._changed:
            return self._finished and all(step.event.done() for step in self._steps)

    @property
    def seconds(self) -> float:
        """From the request to the end of the last copy's submission; so far, while it is under way."""
        with self._changed:
            return self._seconds if self._finished else time.monotonic() - self._began

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it is over: the leading pages that are good. 0 where ``timeout`` seconds were not enough."""
        return self._wait(self._layers.end, timeout, whole=True)

    def wait_layer(self, layer: int, timeout: float | None = None) -> int:
        """Wait until one layer (absolute) of all pages is in place: the leading pages that are good so far.

        0 where ``timeout`` seconds were not enough. ValueError for a layer that is not moved.
        """
        if layer not in self._layers:
            raise ValueError(f"layer {layer} is not among the layers {self._layers} of this transfer")
        return self._wait(layer + 1, timeout, whole=False)

    def submitted(self, layers: Range, event: Event, *, moved: int) -> None:
        """Producer: ``moved`` bytes of these layers are being copied until ``event``."""
        with self._changed:
            self._steps.append(_Step(layers, event))
            self.bytes += moved

    def advance(self, layer: int, pages: int) -> None:
        """Producer: all layers before ``layer`` are submitted, and ``pages`` leading pages are good in them."""
        with self._changed:
            self._submitted = layer
            self._pages = min(self._pages, pages)
            self._changed.notify_all()

    def finish(self, pages: int, error: BaseException | None = None) -> None:
        """Producer: nothing more will be submitted. Only the first call counts."""
        with self._changed:
            if self._finished:
                return
            self._pages = min(self._pages, pages)
            self.error = error
            self._finished = True
            self._seconds = time.monotonic() - self._began
            self._changed.notify_all()

    def _wait(self, end: int, timeout: float | None, *, whole: bool) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            reached = self._changed.wait_for(
                lambda: self._finished or (not whole and self._submitted >= end), _left(deadline)
            )
            steps = [step for step in self._steps if step.layers.start < end]
        if not reached:
            return 0
        for step in steps:
            if not step.event.wait(_left(deadline)):
                return 0
            if step.event.error is not None:
                self.error = self.error or step.event.error
                return 0
        with self._changed:
            return self._pages


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
