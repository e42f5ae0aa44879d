"""What a page costs in Python: a batch of pages beside one object of as many bytes, in CPU time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from l3client.bench.bars import ONE_OBJECT
from l3client.bench.rounds import Results, Sample
from l3client.bench.stats import Spread

_CASE = "read"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOverhead:
    """Microseconds of CPU for each page: those of pages/read less those of one GET in the same round."""

    contender: str
    client_us: Spread
    server_us: Spread


def page_overhead(results: Results, contender: str, pages: int) -> PageOverhead | None:
    """``pages``: read in one round. None where both were not measured."""
    batches = results.samples.get((_CASE, contender), {})
    objects = results.samples.get((_CASE, ONE_OBJECT), {})
    turns = sorted(batches.keys() & objects.keys())
    if not turns:
        return None

    def each(cpu: Callable[[Sample], float]) -> Spread:
        return Spread.of([(cpu(batches[turn]) - cpu(objects[turn])) / pages * 1e6 for turn in turns])

    return PageOverhead(
        contender=contender, client_us=each(lambda s: s.client_cpu), server_us=each(lambda s: s.server_cpu)
    )
