"""Bodies between a request and memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect, Request

from l3store.errors import RetryError
from l3store.service.limits import Limits


class BodyReader:
    """A request's body, taken in pieces of the caller's choosing. Raises ClientDisconnect where the client goes away."""

    def __init__(self, request: Request, limits: Limits) -> None:
        self._messages = request.receive
        self._timeout = limits.receive_timeout
        self._rest = memoryview(b"")
        self._more = True

    async def read_into(self, into: memoryview) -> None:
        """Fill ``into``."""
        done = 0
        while done < len(into):
            piece = await self._piece(len(into) - done)
            into[done : done + len(piece)] = piece
            done += len(piece)

    async def read(self, length: int) -> bytearray:
        data = bytearray(length)
        await self.read_into(memoryview(data))
        return data

    async def skip(self, length: int) -> None:
        """Drop bytes."""
        while length:
            length -= len(await self._piece(length))

    async def _piece(self, most: int) -> memoryview:
        while not len(self._rest):
            if not self._more:
                raise ClientDisconnect
            try:
                async with asyncio.timeout(self._timeout):
                    message = await self._messages()
            except TimeoutError as error:
                raise ClientDisconnect from error
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            self._more = message.get("more_body", False)
            self._rest = memoryview(message.get("body", b""))
        piece, self._rest = self._rest[:most], self._rest[most:]
        return piece


class MemoryBudget:
    """Bounds the bytes of bodies held at once. First come, first served."""

    def __init__(self, total: int, *, timeout: float = 10.0) -> None:
        self._total = total
        self._free = total
        self._timeout = timeout
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Hold ``size`` bytes of the budget. Raises `RetryError` where they do not come free in time."""
        size = min(size, self._total)
        async with self._changed:
            try:
                async with asyncio.timeout(self._timeout):
                    await self._changed.wait_for(lambda: self._free >= size)
            except TimeoutError as error:
                raise RetryError("too many bytes in flight; try again in a second") from error
            self._free -= size
        try:
            yield
        finally:
            async with self._changed:
                self._free += size
                self._changed.notify_all()
