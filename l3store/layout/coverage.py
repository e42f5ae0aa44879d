"""Coverage: which stored runs serve which cells, however they were cut.

A run is a half-open pair of layers within one head group. Runs may overlap, repeat and leave gaps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from l3store.layout.shape import Range


@dataclass(frozen=True, slots=True)
class Piece:
    """The layers ``taken`` out of the stored run ``source``."""

    source: Range
    taken: Range


def cover(stored: Iterable[Range], wanted: Range) -> list[Piece] | None:
    """The fewest stored runs that serve ``wanted`` together, in layer order; None where a cell is missing.

    A run that is exactly what is wanted is taken before a larger one around it. Ties go to the tighter run, so equal
    stores give equal answers.
    """
    runs = sorted(set(stored))
    pieces = []
    at = wanted.start
    while at < wanted.end:
        # Greedy interval cover: of the runs that hold `at`, the one that reaches furthest; excess beyond the wanted
        # end is worth nothing, so the shortest of those that get there wins.
        best = max(
            (run for run in runs if run.start <= at < run.end),
            key=lambda run: (min(run.end, wanted.end), -len(run), run.start),
            default=None,
        )
        if best is None:
            return None
        pieces.append(Piece(best, Range(at, min(best.end, wanted.end))))
        at = pieces[-1].taken.end
    return pieces


def uncovered(stored: Iterable[Range], wanted: Range) -> list[Range]:
    """The maximal runs of layers in ``wanted`` that no stored run serves, in order."""
    gaps = []
    at = wanted.start
    for run in sorted(set(stored)):
        if run.end <= at:
            continue
        if run.start >= wanted.end:
            break
        if run.start > at:
            gaps.append(Range(at, run.start))
        at = run.end
    if at < wanted.end:
        gaps.append(Range(at, wanted.end))
    return gaps
