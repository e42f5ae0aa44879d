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
    """An HTTP/1.1 connection for uvicorn's server: constructed by it, in its lists while it is open."""

    def __init__(self, config: Any, server_state: Any, app_state: dict[str, Any], _loop: Any = None) -> None:
        self._app: ASGIApp = config.loaded_app
        self._state = server_state
        self._app_state = app_state
        self._keep_alive_seconds: float = config.timeout_keep_alive
        self._loop: asyncio.AbstractEventLoop = _loop or asyncio.get_running_loop()
        self._exchange: Exchange | None = None
        self._outgoing: Outgoing | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ending = False
        self._stopping = False
        self._heads = HeadReader()
        self._in_head = False

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
        self._set_timer(self._keep_alive_seconds)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._incoming.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._incoming.received(nbytes)
        if self._ending:
            if self._incoming.dropped > _LINGER_BYTES:
                self._close()
        elif self._exchange is None:
            self._next()

    def eof_received(self) -> bool:
        self._incoming.end(lost=False)
        # A client may end its half as soon as it has asked; it still gets its answer.
        return self._exchange is not None and not self._ending

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timer(None)
        self._incoming.end(lost=True)
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
        if self._exchange is None:
            self._close()

    # From request to request

    def _next(self) -> None:
        """Begin the next request, if its head is here."""
        try:
            read = self._heads.feed(self._incoming.peek())
        except L3Error as error:
            self._refuse(error)
            return
        if read is None:
            # A head that has begun has so long to end, however slowly it trickles.
            if self._incoming.head_bytes and not self._in_head:
                self._in_head = True
                self._set_timer(_HEAD_SECONDS)
            return
        head, length = read
        self._incoming.consume(length)
        self._set_timer(None)
        self._begin(head, self._app)

    def _refuse(self, error: L3Error) -> None:
        """Answer what is not a request; what follows it cannot be understood either."""
        self._set_timer(None)
        self._begin(Head(method="GET", path="/", framed=False, keep_alive=False), problem_response(error))

    def _begin(self, head: Head, app: ASGIApp) -> None:
        self._heads = HeadReader()
        self._in_head = False
        assert self._outgoing is not None
        self._incoming.begin_body(head.length if head.framed else 0)
        self._exchange = Exchange(
            head, self._incoming, self._outgoing, app_state=self._app_state, client=self._client, server=self._server
        )
        if self._stopping:
            self._exchange.last = True
        task = self._loop.create_task(self._run(self._exchange, app))
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)

    async def _run(self, exchange: Exchange, app: ASGIApp) -> None:
        """Answer one request, then go on to the next or end the connection."""
        try:
            await exchange.run(app)
            if exchange.complete and not exchange.last:
                await self._incoming.drop_body(self._incoming.left)
        except (ConnectionError, L3Error) as error:
            # The client is gone, or what is left of a body does not come; there is nobody to say it to.
            _log.debug("%s: %s", self._client, error)
            exchange.complete = False
        finally:
            self._state.total_requests += 1
            self._exchange = None
            self._after(exchange)

    def _after(self, exchange: Exchange) -> None:
        if not exchange.complete:
            self._close()
        elif exchange.last or self._stopping:
            self._end(unread=not exchange.head.framed or self._incoming.left > 0 or self._incoming.head_bytes > 0)
        else:
            self._set_timer(self._keep_alive_seconds)
            self._next()
            if self._incoming.ended and self._exchange is None:
                # It asked several things, ended its half, and has all its answers.
                self._close()

    # The end

    def _end(self, *, unread: bool) -> None:
        """Close so that the last answer arrives."""
        if not unread or self._incoming.ended:
            self._close()
            return
        self._ending = True
        assert self._outgoing is not None
        self._outgoing.end()
        self._incoming.drop_all()
        self._set_timer(_LINGER_SECONDS)

    def _close(self) -> None:
        self._transport.abort()

    def _set_timer(self, seconds: float | None) -> None:
        """Close the connection after so long; None takes an earlier decision back."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self._loop.call_later(seconds, self._close)
