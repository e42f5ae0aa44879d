"""From a received body to an object that may be stored."""

from __future__ import annotations

import asyncio

from l3store.backend import NewObject, PooledBuffer, Sums
from l3store.errors import WrongSumsError
from l3store.layout import Key
from l3store.layout.sums import SUM_BYTES, sum_cells

_INLINE_BYTES = 4 << 20


def verified(key: Key, held: PooledBuffer, cell_bytes: int, expected: bytes | None) -> NewObject:
    """Received bytes as an object to store, with the writer's sums or ours. Raises `WrongSumsError`."""
    computed = sum_cells(held.view, cell_bytes)
    if expected is not None and computed != expected:
        bad = [
            i for i in range(0, len(computed), SUM_BYTES) if computed[i : i + SUM_BYTES] != expected[i : i + SUM_BYTES]
        ]
        raise WrongSumsError(
            f"{len(bad)} cells of {key} do not match their sums, the first is cell {bad[0] // SUM_BYTES}"
        )
    return NewObject(key, held.view, Sums(computed, by_writer=expected is not None), held)


async def received(key: Key, held: PooledBuffer, cell_bytes: int, expected: bytes | None) -> NewObject:
    """`verified`, on a thread where it takes longer than going there."""
    if len(held.view) <= _INLINE_BYTES:
        return verified(key, held, cell_bytes, expected)
    return await asyncio.to_thread(verified, key, held, cell_bytes, expected)
