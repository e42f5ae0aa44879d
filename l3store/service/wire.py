"""Bodies between a request and memory."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import Self

from starlette.requests import ClientDisconnect, Request
from starlette.types import Scope

from l3store.errors import RetryError, SlowBodyError
from l3store.service.http.exchange import EXTENSION, Exchange
from l3store.service.limits import Limits


class BodyReader:
    """A request's body, in pieces of the caller's choosing. Raises ClientDisconnect where the client goes away.

    On our own connections bytes are received where they are wanted; elsewhere they come as ASGI messages.
    """

    def __init__(self, request: Request, limits: Limits) -> None:
        self._wire = wire_of(request.scope)
        self._messages = request.receive
        self._timeout = limits.receive_timeout
        self._rest = memoryview(b"")
        self._more = True

    async def read_into(self, into: memoryview) -> None:
        """Fill ``into``."""
        if self._wire is not None:
            await self._wire.receive_into(into)
            return
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
                async with asyncio.timeout(self._timeout):
                    message = await self._messages()
            except TimeoutError as error:
                raise SlowBodyError(f"no byte of the body came for {self._timeout:g} seconds") from error
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


class Lease:
    """Bytes of a budget, held until `release`. Releasing twice is releasing once."""

    __slots__ = ("_budget", "_size")

    def __init__(self, budget: MemoryBudget, size: int) -> None:
        self._budget = budget
        self._size = size

    def release(self) -> None:
        size, self._size = self._size, 0
        self._budget._give_back(size)  # noqa: SLF001

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class MemoryBudget:
    """Bounds the bytes of bodies held at once. First come, first served."""

    def __init__(self, total: int, *, timeout: float = 10.0) -> None:
        self._total = total
        self._free = total
        self._timeout = timeout
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, size: int) -> Lease:
        """Hold ``size`` bytes, or all there are. Raises `RetryError` where they do not come free in time."""
        size = min(size, self._total)
        if self._waiting or self._free < size:
            granted = asyncio.get_running_loop().create_future()
            waiter = (size, granted)
            self._waiting.append(waiter)
            try:
                async with asyncio.timeout(self._timeout):
                    await granted
            except BaseException as error:
                if granted.done() and not granted.cancelled():
                    self._give_back(size)
                else:
                    # Where it is not, `_give_back` has met it cancelled and passed it over.
                    with suppress(ValueError):
                        self._waiting.remove(waiter)
                    self._give_back(0)
                if isinstance(error, TimeoutError):
                    raise RetryError("too many bytes are in flight; try again in a second") from error
                raise
        else:
            self._free -= size
        return Lease(self, size)

    def _give_back(self, size: int) -> None:
        self._free += size
        while self._waiting and self._waiting[0][0] <= self._free:
            wanted, granted = self._waiting.popleft()
            if granted.cancelled():
                continue
            self._free -= wanted
            granted.set_result(None)
