"""The reading half of a connection: where the next bytes go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from l3store.errors import SlowBodyError, WrongLengthError
from l3store.service.http.head import MAX_HEAD_BYTES
from l3store.service.http.pace import Pace

# Where dropped bytes go. One for all connections: nobody reads it.
_WASTE = memoryview(bytearray(256 << 10))


@dataclass(slots=True)
class _Target:
    """Memory that the application waits to have filled from ``count`` on: all of it, or with any bytes at all."""

    view: memoryview
    count: int
    whole: bool
    filled: asyncio.Future[int]
    arrived: Callable[[int], None] | None = None
    watch: asyncio.TimerHandle | None = None


class Incoming:
    """Bytes of one connection, sorted into heads and bodies. Reading stops where nobody wants what would come."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._pace = Pace()
        self._transport = transport
        self._buffer = memoryview(bytearray(MAX_HEAD_BYTES))
        self._start = self._stop = 0
        self._target: _Target | None = None
        self._dropping = False
        self._paused = False
        self._gone: asyncio.Event = asyncio.Event()
        self._announced = 0
        self._asked = False
        self.left = 0
        self.dropped = 0
        self.ended = False

    @property
    def head_bytes(self) -> int:
        """Bytes that are here and not yet part of anything."""
        return self._stop - self._start

    # The loop's side

    def buffer(self) -> memoryview:
        """Where the next bytes go; never empty."""
        if self._target is not None:
            return self._target.view[self._target.count :]
        if self._dropping:
            return _WASTE
        return self._buffer[self._stop :]

    def received(self, count: int) -> None:
        """Note bytes that were put where `buffer` said."""
        if self._target is not None:
            self.left -= count
            self._fill(self._target, count)
        elif self._dropping:
            self.dropped += count
        else:
            self._stop += count
            self._steer()

    def end(self, *, lost: bool) -> None:
        """No more bytes will come: the client has ended its half, or the connection is ``lost``."""
        self.ended = True
        self._gone.set()
        target, self._target = self._target, None
        if target is not None and not target.filled.done():
            target.filled.set_exception(self._cut(lost=lost))

    def _cut(self, *, lost: bool) -> Exception:
        if lost:
            return ConnectionResetError("the client went away in the middle of a body")
        arrived = self._announced - self.left
        return WrongLengthError(f"the body ended after {arrived} of the {self._announced} bytes announced")

    # The connection's side

    def peek(self) -> bytes:
        """The bytes that are here and not yet part of anything."""
        return bytes(self._buffer[self._start : self._stop])

    def consume(self, count: int) -> None:
        """Note that so many of them were a head."""
        self._start += count

    def begin_body(self, length: int) -> None:
        """A body of ``length`` bytes is next."""
        self.left = self._announced = length
        self._asked = False
        if self._start == self._stop:
            self._start = self._stop = 0
        else:
            self._compact()
        self._resume()

    async def drop_body(self, count: int) -> None:
        """Drop so many bytes of the body. Raises ConnectionError where they do not come."""
        if count > self.left:
            raise self._cut(lost=False)
        while count:
            count -= len(await self.read_some(count, into=_WASTE))

    def drop_all(self) -> None:
        """Drop everything from now on."""
        self._start = self._stop = 0
        self._dropping = True
        self._resume()

    # The application's side

    async def read_into(self, view: memoryview, arrived: Callable[[int], None] | None = None) -> None:
        """Fill ``view`` from the body, of which at least so much is left. Raises ConnectionError.

        ``arrived`` is told, as they come, how many of its bytes are there.
        """
        if len(view) > self.left:
            raise self._cut(lost=False)
        taken = self._take(view)
        if taken and arrived is not None:
            arrived(taken)
        if taken < len(view):
            await self._wait(view, taken, whole=True, arrived=arrived)

    async def read_some(self, most: int, *, into: memoryview | None = None) -> memoryview:
        """The next bytes of the body, at least one and ``most`` at most. Raises ConnectionError."""
        view = memoryview(bytearray(min(most, self.left))) if into is None else into[: min(most, self.left)]
        count = self._take(view)
        if not count:
            count = await self._wait(view, 0, whole=False)
        return view[:count]

    async def gone(self) -> None:
        """Wait until the client has ended its half or the connection is lost."""
        await self._gone.wait()

    def _take(self, view: memoryview) -> int:
        """Body bytes that came along with a head."""
        count = min(self.head_bytes, len(view), self.left)
        if count:
            view[:count] = self._buffer[self._start : self._start + count]
            self._start += count
            self.left -= count
            self._compact()
            self._resume()
        return count

    async def _wait(
        self, view: memoryview, count: int, *, whole: bool, arrived: Callable[[int], None] | None = None
    ) -> int:
        if self.ended:
            raise self._cut(lost=False)
        assert self._target is None, "one reader at a time"
        if not self._asked:
            # Nothing is held against its sender before somebody wants it, and nothing of the bodies before it.
            self._asked = True
            self._pace.start()
        target = self._target = _Target(view, count, whole, asyncio.get_running_loop().create_future(), arrived)
        self._watch(target)
        self._resume()
        try:
            return await target.filled
        finally:
            if target.watch is not None:
                target.watch.cancel()
            # Also where the wait was cancelled: nothing may be received into memory that its owner has given up.
            self._target = None

    def _watch(self, target: _Target) -> None:
        """Give the body up where it does not keep its pace."""
        patience = self._pace.patience()
        if patience > 0:
            target.watch = asyncio.get_running_loop().call_later(patience, self._watch, target)
        elif not target.filled.done():
            target.filled.set_exception(SlowBodyError(f"the body comes slower than {Pace.words()}"))

    def _fill(self, target: _Target, count: int) -> None:
        self._pace.moved(count)
        target.count += count
        if target.arrived is not None:
            target.arrived(target.count)
        if target.count == len(target.view) or not target.whole:
            self._target = None
            if not target.filled.done():
                target.filled.set_result(target.count)

    def _compact(self) -> None:
        """Move what is here to the front, so that the buffer has room."""
        if self._start:
            rest = bytes(self._buffer[self._start : self._stop])
            self._buffer[: len(rest)] = rest
            self._start, self._stop = 0, len(rest)

    def _steer(self) -> None:
        """Read where there is a place for what comes, else not: the client waits, and memory does not grow.

        To stop and to go on are system calls, so reading stops only when bytes came for which nobody asked.
        """
        body_waits = self.left > self.head_bytes and self._target is None
        room = self._stop < len(self._buffer)
        want = self._target is not None or self._dropping or (room and not body_waits)
        if want == self._paused and not self._transport.is_closing() and not self.ended:
            self._paused = not want
            if want:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def _resume(self) -> None:
        """There may be a place again."""
        if self._paused:
            self._steer()
