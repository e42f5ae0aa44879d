"""The handle of a transfer: waits whole and by layer, failures, and no waiter left behind."""

from __future__ import annotations

import threading
import time

import pytest

from l3client.streams import CPUEvent, CPUStream
from l3client.transfer import Transfer, TransferCancelledError
from l3store.layout import Range


def over(error: BaseException | None = None) -> CPUEvent:
    event = CPUEvent()
    event.complete(error)
    return event


def submit(transfer: Transfer, layers: Range, event: CPUEvent, *, moved: int) -> None:
    transfer.begin(layers, lambda: event)
    transfer.moved(moved)


def test_the_result_is_the_smallest_that_any_step_or_the_end_says() -> None:
    transfer = Transfer(10, Range(0, 2))
    submit(transfer, Range(0, 1), over(), moved=7)
    transfer.advance(1, 8)
    assert transfer.wait_layer(0) == 8
    submit(transfer, Range(1, 2), over(), moved=5)
    transfer.advance(2, 9)
    transfer.finish(10)
    assert (transfer.wait(), transfer.wait_layer(0), transfer.wait_layer(1)) == (8, 8, 8)
    assert (transfer.bytes, transfer.error, transfer.asked, transfer.done) == (12, None, 10, True)


def test_a_layer_is_there_before_the_whole_and_only_when_its_copy_is() -> None:
    transfer = Transfer(3, Range(4, 8))
    first = CPUEvent()
    submit(transfer, Range(4, 6), first, moved=1)
    assert transfer.wait_layer(4, timeout=0.01) == 0  # not all of its pages were submitted
    transfer.advance(6, 3)
    assert transfer.wait_layer(4, timeout=0.01) == 0  # submitted, but its copy is not over
    first.complete()
    assert transfer.wait_layer(4) == 3
    assert transfer.wait_layer(5) == 3
    assert transfer.wait_layer(6, timeout=0.01) == 0
    assert transfer.wait(timeout=0.01) == 0
    assert not transfer.done


def test_a_layer_does_not_wait_for_copies_of_later_layers() -> None:
    transfer = Transfer(3, Range(0, 2))
    submit(transfer, Range(0, 1), over(), moved=1)
    transfer.advance(1, 3)
    later = CPUEvent()
    submit(transfer, Range(1, 2), later, moved=1)
    transfer.advance(2, 3)
    transfer.finish(3)
    assert transfer.wait_layer(0, timeout=0) == 3
    assert (transfer.wait(timeout=0.01), transfer.done) == (0, False)
    later.complete()
    assert (transfer.wait(timeout=0), transfer.done) == (3, True)


def test_only_the_first_finish_counts() -> None:
    transfer = Transfer(5, Range(0, 1))
    failure = RuntimeError("first")
    transfer.finish(0, failure)
    transfer.finish(5)
    transfer.finish(0, RuntimeError("third"))
    assert (transfer.wait(), transfer.error) == (0, failure)


def test_a_copy_that_failed_makes_the_result_0_and_says_why() -> None:
    transfer = Transfer(5, Range(0, 3))
    failure = RuntimeError("copy")
    submit(transfer, Range(0, 1), over(), moved=1)
    transfer.advance(1, 5)
    submit(transfer, Range(1, 2), over(failure), moved=1)
    transfer.advance(2, 5)
    submit(transfer, Range(2, 3), over(), moved=1)
    transfer.advance(3, 5)
    transfer.finish(5)
    assert transfer.wait_layer(0) == 5
    assert transfer.wait_layer(1) == 0
    assert transfer.wait_layer(2) == 0
    assert transfer.wait() == 0
    assert transfer.error is failure


def test_what_failed_first_is_the_error() -> None:
    transfer = Transfer(5, Range(0, 1))
    submit(transfer, Range(0, 1), over(RuntimeError("copy")), moved=1)
    first = ConnectionError("transport")
    transfer.finish(0, first)
    assert transfer.wait() == 0
    assert transfer.error is first


def test_after_a_failure_copies_under_way_are_still_waited_for() -> None:
    """Whoever is told 0 may give the pages to another request: nothing may write to them any more."""
    transfer = Transfer(5, Range(0, 2))
    running = CPUEvent()
    submit(transfer, Range(0, 1), running, moved=1)
    transfer.finish(0, ConnectionError("gone"))
    assert not transfer.done
    began = time.monotonic()
    threading.Timer(0.1, running.complete).start()
    assert transfer.wait(10) == 0
    assert time.monotonic() - began >= 0.09
    assert transfer.done


@pytest.mark.parametrize("layer", [3, 8, -1])
def test_a_layer_that_is_not_moved_is_refused(layer: int) -> None:
    transfer = Transfer(1, Range(4, 8))
    with pytest.raises(ValueError, match=rf"layer {layer} is not among the layers \[4, 8\)"):
        transfer.wait_layer(layer)


def test_seconds_stop_at_the_end() -> None:
    transfer = Transfer(1, Range(0, 1))
    time.sleep(0.01)
    assert transfer.seconds >= 0.01
    transfer.finish(1)
    end = transfer.seconds
    time.sleep(0.01)
    assert transfer.seconds == end


def test_no_waiter_is_left_behind() -> None:
    """Many rounds of waiters racing with the producer: each returns the pages of its layer."""
    for round_ in range(30):
        transfer = Transfer(9, Range(0, 4))
        found: dict[int, int] = {}

        def wait(layer: int, transfer: Transfer = transfer, found: dict[int, int] = found) -> None:
            found[layer] = transfer.wait(10) if layer == 4 else transfer.wait_layer(layer, 10)

        waiters = [threading.Thread(target=wait, args=(layer,)) for layer in range(5)]
        for waiter in waiters[: round_ % 6]:
            waiter.start()
        for layer in range(4):
            submit(transfer, Range(layer, layer + 1), over(), moved=1)
            transfer.advance(layer + 1, 9)
        for waiter in waiters[round_ % 6 :]:
            waiter.start()
        transfer.finish(9)
        for waiter in waiters:
            waiter.join(10)
        assert found == dict.fromkeys(range(5), 9)


def test_a_wait_that_ran_out_is_told_from_no_good_pages() -> None:
    transfer = Transfer(3, Range(0, 2))
    assert (transfer.wait(0), transfer.done, transfer.ready(0)) == (0, False, False)
    first = CPUEvent()
    submit(transfer, Range(0, 1), first, moved=1)
    transfer.advance(1, 3)
    assert (transfer.wait_layer(0, 0), transfer.ready(0)) == (0, False)
    first.complete()
    assert (transfer.ready(0), transfer.ready(1), transfer.done) == (True, False, False)
    transfer.finish(0, ConnectionError("gone"))
    assert (transfer.wait(0), transfer.done, transfer.ready(1)) == (0, True, True)


def test_after_cancel_no_copy_begins_and_those_begun_are_waited_for() -> None:
    transfer = Transfer(3, Range(0, 2))
    running = CPUEvent()
    submit(transfer, Range(0, 1), running, moved=1)
    assert transfer.cancel(timeout=0.02) is False
    assert not transfer.done
    with pytest.raises(TransferCancelledError):
        transfer.begin(Range(1, 2), lambda: pytest.fail("a copy began after cancel"))
    running.complete()
    assert transfer.cancel() is True
    assert (transfer.done, transfer.wait(), transfer.wait_layer(1)) == (True, 0, 0)
    assert isinstance(transfer.error, TransferCancelledError)


def test_cancel_waits_for_a_copy_that_is_just_beginning() -> None:
    transfer = Transfer(3, Range(0, 2))
    gate, inside = threading.Event(), threading.Event()

    def slow() -> CPUEvent:
        inside.set()
        gate.wait(10)
        return over()

    beginning = threading.Thread(target=transfer.begin, args=(Range(0, 1), slow))
    beginning.start()
    assert inside.wait(10)
    assert transfer.cancel(timeout=0.02) is False
    assert (transfer.done, transfer.wait(0.02)) == (False, 0)
    gate.set()
    assert transfer.cancel(timeout=10) is True
    beginning.join(10)
    assert transfer.done


def test_cancelling_what_is_over_changes_nothing() -> None:
    transfer = Transfer(3, Range(0, 1))
    submit(transfer, Range(0, 1), over(), moved=1)
    transfer.finish(3)
    assert transfer.cancel() is True
    assert (transfer.wait(), transfer.error) == (3, None)


def test_a_stream_waits_for_a_layer_that_its_caller_does_not_wait_for() -> None:
    transfer = Transfer(3, Range(0, 2))
    stream = CPUStream()
    try:
        assert transfer.wait_layer_on(stream, 0, timeout=0.01) == 0  # nothing was submitted
        copy = CPUEvent()
        submit(transfer, Range(0, 1), copy, moved=1)
        transfer.advance(1, 3)
        submit(transfer, Range(1, 2), CPUEvent(), moved=1)
        assert transfer.wait_layer_on(stream, 0, timeout=0) == 3
        compute = stream.submit(lambda: None)
        assert compute.wait(0.1) is False
        copy.complete()
        assert compute.wait(10)
    finally:
        stream.close()


def test_a_stream_does_not_wait_for_a_layer_that_failed() -> None:
    transfer = Transfer(3, Range(0, 1))
    failure = RuntimeError("copy")
    submit(transfer, Range(0, 1), over(failure), moved=1)
    transfer.finish(3)
    stream = CPUStream()
    assert transfer.wait_layer_on(stream, 0) == 0
    assert transfer.error is failure
    stream.close()
