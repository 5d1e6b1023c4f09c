"""Bounds, and the small steps around them, against their definitions in plain Python."""

from __future__ import annotations

import itertools
from fractions import Fraction
from math import ceil

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.packing.helpers import fewest_bins
from tests.packing.test_patterns import Histogram, histograms, program_value
from vlmdata.packing.bins.two_limits import _REPACK_LOAD, Limits, _to_empty, lower_bound, volume_bound
from vlmdata.packing.patterns import column_generation
from vlmdata.packing.patterns.column_generation import bound_of_prices, solve_patterns
from vlmdata.packing.patterns.histogram import STRATEGIES, HistogramPacking, pack_histogram
from vlmdata.packing.patterns.lower_bound import bin_lower_bound
from vlmdata.packing.patterns.patterns import MAX_SIZES, Patterns, pack_by_patterns, patterns_of, split_small
from vlmdata.packing.patterns.program_bound import program_bound
from vlmdata.packing.seeding import hash64

sizes_in_20 = st.lists(st.integers(0, 20), max_size=14)


def l2(sizes: list[int], capacity: int) -> int:
    """Martello and Toth: for every threshold k, items over c - k, over c / 2, and of at least k."""
    best = 0
    for k in range(capacity // 2 + 1):
        huge = [s for s in sizes if s > capacity - k]
        large = [s for s in sizes if capacity - k >= s > capacity / 2]
        small = [s for s in sizes if capacity / 2 >= s >= k]
        rest = Fraction(sum(small) - (len(large) * capacity - sum(large)), capacity)
        best = max(best, len(huge) + len(large) + max(0, ceil(rest)))
    return best


def rounded_shares(sizes: list[int], capacity: int, k: int) -> int:
    """Fekete and Schepers' u(k): a share x of the bin becomes floor((k + 1) x) / k, unless (k + 1) x is whole."""
    total = Fraction(0)
    for size in sizes:
        share = Fraction(size, capacity)
        total += share if (share * (k + 1)).denominator == 1 else Fraction((share * (k + 1)).__floor__(), k)
    return ceil(total)


@settings(max_examples=100)
@given(sizes_in_20, st.integers(1, 20))
@example([5, 7, 8], 11)
@example([6, 10, 10], 15)
@example([4, 4, 6, 6, 6], 13)
def test_lower_bound_is_the_greatest_of_its_three_parts(drawn: list[int], capacity: int) -> None:
    sizes = [min(size, capacity) for size in drawn]
    parts = [ceil(Fraction(sum(sizes), capacity)), l2(sizes, capacity)]
    parts += [rounded_shares(sizes, capacity, k) for k in range(1, 21)]
    assert bin_lower_bound(*np.unique(sizes, return_counts=True), capacity) == (max(parts) if sizes else 0)


@pytest.mark.parametrize("k", range(1, 21))
def test_items_of_a_little_more_than_a_part_of_a_bin(k: int) -> None:
    # k fit, so 2 k + 1 need three bins; volume says two.
    assert bin_lower_bound([10_000 // (k + 1) + 1], [2 * k + 1], 10_000) == 3


@given(st.sets(st.integers(1, 12), min_size=1, max_size=3), st.integers(12, 14), st.data())
def test_with_many_items_the_program_bound_is_within_its_gap(
    drawn: set[int], capacity: int, data: st.DataObject
) -> None:
    sizes = sorted(drawn, reverse=True)
    counts = [data.draw(st.integers(50_000, 10**6)) for _ in sizes]
    exact = program_value(sizes, counts, capacity)
    found = program_bound(np.array(sizes), np.array(counts), capacity)
    assert exact * (1 - Fraction(11, 100_000)) <= found <= ceil(exact)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(9, 14))
def test_the_program_bound_is_never_above_the_optimum(sizes: list[int], capacity: int) -> None:
    assert program_bound(*np.unique(sizes, return_counts=True), capacity) <= fewest_bins(sizes, capacity)


def test_sizes_between_those_with_prices_cost_what_their_room_is_worth() -> None:
    """More sizes than the program takes, and in each group of them the greatest is rare."""
    number = np.arange(600)
    sizes, weight = 1366 + number, hash64(600, 0) % np.uint64(40)
    counts = np.where(number % 2, 1, 1000) * (1 + weight.astype(np.int64) ** 2)
    assert len(sizes) > MAX_SIZES
    # Prices on the line between two others give 34,203,381, those of the next smaller size 34,040,784.
    assert program_bound(sizes, counts, 8192) == 34_213_511
    assert bin_lower_bound(sizes, counts, 8192) == 34_021_917


def test_where_the_program_sees_too_little_the_simple_bound_counts() -> None:
    assert program_bound([60, 2], [1, 500], 100) == 11


def test_small_sizes_do_not_weaken_the_bound_of_the_others() -> None:
    large, few = ([60, 45], [40, 41]), ([3, 2], [1, 1])
    assert split_small(np.array([60, 45, 3, 2]), 100) == 2
    alone = program_bound(*large, 100)
    assert alone == 61  # a 60 fills a bin, as does a pair of 45
    assert program_bound(large[0] + few[0], large[1] + few[1], 100) == alone


def test_a_size_of_which_just_32_fill_a_bin_is_in_patterns() -> None:
    assert split_small(np.array([5, 4, 3]), 128) == 2
    assert split_small(np.array([5, 4, 3]), 129) == 1


@given(histograms())
def test_starting_patterns_are_the_distinct_bins(case: Histogram) -> None:
    sizes, counts, capacity = case
    for strategy in STRATEGIES:
        packing = pack_histogram(sizes, counts, capacity, strategy)
        bins: list[list[int]] = [[] for _ in range(packing.num_bins)]
        for index, first, number, copies in packing.runs.tolist():
            for at in range(first, first + number):
                bins[at] += [index] * copies
        found = patterns_of(packing, len(sizes), int(capacity // sizes[-1])).tolist()
        trimmed = [tuple(index for index in row if index < len(sizes)) for row in found]
        assert len(trimmed) == len(set(trimmed))
        assert set(trimmed) == {tuple(sorted(each)) for each in bins}


def test_bins_between_two_runs_are_a_pattern() -> None:
    # Size 0 is in all ten bins; size 1 not in the fourth to sixth.
    packing = HistogramPacking(10, np.array([[0, 0, 10, 1], [1, 0, 3, 1], [1, 6, 4, 2]]))
    assert patterns_of(packing, 2, 3).tolist() == [[0, 1, 1], [0, 1, 2], [0, 2, 2]]


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 9)), min_size=1, max_size=6))
def test_the_bound_of_two_limits_is_between_volume_and_optimum(items: list[tuple[int, int]]) -> None:
    tokens, patches = (np.array(column, np.int64) for column in zip(*items, strict=True))
    limits = Limits(12, 9)
    found = lower_bound(tokens, patches, limits)
    assert volume_bound(tokens, patches, limits) <= found
    assert found >= max(ceil(sum(t for t, _ in items) / 12), ceil(sum(p for _, p in items) / 9))
    assert found <= fewest_with_two(items, 12, 9)


def fewest_with_two(items: list[tuple[int, int]], first: int, second: int) -> int:
    """The optimum, by trying every assignment."""
    for bins in range(1, len(items) + 1):
        for labels in itertools.product(range(bins), repeat=len(items)):
            loads = [
                [sum(i[k] for i, at in zip(items, labels, strict=True) if at == b) for k in (0, 1)] for b in range(bins)
            ]
            if all(a <= first and b <= second for a, b in loads):
                return bins
    raise AssertionError


@given(st.lists(st.integers(0, 140), min_size=1, max_size=30))
def test_bins_are_emptied_until_the_average_allows_it_and_no_further(drawn: list[int]) -> None:
    use, limit = np.array(drawn, np.int64), 100
    emptied = _to_empty(use, limit)
    over = use > limit
    if not over.any():
        assert not emptied.any()
        return
    target = int(limit * _REPACK_LOAD)
    assert emptied[over].all()
    others = emptied & ~over
    # The emptiest ones, none without spare room.
    assert use[others].max(initial=-1) <= use[~emptied].min(initial=target)
    assert (use[others] < target).all()
    enough = use[emptied].sum() <= target * emptied.sum()
    assert enough or not (use[~emptied] < target).any()
    if others.any():  # without the fullest of them, the average would be too high
        kept = emptied.copy()
        kept[np.flatnonzero(others)[use[others].argmax()]] = False
        assert use[kept].sum() > target * kept.sum()


def test_negative_prices_count_as_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding may leave the program a price below 0; the knapsack takes none."""
    solve = column_generation.CoveringProgram.optimise

    def optimise(program: column_generation.CoveringProgram) -> None:
        solve(program)
        program.prices[-1] = -1e-3

    monkeypatch.setattr(column_generation.CoveringProgram, "optimise", optimise)
    sizes, counts = np.array([6, 5, 1]), np.array([7, 8, 1])
    found = solve_patterns(sizes, counts, 10)
    assert found.prices.min() >= 0
    assert found.lower_bound <= fewest_bins([6] * 3, 10) + 8
    assert bound_of_prices(sizes, counts, 10, found.prices) >= found.lower_bound


@pytest.mark.parametrize(("share", "times"), [(0.57, 57), (0.569, 56), (0.5, 50), (0.9, 60)])
def test_a_pattern_is_used_a_whole_number_of_times(share: float, times: int) -> None:
    """As a float, 0.57 * 100 is a little less than 57; and there are only 60 items of size 7."""
    packing = pack_by_patterns(np.array([7, 4]), np.array([60, 40]), 12, Patterns((((7, 1),),), (share,)))
    assert packing.runs[0].tolist() == [0, 0, times, 1]


def test_items_that_a_pattern_holds_several_times_are_counted_so() -> None:
    packing = pack_by_patterns(np.array([7, 2]), np.array([60, 40]), 12, Patterns((((7, 1), (2, 2)),), (1.0,)))
    assert packing.runs[:2].tolist() == [[0, 0, 20, 1], [1, 0, 20, 2]]
    assert packing.num_bins == 60
