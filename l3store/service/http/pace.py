"""How slow the other side may be: memory is held for as long as a body takes."""

from __future__ import annotations

import time

MIN_BYTES = 1 << 20
WINDOW_SECONDS = 20.0


class Pace:
    """Of a body that is on its way, `MIN_BYTES` have to move in every `WINDOW_SECONDS`, or the rest of it."""

    __slots__ = ("_begun", "_moved")

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._moved = 0

    @staticmethod
    def words() -> str:
        """The rule, for a message."""
        return f"{MIN_BYTES} bytes in {WINDOW_SECONDS:g} s"

    def start(self) -> None:
        """A new body: nothing is held against the time before it."""
        self._begun = time.monotonic()
        self._moved = 0

    def moved(self, count: int) -> None:
        """Note progress; enough of it begins a new window."""
        self._moved += count
        if self._moved >= MIN_BYTES:
            self.start()

    def patience(self) -> float:
        """Seconds that may still be waited."""
        return max(0.0, self._begun + WINDOW_SECONDS - time.monotonic())
