"""One connection: which bytes are heads, which are bodies, and how it ends.

Bytes arrive in one of three places. A head goes into a small buffer of the connection's own. A body goes where the
application wants it: what came along with the head is copied there, the rest is received there. What nobody wants, the
rest of a body that was refused, is dropped, a bounded amount of it.

An answer that does not wait for the body ends the connection behind it. Closing at once would reset the connection, and
the reset can overtake the answer; so our half is ended, what still comes is dropped, and then the connection is closed.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any, cast

from starlette.types import ASGIApp

from l3store.errors import L3Error
from l3store.service.http.exchange import Exchange
from l3store.service.http.head import Head, HeadReader
from l3store.service.http.incoming import Incoming
from l3store.service.http.outgoing import Outgoing
from l3store.service.problems import problem_response

_HEAD_SECONDS = 30.0
_LINGER_SECONDS = 5.0
_LINGER_BYTES = 64 << 20

_log = logging.getLogger("l3store.service")


class WireConnection(asyncio.BufferedProtocol):
    """An HTTP/1.1 connection for uvicorn's server: constructed by it, in its lists while it is open.

    One task serves it, request after request, as long as it lives.
    """

    def __init__(self, config: Any, server_state: Any, app_state: dict[str, Any], _loop: Any = None) -> None:
        self._app: ASGIApp = config.loaded_app
        self._state = server_state
        self._app_state = app_state
        self._keep_alive_seconds: float = config.timeout_keep_alive
        self._loop: asyncio.AbstractEventLoop = _loop or asyncio.get_running_loop()
        self._outgoing: Outgoing | None = None
        self._task: asyncio.Task[None] | None = None
        self._arrived: asyncio.Future[None] | None = None
        self._heads = HeadReader()
        self._busy: Exchange | None = None
        self._ending = False
        self._stopping = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._expires = math.inf

    # What the loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast("asyncio.Transport", transport)
        self._incoming = Incoming(self._transport)
        try:
            self._outgoing = Outgoing(self._loop, transport.get_extra_info("socket"))
        except OSError as error:
            # No descriptor is left for it. Whoever is connected already goes on; this one may come again.
            _log.warning("a connection was turned away: %s", error)
            self._close()
            return
        self._client = transport.get_extra_info("peername")
        self._server = transport.get_extra_info("sockname")
        self._state.connections.add(self)
        self._expire_in(self._keep_alive_seconds)
        self._task = self._loop.create_task(self._serve(self._outgoing))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._incoming.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._incoming.received(nbytes)
        if self._arrived is not None:
            self._notify()
        elif self._ending and self._incoming.dropped > _LINGER_BYTES:
            self._close()

    def eof_received(self) -> bool:
        self._incoming.end(lost=False)
        self._notify()
        # A client may end its half as soon as it has asked; it still gets its answer.
        return not self._ending

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._incoming.end(lost=True)
        self._notify()
        if self._outgoing is not None:
            self._outgoing.close()
        self._state.connections.discard(self)

    def pause_writing(self) -> None:
        """Nothing is written through the transport."""

    def resume_writing(self) -> None:
        """Nothing is written through the transport."""

    # What uvicorn's server calls

    def shutdown(self) -> None:
        """Close when the request in hand is answered."""
        self._stopping = True
        if self._busy is not None:
            self._busy.last = True
        elif not self._ending:
            self._close()

    # From request to request

    async def _serve(self, outgoing: Outgoing) -> None:
        assert self._task is not None
        last: Exchange | None = None
        try:
            while last is None or last.continues:
                request = await self._request()
                if request is None:
                    break
                head, app = request
                self._expires = math.inf
                self._incoming.begin_body(head.length if head.framed else 0)
                self._busy = last = Exchange(
                    head, self._incoming, outgoing, self._app_state, self._client, self._server
                )
                # In its list, the server waits for it when it ends, and cancels it when that takes too long.
                self._state.tasks.add(self._task)
                await self._answer(last, app)
                self._state.tasks.discard(self._task)
                self._busy = None
                self._state.total_requests += 1
                if self._stopping:
                    break
        finally:
            self._state.tasks.discard(self._task)
            self._busy = None
            self._end(last)

    async def _request(self) -> tuple[Head, ASGIApp] | None:
        """The next head, and who answers it; None where none comes any more."""
        incoming = self._incoming
        self._expire_in(self._keep_alive_seconds)
        begun = False
        while True:
            if incoming.head_bytes:
                try:
                    read = self._heads.feed(incoming.peek())
                except L3Error as error:
                    # What follows it cannot be understood either.
                    return Head(method="GET", path="/", framed=False, keep_alive=False), problem_response(error)
                if read is not None:
                    incoming.consume(read[1])
                    return read[0], self._app
                if not begun:
                    # A head that has begun has so long to end, however slowly it trickles.
                    begun = True
                    self._expire_in(_HEAD_SECONDS)
            if incoming.ended or self._stopping:
                return None
            self._arrived = self._loop.create_future()
            try:
                await self._arrived
            finally:
                self._arrived = None

    async def _answer(self, exchange: Exchange, app: ASGIApp) -> None:
        try:
            await exchange.run(app)
            if exchange.continues and self._incoming.left:
                await self._incoming.drop_body(self._incoming.left)
        except (ConnectionError, L3Error) as error:
            # The client is gone, or what is left of a body does not come; there is nobody to say it to.
            _log.debug("%s: %s", self._client, error)
            exchange.complete = False

    def _notify(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    # The end

    def _end(self, last: Exchange | None) -> None:
        """Close so that the last answer arrives."""
        unread = last is not None and (not last.head.framed or self._incoming.left > 0 or self._incoming.head_bytes > 0)
        if last is None or not last.complete or not unread or self._incoming.ended:
            self._close()
            return
        self._ending = True
        assert self._outgoing is not None
        self._outgoing.end()
        self._incoming.drop_all()
        self._expire_in(_LINGER_SECONDS)

    def _close(self) -> None:
        self._transport.abort()

    def _expire_in(self, seconds: float) -> None:
        """Close the connection after so long, unless something else is said before."""
        self._expires = self._loop.time() + seconds
        if self._timer_at > self._expires:
            self._set_timer(self._expires)

    def _set_timer(self, at: float) -> None:
        # It fires early, and looks again: setting one for each request would cost more than reading its head.
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        now = self._loop.time()
        if self._expires <= now:
            self._close()
        else:
            self._set_timer(min(self._expires, now + self._keep_alive_seconds))
