"""Bodies between a request and memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.requests import ClientDisconnect, Request
from starlette.types import Scope

from l3store.errors import SlowBodyError
from l3store.service.http.exchange import EXTENSION, Exchange

_STALL_SECONDS = 60.0


class BodyReader:
    """A request's body, in pieces of the caller's choosing. Raises ClientDisconnect where the client goes away.

    On our own connections bytes are received where they are wanted; elsewhere they come as ASGI messages.
    """

    def __init__(self, request: Request) -> None:
        self._wire = wire_of(request.scope)
        self._messages = request.receive
        self._rest = memoryview(b"")
        self._more = True

    async def read_into(self, into: memoryview, arrived: Callable[[int], None] | None = None) -> None:
        """Fill ``into``; ``arrived`` is told, as they come, how many of its bytes are there."""
        if self._wire is not None:
            await self._wire.receive_into(into, arrived)
            return
        done = 0
        while done < len(into):
            piece = await self._piece(len(into) - done)
            into[done : done + len(piece)] = piece
            done += len(piece)
            if arrived is not None:
                arrived(done)

    async def read(self, length: int) -> bytearray:
        data = bytearray(length)
        await self.read_into(memoryview(data))
        return data

    async def skip(self, length: int) -> None:
        """Drop bytes."""
        if self._wire is not None:
            await self._wire.skip(length)
            return
        while length:
            length -= len(await self._piece(length))

    async def _piece(self, most: int) -> memoryview:
        while not len(self._rest):
            if not self._more:
                raise ClientDisconnect
            try:
                async with asyncio.timeout(_STALL_SECONDS):
                    message = await self._messages()
            except TimeoutError as error:
                raise SlowBodyError(f"no byte of the body came for {_STALL_SECONDS:g} seconds") from error
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            self._more = message.get("more_body", False)
            self._rest = memoryview(message.get("body", b""))
        piece, self._rest = self._rest[:most], self._rest[most:]
        return piece


def wire_of(scope: Scope) -> Exchange | None:
    """The extension of our own connections; None on a server that is not ours."""
    wire = scope.get("extensions", {}).get(EXTENSION)
    assert wire is None or isinstance(wire, Exchange)
    return wire
