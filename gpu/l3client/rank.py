"""What a backup and a restore know of their rank."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from l3client.pools import KVPool
from l3client.relayout import Placement
from l3client.staging import StagingPool
from l3client.transport import L3Client, Part
from l3store.layout import Namespace, Range, ShardPlan

MAX_PAGES = 32_768
"""In one call about pages."""


class Tally:
    """Failures by kind. Thread-safe."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, kind: str, times: int = 1) -> None:
        if times:
            with self._lock:
                self.counts[kind] += times


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One rank's pool, its part of a namespace, and what moves bytes between them.

    patience  seconds to wait for a staging buffer
    """

    client: L3Client
    namespace: Namespace
    plan: ShardPlan
    pool: KVPool
    staging: StagingPool
    patience: float
    tally: Tally

    @property
    def part(self) -> Part:
        """The rank's part of every page, as the service is asked for it."""
        return self.part_of(self.plan.layers)

    def part_of(self, layers: Range) -> Part:
        return Part(self.namespace.digest, layers, self.plan.heads)

    def placement(self, layers: Range) -> Placement:
        """Where some of the rank's layers lie in a staged page of just these."""
        return place(self.namespace, self.plan, layers)


def place(namespace: Namespace, plan: ShardPlan, layers: Range) -> Placement:
    """Where some layers of a plan lie in a staged page of just these."""
    shape = namespace.shape(layers=layers, groups=plan.groups)
    return Placement(shape=shape, first_head=plan.first_head, first_layer=layers.start - plan.layers.start)


def rows(buffer: Tensor, count: int, page_bytes: int) -> Tensor:
    """The first pages of a staging buffer."""
    return buffer[: count * page_bytes].view(count, page_bytes)


def slices(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
