"""Whether it is worth asking a service that did not answer: a short circuit with a back-off."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from l3store.errors import L3Error, TransportError


class BackOffError(RuntimeError):
    """The service failed to answer a short while ago, and was not asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackOff:
    """After ``failures`` calls in a row without an answer, ask nothing for ``first`` seconds.

    Then one call is let through. Each that fails as well doubles the pause, up to ``longest``; an answer ends it.
    """

    failures: int = 3
    first: float = 1.0
    longest: float = 30.0


class Breaker:
    """Counts what a `BackOff` is about. Thread-safe."""

    def __init__(self, options: BackOff, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._clock = clock
        self._lock = threading.Lock()
        self._in_a_row = 0
        self._pause = 0.0
        self._until = 0.0
        self._probing = False

    def check(self) -> None:
        """Raises `BackOffError` where the service is not to be asked now."""
        with self._lock:
            if not self._pause:
                return
            now = self._clock()
            if now < self._until:
                raise BackOffError(f"the service did not answer: it is asked again in {self._until - now:.1f} s")
            # One at a time; the next after as long again, whatever becomes of this one.
            self._probing = True
            self._until = now + self._pause

    def note(self, error: BaseException | None) -> None:
        """How a call went: a failure is no answer at all, a refusal is one. What is ours alone says nothing."""
        if error is not None and not isinstance(error, L3Error):
            return
        with self._lock:
            if not isinstance(error, TransportError):
                self._in_a_row, self._pause, self._probing = 0, 0.0, False
                return
            self._in_a_row += 1
            if self._in_a_row < self._options.failures:
                return
            if self._pause and not self._probing:
                return  # a call that began before the pause did
            self._pause = min(2 * self._pause, self._options.longest) if self._pause else self._options.first
            self._until = self._clock() + self._pause
            self._probing = False
