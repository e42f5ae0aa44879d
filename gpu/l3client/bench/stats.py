"""Arithmetic over rounds: medians, quantiles, paired ratios, and from how many tokens on a hit pays."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some values, and how far they lie apart."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises ValueError where there are none."""
        if not values:
            raise ValueError("no values have no median")
        return cls(statistics.median(values), min(values), max(values))


def quantile(values: Sequence[float], part: float) -> float:
    """The nearest-rank quantile: always one of the values. ``part`` in (0, 1]."""
    if not values or not 0 < part <= 1:
        raise ValueError(f"no quantile {part} of {len(values)} values")
    return sorted(values)[math.ceil(part * len(values)) - 1]


def paired(values: Mapping[int, float], base: Mapping[int, float]) -> list[float]:
    """Ratios of two series by round; rounds that only one of them has are left out, and so is a base of zero.

    A ratio inside one round holds on a machine whose speed swings between rounds; a ratio of medians does not.
    """
    return [values[turn] / base[turn] for turn in sorted(values) if base.get(turn)]


@dataclass(frozen=True, slots=True, kw_only=True)
class HitCost:
    """What a hit costs: ``fixed`` seconds, ``per_page`` seconds of lookup, and ``bytes_per_second`` of reading."""

    fixed: float
    per_page: float
    bytes_per_second: float

    def per_token(self, *, token_bytes: int, page_tokens: int) -> float:
        """Seconds that each token of a hit adds."""
        return token_bytes / self.bytes_per_second + self.per_page / page_tokens


def break_even(cost: HitCost, *, token_bytes: int, page_tokens: int, prefill_tokens_per_second: float) -> int | None:
    """The fewest tokens, in whole pages, whose hit is no slower than computing them; None where it never pays.

    A hit of n tokens takes fixed + n x per_token; computing them takes n / prefill rate. Computing is taken as linear,
    which favours it: attention makes long prompts dearer.
    """
    gained = 1 / prefill_tokens_per_second - cost.per_token(token_bytes=token_bytes, page_tokens=page_tokens)
    if gained <= 0:
        return None
    return max(1, math.ceil(cost.fixed / gained / page_tokens)) * page_tokens
