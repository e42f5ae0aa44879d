"""The reading half of a connection, without one: what a slow body is, and what is not."""

from __future__ import annotations

import asyncio
import time
from typing import cast

import pytest

from l3store.errors import SlowBodyError
from l3store.service.http.incoming import Incoming
from l3store.service.http.pace import MIN_BYTES, WINDOW_SECONDS


class Transport:
    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def is_closing(self) -> bool:
        return False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time it is, to be changed."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def arrive(incoming: Incoming, data: bytes) -> None:
    incoming.buffer()[: len(data)] = data
    incoming.received(len(data))


async def test_a_small_body_long_after_another_is_not_slow(clock: list[float]) -> None:
    """Part of it came along with its head, and the connection had been quiet for longer than a body may be."""
    incoming = Incoming(cast("asyncio.Transport", Transport()))
    for _ in range(3):
        arrive(incoming, b"HEAD" + b"a" * 10)
        incoming.consume(4)
        incoming.begin_body(20)
        body = bytearray(20)
        reading = asyncio.create_task(incoming.read_into(memoryview(body)))
        await asyncio.sleep(0)
        arrive(incoming, b"b" * 10)
        await reading
        assert body == b"a" * 10 + b"b" * 10
        clock[0] += 2 * WINDOW_SECONDS


async def test_nothing_is_held_against_a_sender_before_somebody_wants_the_body(clock: list[float]) -> None:
    incoming = Incoming(cast("asyncio.Transport", Transport()))
    incoming.begin_body(MIN_BYTES)
    clock[0] += 2 * WINDOW_SECONDS
    reading = asyncio.create_task(incoming.read_into(memoryview(bytearray(MIN_BYTES))))
    await asyncio.sleep(0)
    assert not reading.done()
    reading.cancel()


async def test_a_body_that_comes_too_slowly_is_given_up(clock: list[float]) -> None:
    incoming = Incoming(cast("asyncio.Transport", Transport()))
    incoming.begin_body(100)
    reading = asyncio.create_task(incoming.read_some(10))
    await asyncio.sleep(0)
    arrive(incoming, b"c" * 10)
    await reading
    clock[0] += WINDOW_SECONDS + 1
    with pytest.raises(SlowBodyError):
        await incoming.read_some(10)
