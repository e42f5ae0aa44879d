"""The bench's arithmetic: medians, quantiles, ratios paired by round, and the break-even."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from l3client.bench.stats import HitCost, Spread, break_even, paired, quantile

POSITIVE = st.floats(min_value=1e-6, max_value=1e6)
SERIES = st.dictionaries(st.integers(1, 20), POSITIVE, min_size=1)


@given(st.lists(POSITIVE, min_size=1))
def test_a_median_lies_between_the_extremes(values: list[float]) -> None:
    spread = Spread.of(values)
    assert min(values) == spread.low <= spread.median <= spread.high == max(values)


def test_no_values_have_no_median() -> None:
    with pytest.raises(ValueError, match="no values"):
        Spread.of([])


@given(st.lists(POSITIVE, min_size=1), st.floats(min_value=0.01, max_value=1))
def test_a_quantile_is_a_value_with_its_part_at_or_below(values: list[float], part: float) -> None:
    found = quantile(values, part)
    assert found in values
    at_or_below = sum(value <= found for value in values)
    below = sum(value < found for value in values)
    assert below < math.ceil(part * len(values)) <= at_or_below


@pytest.mark.parametrize(("part", "value"), [(0.5, 50), (0.99, 99), (1, 100), (0.001, 1)])
def test_quantiles_by_nearest_rank(part: float, value: float) -> None:
    assert quantile([float(i) for i in range(100, 0, -1)], part) == value


@pytest.mark.parametrize(("values", "part"), [([], 0.5), ([1.0], 0.0), ([1.0], 1.1)])
def test_quantiles_that_are_none(values: list[float], part: float) -> None:
    with pytest.raises(ValueError, match="no quantile"):
        quantile(values, part)


@given(SERIES, SERIES)
def test_ratios_are_of_the_rounds_that_both_have(mine: dict[int, float], theirs: dict[int, float]) -> None:
    both = sorted(mine.keys() & theirs.keys())
    assert paired(mine, theirs) == [mine[turn] / theirs[turn] for turn in both]


@given(SERIES, st.lists(POSITIVE, min_size=20, max_size=20), POSITIVE)
def test_a_ratio_does_not_see_how_fast_the_machine_was_in_a_round(
    base: dict[int, float], swings: list[float], ratio: float
) -> None:
    """Every round has a speed of its own; both run at it. Ratios are the same in all rounds."""
    swung = {turn: value * swings[turn - 1] for turn, value in base.items()}
    assert all(math.isclose(r, ratio) for r in paired({t: v * ratio for t, v in swung.items()}, swung))


def test_a_round_whose_base_is_zero_is_left_out() -> None:
    assert paired({1: 2.0, 2: 3.0}, {1: 0.0, 2: 1.5}) == [2.0]


@given(
    st.floats(min_value=0, max_value=1),
    st.floats(min_value=0, max_value=1e-4),
    st.floats(min_value=1e7, max_value=1e11),
)
def test_a_hit_pays_from_the_break_even_on_and_not_a_page_before(fixed: float, lookup: float, speed: float) -> None:
    cost = HitCost(fixed=fixed, per_page=lookup, bytes_per_second=speed)
    tokens = break_even(cost, token_bytes=245_760, page_tokens=64, prefill_tokens_per_second=8000)
    per_token = cost.per_token(token_bytes=245_760, page_tokens=64)
    if tokens is None:
        assert per_token >= 1 / 8000
        return

    def saved(n: int) -> float:
        return n / 8000 - (fixed + n * per_token)

    assert tokens >= 64
    assert tokens % 64 == 0
    slack = 1e-9 * tokens / 8000
    assert saved(tokens) >= -slack
    assert tokens == 64 or saved(tokens - 64) <= slack


def test_an_example_of_the_break_even() -> None:
    """10 ms fixed; a token takes 125 us to compute and 62.5 us to read: 160 tokens, which is 3 pages of 64."""
    cost = HitCost(fixed=0.01, per_page=0.0, bytes_per_second=16e6)
    assert break_even(cost, token_bytes=1000, page_tokens=64, prefill_tokens_per_second=8000) == 192
