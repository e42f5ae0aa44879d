"""Sending from the caller's memory, without a copy in Python."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence

from l3store.layout.sums import Buffer
from l3store.loopback import unpace
from l3store.service.http.pace import Pace

_VECTORS = 512
_TURN_BYTES = 4 << 20


class Outgoing:
    """The writing half of a connection.

    A transport may keep a reference to what it is given, or copy the rest of it; so writing goes past it, to a second
    descriptor of the same socket. When `send` returns, the kernel has everything, and the memory may be used again.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, connected: socket.socket) -> None:
        """Raises OSError where no descriptor is left."""
        self._loop = loop
        self._socket = socket.socket(fileno=os.dup(connected.fileno()))
        self._socket.setblocking(False)
        unpace(self._socket)
        self._pace = Pace()
        self._waiting: asyncio.Future[None] | None = None
        self._closed = False

    async def send(self, buffers: Sequence[Buffer]) -> None:
        """Send all of it. Raises ConnectionError where the other side is gone, or takes nothing for too long."""
        if self._closed:
            raise ConnectionResetError("the connection is closed")
        # Mostly, the kernel takes all of it at once.
        try:
            sent = self._socket.sendmsg(buffers[:_VECTORS])
        except BlockingIOError:
            sent = 0
        if len(buffers) > _VECTORS or sent < sum(map(len, buffers)):
            await self._send_rest([memoryview(buffer) for buffer in buffers], sent)

    async def _send_rest(self, views: list[memoryview], sent: int) -> None:
        """Send what is left when ``sent`` bytes of the first views have gone."""
        self._pace.start()
        at = 0
        turn = sent
        while True:
            while at < len(views) and sent >= len(views[at]):
                sent -= len(views[at])
                at += 1
            if at == len(views):
                return
            if sent:
                views[at] = views[at][sent:]
                sent = 0
            if turn >= _TURN_BYTES:
                # A reader that keeps up never makes us wait; the others have to get their turn all the same.
                await asyncio.sleep(0)
                turn = 0
            if self._closed:
                raise ConnectionResetError("the connection is closed")
            try:
                sent = self._socket.sendmsg(views[at : at + _VECTORS])
            except BlockingIOError:
                await self._writable()
                continue
            turn += sent
            self._pace.moved(sent)

    def end(self) -> None:
        """Say that nothing more will come; the other half stays open."""
        if not self._closed:
            try:
                self._socket.shutdown(socket.SHUT_WR)
            except OSError:
                self.close()

    def close(self) -> None:
        """End a wait for the other side with ConnectionError, and give the descriptor back."""
        if self._closed:
            return
        self._closed = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(ConnectionResetError("the connection was closed"))
        self._loop.remove_writer(self._socket)
        self._socket.close()

    async def _writable(self) -> None:
        self._waiting = self._loop.create_future()
        self._loop.add_writer(self._socket, self._ready)
        try:
            async with asyncio.timeout(self._pace.patience()):
                await self._waiting
        except TimeoutError as error:
            raise ConnectionAbortedError(f"the other side takes less than {Pace.words()}") from error
        finally:
            self._waiting = None
            if not self._closed:
                self._loop.remove_writer(self._socket)

    def _ready(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
