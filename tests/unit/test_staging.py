"""Staging buffers: back-pressure, reuse only after the event, and no buffer in two hands."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from l3client.staging import StagingBuffer, StagingPool, StagingTimeoutError
from l3client.streams import CPUEvent, open_stream


def test_a_buffer_is_one_memory_through_two_doors() -> None:
    with StagingPool(64, 1, pinned=False) as pool, pool.acquire() as buffer:
        assert buffer.tensor.dtype == torch.uint8
        assert buffer.tensor.shape == (64,)
        assert (buffer.view.nbytes, buffer.view.format, buffer.view.readonly) == (64, "B", False)
        buffer.view[3:6] = b"abc"
        assert bytes(buffer.tensor[3:6].tolist()) == b"abc"
        buffer.tensor[3] = 0
        assert bytes(buffer.view[3:6]) == b"\0bc"


def test_memory_is_made_once_and_used_again() -> None:
    pool = StagingPool(16, 2, pinned=False)
    addresses = set()
    for _ in range(10):
        with pool.acquire() as first, pool.acquire() as second:
            assert first.tensor.data_ptr() != second.tensor.data_ptr()
            addresses |= {first.tensor.data_ptr(), second.tensor.data_ptr()}
    assert len(addresses) == 2
    assert pool.stats().acquired == 20


def test_pinned_is_what_cuda_allows() -> None:
    pool = StagingPool(16, 1, pinned=True)
    assert pool.pinned is torch.cuda.is_available()
    with pool.acquire() as buffer:
        assert buffer.tensor.is_pinned() is pool.pinned


def test_none_free_is_a_timeout_that_says_why() -> None:
    pool = StagingPool(16, 2, pinned=False)
    held = pool.acquire()
    pool.acquire().release(CPUEvent())
    start = time.monotonic()
    with pytest.raises(StagingTimeoutError, match=r"2 x 16 bytes came free in 0.02 s: 1 held, 1 still being read"):
        pool.acquire(timeout=0.02)
    assert time.monotonic() - start >= 0.02
    with pytest.raises(TimeoutError):
        pool.acquire(timeout=0)
    stats = pool.stats()
    assert (stats.buffers, stats.in_use, stats.pending, stats.acquired) == (2, 1, 1, 2)
    assert (stats.waits, stats.timeouts) == (2, 2)
    assert stats.wait_seconds >= 0.02
    held.release()
    assert pool.acquire(timeout=0).tensor.shape == (16,)


def test_who_waits_gets_the_buffer_that_is_released() -> None:
    pool = StagingPool(16, 1, pinned=False)
    held = pool.acquire()
    address = held.tensor.data_ptr()
    got: list[StagingBuffer] = []
    waiter = threading.Thread(target=lambda: got.append(pool.acquire(timeout=10)))
    waiter.start()
    while pool.stats().waits == 0:
        time.sleep(0.001)
    assert got == []
    held.release()
    waiter.join(10)
    assert got[0].tensor.data_ptr() == address
    assert pool.stats().in_use == 1


def test_a_buffer_is_not_handed_out_before_its_event() -> None:
    pool = StagingPool(16, 1, pinned=False)
    event = CPUEvent()
    pool.acquire().release(event)
    with pytest.raises(StagingTimeoutError):
        pool.acquire(timeout=0.02)
    timer = threading.Timer(0.05, event.complete)
    timer.start()
    with pool.acquire(timeout=10):
        assert event.done()
    timer.join()
    assert pool.stats().pending == 0


def test_a_failed_event_frees_its_buffer() -> None:
    pool = StagingPool(16, 1, pinned=False)
    event = CPUEvent()
    pool.acquire().release(event)
    event.complete(ValueError("no"))
    assert pool.acquire(timeout=0).tensor.shape == (16,)


def test_one_pending_buffer_does_not_hold_up_another() -> None:
    pool = StagingPool(16, 2, pinned=False)
    first, second = pool.acquire(), pool.acquire()
    late, early = CPUEvent(), CPUEvent()
    second_address = second.tensor.data_ptr()
    first.release(late)
    second.release(early)
    early.complete()
    assert pool.acquire(timeout=0).tensor.data_ptr() == second_address
    assert pool.stats().pending == 1


def test_a_waiter_on_a_pending_buffer_takes_one_that_is_released_first() -> None:
    pool = StagingPool(16, 2, pinned=False)
    first, second = pool.acquire(), pool.acquire()
    first.release(CPUEvent())
    timer = threading.Timer(0.03, second.release)
    timer.start()
    assert pool.acquire(timeout=10).tensor.shape == (16,)
    timer.join()


def test_a_released_buffer_is_out_of_reach() -> None:
    pool = StagingPool(16, 1, pinned=False)
    stale = pool.acquire()
    stale.release()
    current = pool.acquire()
    with pytest.raises(RuntimeError, match="was released"):
        stale.release()
    with pytest.raises(RuntimeError, match="was released"):
        _ = stale.tensor
    with pytest.raises(RuntimeError, match="was released"):
        _ = stale.view
    assert pool.stats().in_use == 1
    assert current.tensor.shape == (16,)


def test_the_context_manager_leaves_an_explicit_release_alone() -> None:
    pool = StagingPool(16, 1, pinned=False)
    event = CPUEvent()
    with pool.acquire() as buffer:
        buffer.release(event)
    assert pool.stats().pending == 1


def test_the_context_manager_releases_after_an_error() -> None:
    pool = StagingPool(16, 1, pinned=False)
    with pytest.raises(KeyError), pool.acquire():
        raise KeyError
    assert pool.stats().in_use == 0


def test_close_ends_waits_and_refuses() -> None:
    pool = StagingPool(16, 1, pinned=False)
    held = pool.acquire()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            pool.acquire()
        except RuntimeError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    while pool.stats().waits == 0:
        time.sleep(0.001)
    pool.close()
    waiter.join(10)
    assert "closed" in str(errors[0])
    held.view[0] = 7
    held.release()
    with pytest.raises(RuntimeError, match="closed"):
        pool.acquire(timeout=0)


@pytest.mark.parametrize(("size", "count"), [(0, 1), (1, 0), (-1, 1)])
def test_nothing_is_not_a_pool(size: int, count: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        StagingPool(size, count, pinned=False)


def test_many_threads_never_share_a_buffer() -> None:
    pool = StagingPool(8, 3, pinned=False)
    stream = open_stream("cpu")
    clashes: list[int] = []

    def check(buffer: StagingBuffer, mark: int) -> None:
        if bytes(buffer.view) != bytes([mark]) * 8:
            clashes.append(mark)

    def work(mark: int) -> None:
        for _ in range(40):
            buffer = pool.acquire(timeout=30)
            buffer.tensor.fill_(mark)
            tensor = buffer.tensor
            check(buffer, mark)

            def later(tensor: torch.Tensor = tensor) -> None:
                if bytes(tensor.tolist()) != bytes([mark]) * 8:
                    clashes.append(mark)

            buffer.release(stream.submit(later))

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert stream.submit(lambda: None).wait(30)
    stream.close()
    assert clashes == []
    stats = pool.stats()
    assert (stats.in_use, stats.acquired, stats.timeouts) == (0, 240, 0)
    assert stats.waits > 0
