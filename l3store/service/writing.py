"""A batch write: bodies are received and stored in batches, one being stored while the next arrives."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

from l3store.backend import NewObject
from l3store.errors import L3Error
from l3store.service.context import Context
from l3store.service.manifest import Item
from l3store.service.receiving import received
from l3store.service.shapes import WriteResult
from l3store.service.wire import BodyReader

_WRITE_BATCH_BYTES = 8 << 20
_WRITE_SHARE = 8
"""Bodies of a write are handed to the backend together up to this size, or share of the memory, while the next come."""


class Writing:
    """Receives the bodies of one write and stores them in batches, one batch being stored while the next arrives."""

    def __init__(self, service: Context, body: BodyReader) -> None:
        self._service = service
        self._body = body

    async def run(self, items: list[Item]) -> list[WriteResult]:
        results: list[WriteResult] = []
        storing: asyncio.Task[list[WriteResult]] | None = None
        try:
            for batch in _batches(items, min(_WRITE_BATCH_BYTES, self._service.pool.total // _WRITE_SHARE)):
                with ExitStack() as held:
                    bodies = [await self._receive(item, held) for item in batch]
                    if storing is not None:
                        results += await storing
                    storing = asyncio.create_task(self._store(batch, bodies, held.pop_all()))
        finally:
            # What was received whole is stored, even where its sender went away in the middle of the next.
            if storing is not None:
                results += await storing
        return results

    async def _receive(self, item: Item, held: ExitStack) -> NewObject | L3Error | None:
        """One body, verified; None where it is not needed, an error where bytes and sums disagree."""
        if item.key is None or self._service.store.has(item.key):
            await self._body.skip(item.length)
            return None
        buffer = held.enter_context(await self._service.pool.acquire(item.length))
        await self._body.read_into(buffer.view)
        self._service.metrics.received_bytes += item.length
        try:
            return await received(item.key, buffer, item.cell_bytes, item.sums)
        except L3Error as error:
            return error

    async def _store(
        self, batch: list[Item], bodies: list[NewObject | L3Error | None], held: ExitStack
    ) -> list[WriteResult]:
        with held:
            stored = iter(await self._service.store.put([made for made in bodies if isinstance(made, NewObject)]))
        return [
            _result(item, next(stored) if isinstance(made, NewObject) else made)
            for item, made in zip(batch, bodies, strict=True)
        ]


def _result(item: Item, outcome: bool | L3Error | None) -> WriteResult:
    if item.error is not None:
        return WriteResult(key=item.text, status="error", detail=item.error)
    if isinstance(outcome, L3Error):
        return WriteResult(key=item.text, status="error", detail=outcome.detail)
    return WriteResult(key=item.text, status="created" if outcome else "exists")


def _batches(items: list[Item], most: int) -> list[list[Item]]:
    batches: list[list[Item]] = []
    size = 0
    for item in items:
        if size + _held_bytes(item) > most or not batches:
            batches.append([])
            size = 0
        batches[-1].append(item)
        size += _held_bytes(item)
    return batches


def _held_bytes(item: Item) -> int:
    """What a body takes in memory: one with an error is dropped as it comes."""
    return 0 if item.key is None else item.length
