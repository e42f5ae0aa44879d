"""Streams: order, errors, waiting and closing, on a thread and (against a stand-in) on CUDA."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
import torch

from l3client.streams import CPUEvent, CPUStream, CUDAStream, Event, Stream, StreamClosedError, open_stream


@pytest.fixture
def stream() -> Iterator[Stream]:
    stream = open_stream("cpu")
    yield stream
    stream.close()


def test_work_is_done_in_order_on_one_daemon_thread(stream: Stream) -> None:
    done: list[int] = []
    threads: set[threading.Thread] = set()

    def work(number: int) -> None:
        time.sleep(0.001 * (number % 3))
        done.append(number)
        threads.add(threading.current_thread())

    events = [stream.submit(functools.partial(work, number)) for number in range(30)]
    assert events[-1].wait(10)
    assert done == list(range(30))
    assert all(event.done() and event.error is None for event in events)
    (thread,) = threads
    assert thread.daemon
    assert thread.name.startswith("l3client-stream-")
    assert thread is not threading.current_thread()


def test_submit_does_not_wait_for_the_work(stream: Stream) -> None:
    gate = threading.Event()
    event = stream.submit(gate.wait)
    assert not event.done()
    assert event.wait(0.01) is False
    gate.set()
    assert event.wait(10) is True
    assert event.done()


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3)])
def test_an_error_is_kept_and_later_work_still_runs(stream: Stream, error: BaseException) -> None:
    def fail() -> None:
        raise error

    failed, after = stream.submit(fail), stream.submit(lambda: None)
    assert after.wait(10)
    assert failed.done()
    assert failed.error is error
    assert after.error is None


def test_work_waits_for_an_event_of_another_stream(stream: Stream) -> None:
    other = open_stream("cpu")
    gate, order = threading.Event(), list[str]()
    try:

        def first() -> None:
            gate.wait(10)
            order.append("other")

        before = stream.submit(lambda: order.append("before"))
        stream.wait_event(other.submit(first))
        after = stream.submit(lambda: order.append("after"))
        assert before.wait(10)
        assert after.wait(0.12) is False  # longer than the stream takes to look whether it was closed
        gate.set()
        assert after.wait(10)
        assert order == ["before", "other", "after"]
    finally:
        gate.set()
        other.close()


def test_an_event_that_failed_is_over_for_those_who_wait(stream: Stream) -> None:
    failed = CPUEvent()
    failed.complete(ValueError("no"))
    stream.wait_event(failed)
    after = stream.submit(lambda: None)
    assert after.wait(10)
    assert after.error is None


def test_close_ends_what_has_not_begun_and_finishes_what_has() -> None:
    stream = open_stream("cpu")
    gate, begun = threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        gate.wait(10)
        return "done"

    running = stream.submit(work)
    waiting = stream.submit(lambda: None)
    assert begun.wait(10)
    closer = threading.Thread(target=stream.close)
    closer.start()
    assert waiting.wait(10)
    assert isinstance(waiting.error, StreamClosedError)
    assert not running.done()
    gate.set()
    closer.join(10)
    assert running.done()
    assert running.error is None


class AskedEvent(CPUEvent):
    """Says when somebody began to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.asked.set()
        return super().wait(timeout)


def test_close_does_not_hang_on_stuck_work_nor_on_an_event_that_never_comes() -> None:
    gate, begun = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        gate.wait(60)

    stuck = CPUStream(join_seconds=0.05)
    event, waiting = stuck.submit(work), stuck.submit(lambda: None)
    assert begun.wait(10)
    start = time.monotonic()
    stuck.close()
    assert not event.done()
    assert isinstance(waiting.error, StreamClosedError)

    never = CPUStream(join_seconds=30)
    event_that_never_comes = AskedEvent()
    never.wait_event(event_that_never_comes)
    behind = never.submit(lambda: None)
    assert event_that_never_comes.asked.wait(10)
    never.close()
    assert time.monotonic() - start < 10
    assert isinstance(behind.error, StreamClosedError)
    gate.set()
    assert event.wait(10)


def test_close_twice_and_from_its_own_work() -> None:
    stream = open_stream("cpu")
    event = stream.submit(stream.close)
    assert event.wait(10)
    assert event.error is None
    stream.close()
    with pytest.raises(StreamClosedError):
        stream.submit(lambda: None)
    with pytest.raises(StreamClosedError):
        stream.wait_event(event)


def test_an_idle_stream_does_not_keep_its_last_work_alive(stream: Stream) -> None:
    held = threading.Event()
    gone = weakref.ref(held)
    assert stream.submit(held.set).wait(10)
    del held
    deadline = time.monotonic() + 10
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert gone() is None


class FakeEvent:
    """A CUDA event that is over when the test says so."""

    over = False
    broken = False
    recorded_on: object = None

    def record(self, stream: object) -> None:
        self.recorded_on = stream

    def query(self) -> bool:
        if self.broken:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return self.over


class FakeStream:
    def __init__(self, device: object = None) -> None:
        self.device = device
        self.waited: list[object] = []

    def wait_event(self, event: object) -> None:
        self.waited.append(event)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Stand-ins for the few parts of torch.cuda that a stream uses; the list is the stack of current streams."""
    current: list[object] = []

    @contextlib.contextmanager
    def enter(stream: object) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", enter)
    return current


def test_cuda_work_is_enqueued_at_once_with_its_stream_current(cuda: list[object]) -> None:
    stream = open_stream("cuda:0")
    assert isinstance(stream, CUDAStream)
    seen: list[object] = []
    event = stream.submit(lambda: seen.extend(cuda))
    assert seen == [stream.raw]
    assert cuda == []
    assert event.raw.recorded_on is stream.raw  # type: ignore[attr-defined]
    assert event.done() is False
    assert event.wait(0.005) is False
    event.raw.over = True  # type: ignore[attr-defined]
    assert event.wait() is True
    assert event.error is None


def test_cuda_keeps_the_error_and_still_records_the_event(cuda: list[object]) -> None:
    error = ValueError("no")

    def fail() -> None:
        raise error

    event = open_stream("cuda").submit(fail)
    assert event.error is error
    assert event.done() is False  # what was enqueued before the failure has yet to run
    assert cuda == []


def test_a_lost_device_ends_waits_with_its_error(cuda: list[object]) -> None:
    event = open_stream("cuda").submit(lambda: None)
    event.raw.broken = True  # type: ignore[attr-defined]
    assert event.wait(10) is True
    assert isinstance(event.error, RuntimeError)


def test_cuda_waits_on_the_device_for_cuda_and_in_the_caller_for_the_rest(cuda: list[object]) -> None:
    stream, other = open_stream("cuda"), open_stream("cuda")
    event = other.submit(lambda: None)
    stream.wait_event(event)
    assert isinstance(stream, CUDAStream)
    assert stream.raw.waited == [event.raw]  # type: ignore[attr-defined]

    host = CPUEvent()
    timer = threading.Timer(0.05, host.complete)
    timer.start()
    stream.wait_event(host)
    assert host.done()
    timer.join()


def test_a_closed_cuda_stream_takes_no_work(cuda: list[object]) -> None:
    stream = open_stream("cuda")
    event: Event = stream.submit(lambda: None)
    stream.close()
    stream.close()
    with pytest.raises(StreamClosedError):
        stream.submit(lambda: None)
    with pytest.raises(StreamClosedError):
        stream.wait_event(event)
