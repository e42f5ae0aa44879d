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

from l3client.lanes import Lane
from l3client.streams import (
    CPUEvent,
    CPUStream,
    CUDAEvent,
    CUDAStream,
    Event,
    Stream,
    StreamClosedError,
    as_event,
    open_stream,
    wait_for,
    work_so_far,
)
from l3client.transfer import Transfer
from l3store.layout import Range


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


class LyingEvent(CPUEvent):
    """Says at once that it is not over, or fails at being waited for."""

    def __init__(self, failure: Exception | None = None) -> None:
        super().__init__()
        self.asked = 0
        self.failure = failure

    def wait(self, timeout: float | None = None) -> bool:
        self.asked += 1
        if self.failure is not None:
            raise self.failure
        return self.done()


def test_a_wait_that_fails_fails_what_depends_on_it_and_the_thread_lives(stream: Stream) -> None:
    failure = RuntimeError("CUDA error: device-side assert")
    stream.wait_event(LyingEvent(failure))
    events = [stream.submit(lambda: pytest.fail("ran without its order")) for _ in range(2)]
    assert all(event.wait(10) for event in events)
    assert [event.error for event in events] == [failure] * 2
    end = stream.close()
    assert end.done()


def test_an_event_that_answers_at_once_does_not_make_its_waiter_spin() -> None:
    event = LyingEvent()
    timer = threading.Timer(0.2, event.complete)
    timer.start()
    assert wait_for(event, lambda: False)
    assert event.asked < 20
    timer.join()
    assert wait_for(LyingEvent(), lambda: True) is False


def test_close_returns_the_end_of_all_work() -> None:
    stream = open_stream("cpu")
    gate, begun = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        gate.wait(10)

    stream.submit(work)
    assert begun.wait(10)
    end = stream.close(0)
    assert not end.done()
    gate.set()
    assert stream.close(10) is end
    assert end.done()


def test_nothing_is_enqueued_after_the_end_that_closing_a_cuda_stream_returns(cuda: list[object]) -> None:
    """Work that is being enqueued while another thread closes comes before the end."""
    stream = open_stream("cuda")
    assert isinstance(stream, CUDAStream)
    inside, gate = threading.Event(), threading.Event()
    order: list[str] = []

    def enqueue() -> None:
        inside.set()
        gate.wait(10)
        order.append("work")

    worker = threading.Thread(target=stream.submit, args=(enqueue,))
    worker.start()
    assert inside.wait(10)

    def close() -> None:
        end = stream.close()
        assert isinstance(end, CUDAEvent)
        order.append("end")
        recorded_on.append(end.raw.recorded_on)  # type: ignore[attr-defined]

    recorded_on: list[object] = []
    closer = threading.Thread(target=close)
    closer.start()
    closer.join(0.1)
    assert closer.is_alive()
    gate.set()
    worker.join(10)
    closer.join(10)
    assert order == ["work", "end"]
    assert recorded_on == [stream.raw]


def test_a_callers_event_is_ours_or_one_of_torch(cuda: list[object]) -> None:
    ours, raw = CPUEvent(), torch.cuda.Event()  # type: ignore[no-untyped-call]
    assert as_event(ours) is ours
    wrapped = as_event(raw)
    assert isinstance(wrapped, CUDAEvent)
    assert wrapped.raw is raw
    with pytest.raises(TypeError, match=r"neither a torch.cuda.Event nor has it error, done\(\) and wait"):
        as_event(object())  # type: ignore[arg-type]


def test_work_so_far_is_recorded_on_the_callers_current_stream(
    cuda: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams: dict[torch.device, FakeStream] = {torch.device("cuda", 1): FakeStream()}
    monkeypatch.setattr(torch.cuda, "current_stream", streams.__getitem__)
    event = work_so_far(torch.device("cuda", 1))
    assert isinstance(event, CUDAEvent)
    assert event.raw.recorded_on is streams[torch.device("cuda", 1)]  # type: ignore[attr-defined]
    assert work_so_far(torch.device("cpu")) is None


def test_copies_follow_a_cuda_event_on_the_device_and_no_other_lane_does(cuda: list[object]) -> None:
    first, second = Lane(torch.device("cuda")), Lane(torch.device("cuda"))
    try:
        event = as_event(torch.cuda.Event())  # type: ignore[no-untyped-call]
        first.follow(event, Transfer(1, Range(0, 1)))
        assert [lane.copies.raw.waited for lane in (first, second)] == [[event.raw], []]  # type: ignore[attr-defined]
    finally:
        first.worker.close()
        second.worker.close()


def test_an_engines_cuda_stream_waits_for_a_layer_on_the_device(cuda: list[object]) -> None:
    transfer = Transfer(4, Range(0, 1))
    copies = open_stream("cuda")
    copy = transfer.begin(Range(0, 1), lambda: copies.submit(lambda: None))
    transfer.advance(1, 4)
    engine = CUDAStream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    assert transfer.wait_layer_on(engine, 0, timeout=10) == 4
    assert engine.raw.waited == [copy.raw]  # type: ignore[attr-defined]
    assert not copy.done()
