"""The short circuit: when a service that does not answer is left alone, and when it is asked again."""

from __future__ import annotations

import pytest

from l3client.breaker import BackOff, BackOffError, Breaker
from l3store.errors import ConnectError, RefusedError, TimeoutExpiredError


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(BackOff(failures=2, first=1, longest=3), clock=clock)


def refused(breaker: Breaker) -> bool:
    try:
        breaker.check()
    except BackOffError:
        return True
    return False


FAILURE = ConnectError("gone")


def test_only_failures_in_a_row_count(breaker: Breaker) -> None:
    for answer in (None, RefusedError("no")):
        breaker.note(FAILURE)
        breaker.note(answer)
        breaker.note(FAILURE)
        assert not refused(breaker)
        breaker.note(None)
    breaker.note(FAILURE)
    breaker.note(ValueError("ours: neither an answer nor none"))
    breaker.note(TimeoutExpiredError("late", phase="read"))
    assert refused(breaker)


def test_one_call_is_let_through_after_a_pause_that_doubles_to_a_limit(breaker: Breaker, clock: Clock) -> None:
    breaker.note(FAILURE)
    breaker.note(FAILURE)
    for pause in (1, 2, 3, 3):
        clock.now += pause - 0.01
        assert refused(breaker)
        clock.now += 0.02
        assert [refused(breaker) for _ in range(3)] == [False, True, True]
        breaker.note(FAILURE)


def test_an_answer_ends_it(breaker: Breaker, clock: Clock) -> None:
    breaker.note(FAILURE)
    breaker.note(FAILURE)
    clock.now += 1.1
    assert not refused(breaker)
    breaker.note(None)
    assert not refused(breaker)
    breaker.note(FAILURE)
    assert not refused(breaker)


def test_calls_that_began_before_the_pause_do_not_lengthen_it(breaker: Breaker, clock: Clock) -> None:
    for _ in range(6):
        breaker.note(FAILURE)
    clock.now += 1.1
    assert not refused(breaker)


def test_a_call_let_through_that_never_ends_blocks_nobody(breaker: Breaker, clock: Clock) -> None:
    breaker.note(FAILURE)
    breaker.note(FAILURE)
    clock.now += 1.1
    assert not refused(breaker)
    clock.now += 1.1
    assert not refused(breaker)
