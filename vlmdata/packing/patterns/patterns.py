"""Packing by patterns: whole numbers of the linear program's patterns, best fit for what is left.

The program's solution uses a pattern 512.3 times; 512 bins get it. What remains is less than one bin per pattern, is
packed by best-fit-decreasing, and is where all the loss is. Two kinds of sizes stay out of the program:

* With more than `MAX_SIZES` distinct sizes, sizes are first rounded up to that many, with little room lost.
* Sizes that fit a bin more than `_MAX_ITEMS` times fill up the room that patterns leave.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vlmdata.packing.arrays import IntArray, ranges
from vlmdata.packing.patterns.column_generation import solve_patterns
from vlmdata.packing.patterns.histogram import STRATEGIES, HistogramPacking, Strategy, fill_rooms, pack_histogram

MAX_SIZES = 256
_MAX_ITEMS = 32
# The program stops this near its bound; rounding loses as much.
_GAP = 1e-3


@dataclass(frozen=True, slots=True)
class Patterns:
    """Ways to fill a bin, for one or many packings.

    ``contents`` are the (size, copies) in each pattern, most used first. ``shares`` are how often each is used, over
    the number of items they were made for.
    """

    contents: tuple[tuple[tuple[int, int], ...], ...]
    shares: tuple[float, ...]


def round_up_sizes(sizes: IntArray, counts: IntArray, wanted: int = MAX_SIZES) -> IntArray:
    """Rounds sizes, int64 (D,), distinct and strictly decreasing, up to at most ``wanted`` of them.

    The room lost is the sum of count times interval; for a given number of intervals it is least if intervals are as
    one over the square root of the count. So the cuts are even in the sum of those square roots. Returns what each size
    becomes, int64 (D,), non-increasing.
    """
    if len(sizes) <= wanted:
        return sizes
    weight = np.cumsum(np.sqrt(counts.astype(np.float64)))
    part = np.minimum((weight * (wanted / weight[-1])).astype(np.int64), wanted - 1)
    first = np.concatenate([[True], part[1:] != part[:-1]])
    rounded: IntArray = sizes[first][np.cumsum(first) - 1]
    return rounded


def split_small(sizes: IntArray, capacity: int) -> int:
    """Returns how many of some decreasing sizes, the largest, patterns hold; the others fill up what room is left."""
    return int((sizes * _MAX_ITEMS >= capacity).sum())


def find_patterns(sizes: IntArray, counts: IntArray, capacity: int, packings: list[HistogramPacking]) -> Patterns:
    """Finds patterns by column generation, most used first; none if all sizes are small.

    Sizes and counts are int64 (D,), sizes strictly decreasing and at most ``MAX_SIZES`` of those that patterns hold.
    ``packings`` are of the same items; their bins are patterns to start with.
    """
    large = split_small(sizes, capacity)
    if not large:
        return Patterns((), ())
    slots = int(capacity // sizes[large - 1])
    known = np.concatenate([np.zeros((0, slots), np.int64), *(patterns_of(one, large, slots) for one in packings)])
    found = solve_patterns(sizes[:large], counts[:large], capacity, known, _GAP)
    filled = np.append(sizes[:large], 0)[found.patterns].tolist()
    contents = tuple(tuple(sorted(Counter(size for size in row if size).items(), reverse=True)) for row in filled)
    return Patterns(contents, tuple((found.amounts / float(counts.sum())).tolist()))


def patterns_of(packing: HistogramPacking, large: int, slots: int) -> IntArray:
    """Returns the distinct bins of a packing without the sizes from index ``large`` on, int64 (P, slots).

    Rows are indices of sizes in increasing order; ``large`` where a pattern is shorter than ``slots``.
    """
    runs = packing.runs[packing.runs[:, 0] < large]
    if not len(runs):
        return np.zeros((0, slots), np.int64)
    # Between two neighbouring ends of runs all bins are alike.
    cuts = np.unique(np.concatenate([runs[:, 1], runs[:, 1] + runs[:, 2]]))
    patterns = np.full((len(cuts), slots), large, np.int64)
    used = np.zeros(len(cuts), np.int64)
    first, last = np.searchsorted(cuts, runs[:, 1]), np.searchsorted(cuts, runs[:, 1] + runs[:, 2])
    for item, start, stop, copies in zip(
        runs[:, 0].tolist(), first.tolist(), last.tolist(), runs[:, 3].tolist(), strict=True
    ):
        part = np.arange(start, stop)
        for _ in range(copies):
            patterns[part, used[part]] = item
            used[part] += 1
    patterns = patterns[patterns[:, 0] < large]
    patterns.sort(axis=1)
    return np.unique(patterns, axis=0)


def pack_by_patterns(
    sizes: IntArray, counts: IntArray, capacity: int, patterns: Patterns, strategies: Sequence[Strategy] = STRATEGIES
) -> HistogramPacking:
    """Packs all items by patterns as far as these go, the rest by best fit with some strategies.

    Sizes and counts are int64 (D,), sizes strictly decreasing. Patterns with a size that is not there are left out.
    """
    runs, bins, left = _apply(sizes, counts, patterns)
    large = split_small(sizes, capacity)
    some = np.flatnonzero(left[:large])
    if len(some):
        tries = [pack_histogram(sizes[some], left[some], capacity, strategy) for strategy in strategies]
        rest = min(tries, key=lambda packing: packing.num_bins)
        runs = np.concatenate(
            [runs, np.column_stack([some[rest.runs[:, 0]], rest.runs[:, 1] + bins, rest.runs[:, 2:]])]
        )
        bins += rest.num_bins
    packing = HistogramPacking(bins, runs)
    return _fill_up(packing, sizes, left, capacity, np.arange(large, len(sizes))) if large < len(sizes) else packing


def _apply(sizes: IntArray, counts: IntArray, patterns: Patterns) -> tuple[IntArray, int, IntArray]:
    """Uses whole numbers of each pattern, as far as there are items; returns (runs, bins, counts left)."""
    left = dict(zip(sizes.tolist(), counts.tolist(), strict=True))
    index = {size: number for number, size in enumerate(left)}
    total = int(counts.sum())
    runs: list[tuple[int, int, int, int]] = []
    bins = 0
    for content, share in zip(patterns.contents, patterns.shares, strict=True):
        # The solution is a proposal, within rounding of whole numbers; what there is decides.
        times = min(int(share * total + 1e-6), *(left.get(size, 0) // copies for size, copies in content))
        if times:
            for size, copies in content:
                left[size] -= times * copies
                runs.append((index[size], bins, times, copies))
            bins += times
    return np.array(runs, np.int64).reshape(-1, 4), bins, np.array(list(left.values()), np.int64)


def _fill_up(
    packing: HistogramPacking, sizes: IntArray, left: IntArray, capacity: int, small: IntArray
) -> HistogramPacking:
    """Packs small sizes by best fit into the room that is left, and into new bins."""
    change = np.zeros(packing.num_bins + 1, np.int64)
    volume = sizes[packing.runs[:, 0]] * packing.runs[:, 3]
    np.add.at(change, packing.runs[:, 1], volume)
    np.subtract.at(change, packing.runs[:, 1] + packing.runs[:, 2], volume)
    rooms = capacity - np.cumsum(change[:-1])
    filled, number = fill_rooms(sizes[small], left[small], capacity, rooms)
    index, first, bins, copies = filled.runs.T
    taken = number[ranges(first, bins)]
    single = np.column_stack([np.repeat(small[index], bins), taken, np.ones_like(taken), np.repeat(copies, bins)])
    return HistogramPacking(filled.num_bins, np.concatenate([packing.runs, single]))
