import dataclasses
import hashlib
import itertools
import os
import subprocess
import sys
from fractions import Fraction
from functools import cache
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.packing.helpers import best_fit_decreasing, neighbours_of
from vlmdata.packing.bins import one_limit
from vlmdata.packing.bins.one_limit import WITHOUT_PATTERNS, learn_preference, pack_sizes
from vlmdata.packing.patterns.column_generation import best_values, bound_of_prices, fillings_with, solve_patterns
from vlmdata.packing.patterns.histogram import STRATEGIES, pack_histogram
from vlmdata.packing.patterns.lower_bound import bin_lower_bound
from vlmdata.packing.patterns.patterns import MAX_SIZES, find_patterns, pack_by_patterns, round_up_sizes
from vlmdata.packing.patterns.program_bound import program_bound
from vlmdata.packing.seeding import hash64

attempt = one_limit.SizeClasses.by_strategy
Histogram = tuple[np.ndarray, np.ndarray, int]


@st.composite
def histograms(draw: st.DrawFn, max_capacity: int = 200, max_sizes: int = 30, max_count: int = 60) -> Histogram:
    """Distinct decreasing sizes, their counts, the capacity."""
    capacity = draw(st.integers(4, max_capacity))
    low = draw(st.integers(1, capacity))
    sizes = draw(st.lists(st.integers(low, capacity), min_size=1, max_size=max_sizes, unique=True))
    counts = draw(st.lists(st.integers(1, max_count), min_size=len(sizes), max_size=len(sizes)))
    return np.array(sorted(sizes, reverse=True), np.int64), np.array(counts, np.int64), capacity


def receipt_like(count: int) -> np.ndarray:
    """Lengths of which seven fill most of a pack and leave room for none: where best fit loses 2 %."""
    noise = hash64(count, 5)  # not from numpy's generators, which promise no stable distributions
    large = 1024 + (noise >> np.uint64(32)) % np.uint64(100)
    small = 800 + (noise >> np.uint64(32)) % np.uint64(220)
    return np.where(noise % np.uint64(16) > 4, large, small).astype(np.int64)


def histogram(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    distinct, counts = np.unique(sizes, return_counts=True)
    return distinct[::-1], counts[::-1]


def program_value(sizes: list[int], counts: list[int], capacity: int) -> Fraction:
    """The linear program over all patterns in exact arithmetic: the dual's best vertex, by trying all of them."""
    most = [range(capacity // size + 1) for size in sizes]
    fits = [p for p in itertools.product(*most) if 0 < sum(a * b for a, b in zip(p, sizes, strict=True)) <= capacity]
    maximal = [p for p in fits if not any(q != p and all(a <= b for a, b in zip(p, q, strict=True)) for q in fits)]
    rows = [([Fraction(a) for a in p], Fraction(1)) for p in maximal]
    rows += [([Fraction(i == j) for j in range(len(sizes))], Fraction(0)) for i in range(len(sizes))]
    best = Fraction(0)
    for chosen in itertools.combinations(rows, len(sizes)):
        prices = solve_exactly([row for row, _ in chosen], [value for _, value in chosen])
        if prices is None or min(prices) < 0:
            continue
        if all(sum(a * y for a, y in zip(p, prices, strict=True)) <= 1 for p in maximal):
            best = max(best, sum((b * y for b, y in zip(counts, prices, strict=True)), Fraction(0)))
    return best


def solve_exactly(matrix: list[list[Fraction]], right: list[Fraction]) -> list[Fraction] | None:
    """Gauss-Jordan elimination in rationals; None if singular."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for column in range(len(rows)):
        pivot = next((r for r in range(column, len(rows)) if rows[r][column]), None)
        if pivot is None:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        rows[column] = [value / rows[column][column] for value in rows[column]]
        for r in range(len(rows)):
            if r != column:
                rows[r] = [a - rows[r][column] * b for a, b in zip(rows[r], rows[column], strict=True)]
    return [row[-1] for row in rows]


@given(histograms(max_capacity=12, max_sizes=3, max_count=9))
def test_bound_is_the_linear_program_of_all_patterns(case: Histogram) -> None:
    sizes, counts, capacity = case
    exact = ceil(program_value(sizes.tolist(), counts.tolist(), capacity))
    assert solve_patterns(sizes, counts, capacity).lower_bound == exact
    assert program_bound(sizes, counts, capacity) == max(exact, bin_lower_bound(sizes, counts, capacity))


@given(histograms(), st.data())
def test_any_prices_prove_a_bound(case: Histogram, data: st.DataObject) -> None:
    sizes, counts, capacity = case
    price = st.floats(0, 1)
    prices = np.array(data.draw(st.lists(price, min_size=len(sizes), max_size=len(sizes))))
    items = np.repeat(sizes, counts).tolist()
    assert bound_of_prices(sizes, counts, capacity, prices) <= best_fit_decreasing(items, capacity)


@pytest.mark.parametrize(("count", "bins"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_a_bound_of_prices_is_rounded_up(count: int, bins: int) -> None:
    assert bound_of_prices(np.array([5]), np.array([count]), 10, np.array([0.5])) == bins


@given(histograms())
def test_bound_lies_between_volume_and_packings(case: Histogram) -> None:
    sizes, counts, capacity = case
    found = program_bound(sizes, counts, capacity)
    assert -(-int(sizes @ counts) // capacity) <= bin_lower_bound(sizes, counts, capacity) <= found
    assert found <= min(pack_histogram(sizes, counts, capacity, strategy).num_bins for strategy in STRATEGIES)


@given(histograms(max_sizes=8), st.integers(0, 255))
def test_fillings_are_worth_what_the_table_says(case: Histogram, worthless: int) -> None:
    sizes, values, capacity = case
    values = np.where([worthless >> i & 1 for i in range(len(sizes))], 0, values)
    best = best_values(sizes, values, capacity)
    assert (np.diff(best) >= 0).all()
    slots = int(capacity // sizes[-1])
    padded_sizes, padded_values = np.append(sizes, 0), np.append(values, 0)
    fillings = fillings_with(np.arange(len(sizes)), best, sizes, values, slots)
    for start, filling in enumerate(fillings):
        assert start in filling
        assert padded_sizes[filling].sum() <= capacity
        assert padded_values[filling].sum() == values[start] + best[capacity - sizes[start]]
        assert filling.tolist() == sorted(filling.tolist())
        assert (padded_values[filling] > 0).sum() + (values[start] == 0) == (filling < len(sizes)).sum()


@given(histograms(), st.integers(0, 200))
def test_patterns_place_every_item_within_capacity(case: Histogram, missing: int) -> None:
    sizes, counts, capacity = case
    packings = [pack_histogram(sizes, counts, capacity, strategy) for strategy in STRATEGIES]
    patterns = find_patterns(sizes, counts, capacity, packings)
    # For a window the same patterns meet other counts, and sizes may be missing.
    some = np.arange(len(sizes)) != missing
    for window, number in ((sizes, counts), (sizes[some], (counts[some] + 1) // 2)):
        if not len(window):
            continue
        packing = pack_by_patterns(window, number, capacity, patterns)
        loads = np.zeros(packing.num_bins, np.int64)
        placed = np.zeros(len(window), np.int64)
        for index, first, bins, copies in packing.runs.tolist():
            loads[first : first + bins] += window[index] * copies
            placed[index] += bins * copies
        assert placed.tolist() == number.tolist()
        assert 0 < loads.min() <= loads.max() <= capacity
        assert packing.num_bins >= program_bound(window, number, capacity)


@given(histograms(max_capacity=5000, max_sizes=60), st.integers(1, 20))
def test_sizes_are_rounded_up_to_few(case: Histogram, wanted: int) -> None:
    sizes, counts, _ = case
    rounded = round_up_sizes(sizes, counts, wanted)
    assert (rounded >= sizes).all()
    assert (np.diff(rounded) <= 0).all()
    assert len(set(rounded.tolist())) <= wanted
    assert set(rounded.tolist()) <= set(sizes.tolist())
    assert round_up_sizes(sizes, counts, len(sizes)) is sizes


def test_lengths_that_do_not_divide_the_room_are_packed_to_the_bound() -> None:
    sizes = receipt_like(4000)
    bins = pack_sizes(sizes, 8192, 0)
    assert sorted(bins.items.tolist()) == list(range(len(sizes)))
    assert bins.sums(sizes).max() <= 8192
    bound = program_bound(*np.unique(sizes, return_counts=True), 8192)
    assert bins.num_bins <= 1.005 * bound
    assert pack_histogram(*histogram(sizes), 8192, STRATEGIES[0]).num_bins > 1.015 * bound, "greedy packing stays away"


def test_patterns_of_everything_serve_its_parts() -> None:
    sizes = receipt_like(18_000)
    preference = learn_preference(sizes, 8192, 0)
    assert preference.patterns is not None
    for number, part in enumerate(np.split(sizes, 3)):
        bins = pack_sizes(part, 8192, number, preference)
        assert sorted(bins.items.tolist()) == list(range(len(part)))
        assert bins.sums(part).max() <= 8192
        assert bins.num_bins <= 1.01 * bin_lower_bound(*histogram(part), 8192)


def test_strategies_that_cannot_win_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = receipt_like(18_000)
    preference = learn_preference(sizes, 8192, 0)
    assert preference.patterns is not None
    # Nothing is good enough without comparison.
    preference = dataclasses.replace(preference, excess=1e-9)
    tried: list[object] = []
    monkeypatch.setattr(
        one_limit.SizeClasses, "by_strategy", lambda self, strategy: tried.append(strategy) or attempt(self, strategy)
    )
    counts, bins = [], []
    for least in (10**9, 100):
        monkeypatch.setattr(one_limit, "_MIN_EXPECTED_BINS", least)
        bins.append([pack_sizes(part, 8192, 3, preference) for part in np.split(sizes, 3)])
        counts.append(len(tried))
        tried.clear()
    assert counts == [15, 0]
    assert [each.items.tolist() for each in bins[0]] == [each.items.tolist() for each in bins[1]]
    # Without patterns the best strategy is tried, and with it those that may be as good.
    monkeypatch.setattr(one_limit, "_MIN_EXPECTED_BINS", 100)
    pack_sizes(sizes, 8192, 3, dataclasses.replace(preference, patterns=None, expected=(0.01, 0.012, 0.5, 0.5, 0.5)))
    assert tried == list(preference.strategies[:2])


def test_many_sizes_and_small_ones() -> None:
    noise = hash64(9000, 2)
    sizes = np.concatenate([1030 + noise[:8000] % np.uint64(700), 20 + noise[8000:] % np.uint64(200)]).astype(np.int64)
    assert len(np.unique(sizes)) > MAX_SIZES
    bins = pack_sizes(sizes, 8192, 1)
    without = pack_sizes(sizes, 8192, 1, WITHOUT_PATTERNS)
    assert sorted(bins.items.tolist()) == list(range(len(sizes)))
    assert bins.sums(sizes).max() <= 8192
    assert bins.num_bins < without.num_bins


def test_epochs_have_other_neighbours() -> None:
    sizes = receipt_like(3000)
    neighbours = [neighbours_of(pack_sizes(sizes, 8192, key)) for key in (1, 2)]
    assert len(neighbours[0] & neighbours[1]) < 0.15 * len(neighbours[0])


@cache
def checksum() -> str:
    """Of a packing that takes hundreds of pivots."""
    digest = hashlib.sha256()
    for count, capacity in ((5000, 8192), (3000, 4096)):
        bins = pack_sizes(receipt_like(count), capacity, 7)
        digest.update(np.concatenate([[bins.num_bins], bins.items, bins.offsets]).astype("<i8").tobytes())
    return digest.hexdigest()[:16]


def test_packings_are_pinned() -> None:
    # Other machines, numpy versions and later versions of this package must come to the same. If this changes on
    # purpose, raise ALGORITHM_VERSION.
    assert checksum() == "4a19dd3b24d95db6"


def test_threads_and_vector_instructions_change_nothing() -> None:
    features = np._core._multiarray_umath.__cpu_dispatch__  # type: ignore[attr-defined]
    present = [name for name in features if np._core._multiarray_umath.__cpu_features__.get(name)]  # type: ignore[attr-defined]
    threads = "3" if os.environ.get("OMP_NUM_THREADS") == "1" else "1"  # `make test` gives each process one
    values = {"OMP_NUM_THREADS": threads, "NPY_DISABLE_CPU_FEATURES": " ".join(present)}
    code = "from tests.packing.test_patterns import checksum; print(checksum())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **values},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == [checksum()]
