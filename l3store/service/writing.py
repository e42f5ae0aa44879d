"""A batch write: bodies are received and stored in batches, one being stored while the next arrives."""

from __future__ import annotations

import asyncio
import itertools
import operator
from contextlib import ExitStack

from l3store.backend import NewObject
from l3store.errors import L3Error
from l3store.service.context import Context
from l3store.service.manifest import Item
from l3store.service.receiving import Arrivals
from l3store.service.shapes import WriteResult
from l3store.service.wire import BodyReader

_Outcome = NewObject | L3Error | None

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
                    outcomes: list[_Outcome] = []
                    try:
                        await self._receive(batch, held, outcomes)
                    finally:
                        if storing is not None:
                            results += await storing
                        # What has come whole is stored, even where its sender went away in the middle of the next.
                        storing = asyncio.create_task(self._store(batch, outcomes, held.pop_all()))
        finally:
            if storing is not None:
                results += await storing
        return results

    async def _receive(self, batch: list[Item], held: ExitStack, outcomes: list[_Outcome]) -> None:
        """Add an outcome for each body: None where it is not needed, an error where bytes and sums disagree."""
        store = self._service.store
        needed = [item.body is not None and not store.has(item.body.key) for item in batch]
        size = sum(item.length for item, wanted in zip(batch, needed, strict=True) if wanted)
        buffer = held.enter_context(await self._service.pool.acquire(size)) if size else None
        at = 0
        for wanted, run in itertools.groupby(zip(batch, needed, strict=True), key=operator.itemgetter(1)):
            items = [item for item, _ in run]
            length = sum(item.length for item in items)
            if not wanted or buffer is None:
                await self._body.skip(length)
                outcomes += [None] * len(items)
                continue
            view = buffer.view[at : at + length]
            at += length
            arrivals = Arrivals([item.body for item in items if item.body is not None], view, buffer)
            try:
                await self._body.read_into(view, arrivals.arrived)
            finally:
                outcomes += arrivals.objects()
            self._service.metrics.received_bytes += length

    async def _store(self, batch: list[Item], outcomes: list[_Outcome], held: ExitStack) -> list[WriteResult]:
        with held:
            stored = iter(await self._service.store.put([made for made in outcomes if isinstance(made, NewObject)]))
        return [
            _result(item, next(stored) if isinstance(made, NewObject) else made)
            for item, made in zip(batch, outcomes, strict=False)  # an outcome is missing where a sender went away
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
    return 0 if item.body is None else item.length
