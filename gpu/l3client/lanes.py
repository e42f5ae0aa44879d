"""The threads of a connector, the streams of their copies, and how all of them end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch

from l3client.staging import StagingPool
from l3client.streams import CPUStream, CUDAEvent, CUDAStream, Event, StreamClosedError, open_stream, wait_for
from l3client.transfer import Transfer

CLOSE_SECONDS = 5.0


class Lane:
    """One transfer after the other on a thread, and a stream for the copies of just these."""

    def __init__(self, device: torch.device) -> None:
        self.copies = open_stream(device)
        self.worker = CPUStream()
        self.load = 0

    def follow(self, event: Event, transfer: Transfer) -> None:
        """Let copies submitted from now on begin after ``event``: on the device where it can be, else by waiting here.

        Raises what the event's work raised, or waiting for it did, and TransferCancelledError where ``transfer`` ends
        first.
        """
        if isinstance(event, CUDAEvent) and isinstance(self.copies, CUDAStream):
            self.copies.wait_event(event)
            return
        if not wait_for(event, lambda: transfer.stopped):
            transfer.require_going()
        if event.error is not None:
            raise event.error


class Lanes:
    """All lanes of a connector, and the transfers that are under way in them."""

    def __init__(self, device: torch.device, staging: StagingPool, *, backups: int, restores: int) -> None:
        self.backups = tuple(Lane(device) for _ in range(backups))
        self.restores = tuple(Lane(device) for _ in range(restores))
        self.under_way: set[Transfer] = set()
        self._staging = staging
        self._lock = threading.Lock()

    def run(
        self,
        among: Sequence[Lane],
        transfer: Transfer,
        work: Callable[[Lane], int],
        ended: Callable[[BaseException | None], None],
    ) -> None:
        """Do ``work``, which returns good pages, in the emptiest of some lanes, and finish the transfer with that.

        ``ended`` is told before, except of what was ended from outside.
        """
        with self._lock:
            lane = min(among, key=lambda lane: lane.load)
            lane.load += 1
            self.under_way.add(transfer)

        def task() -> None:
            pages, error = 0, None
            try:
                transfer.require_going()
                pages = work(lane)
            except Exception as raised:  # noqa: BLE001 - whatever it is ends this transfer, counted, and nothing else
                error = raised
            if not transfer.stopped:
                ended(error)
            transfer.finish(pages, error)
            self._leave(lane, transfer)

        try:
            lane.worker.submit(task)
        except StreamClosedError as error:
            transfer.finish(0, error)
            self._leave(lane, transfer)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """End all transfers, wait for copies that have begun, and end the threads, in ``seconds`` all together.

        A thread that is stuck in a call to the service outlives that; it ends with its call, and touches no pool.
        """
        end = time.monotonic() + seconds
        with self._lock:
            left = tuple(self.under_way)
        # First what a transfer may be waiting for.
        for transfer in left:
            transfer.finish(0, StreamClosedError("the connector was closed"))
        self._staging.close()
        streams = [stream for lane in (*self.backups, *self.restores) for stream in (lane.worker, lane.copies)]
        for stream in streams:
            stream.close(0)
        # A GPU still reads and writes what we are about to let go of.
        for transfer in left:
            transfer.settle(max(0.0, end - time.monotonic()))
        for stream in streams:
            stream.close(max(0.0, end - time.monotonic()))
        for lane in (*self.backups, *self.restores):
            lane.copies.close(0).wait(max(0.0, end - time.monotonic()))
        with self._lock:
            self.under_way.clear()

    def _leave(self, lane: Lane, transfer: Transfer) -> None:
        with self._lock:
            lane.load -= 1
            self.under_way.discard(transfer)
