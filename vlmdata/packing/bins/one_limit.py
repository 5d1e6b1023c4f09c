"""Packing under one limit: items with integer sizes into bins of one capacity."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlmdata.packing.patterns.histogram import (
    STRATEGIES,
    HistogramPacking,
    Strategy,
    pack_histogram,
)
from vlmdata.packing.patterns.lower_bound import bin_lower_bound
from vlmdata.packing.patterns.patterns import Patterns, find_patterns, pack_by_patterns, round_up_sizes
from vlmdata.packing.seeding import derive_key, grouped_permutation, hash64

IntArray = npt.NDArray[np.int64]

# A strategy within 0.1 % and 16 bins of the lower bound is good enough. Another try costs
# the same for any number of items, so with many items it is worthwhile.
_TOLERANCE = 1000
_MAX_TOLERATED_BINS = 16
# What a strategy uses for a part of at least so many bins is at most this share below what it uses for all parts
# together. It is not tried if that is too many.
_MIN_EXPECTED_BINS = 1000
_SPREAD = 0.003
# Below this many bins patterns are hardly used twice, so that rounding takes away what they gain.
_MIN_PATTERN_BINS = 200


@dataclass(frozen=True, eq=False, slots=True)
class Preference:
    """The strategies to try, and the acceptable excess.

    Attributes:
        strategies: In the order in which they are tried.
        excess: Acceptable number of bins above the lower bound, as a share of it.
        expected: Number of bins of each strategy above the lower bound, as a share of it, for all parts together; empty
            if not known.
        patterns: To be tried before strategies; None if they are of no use.
        rounded: int64 (capacity + 1,), the size that patterns have for each size; None without patterns.
    """

    strategies: tuple[Strategy, ...] = STRATEGIES
    excess: float = 0.0
    expected: tuple[float, ...] = ()
    patterns: Patterns | None = None
    rounded: IntArray | None = None


TRY_ALL = Preference()
#: All strategies, but no patterns: to compare two ways of packing quickly.
WITHOUT_PATTERNS = Preference(excess=1e-9)


@dataclass(frozen=True, eq=False, slots=True)
class Bins:
    """Items grouped in bins, as CSR.

    Attributes:
        items: int64 (n,), item positions, bin by bin.
        offsets: int64 (bins + 1,); bin b holds ``items[offsets[b]:offsets[b + 1]]``.
    """

    items: IntArray
    offsets: IntArray

    @property
    def num_bins(self) -> int:
        """Number of bins."""
        return len(self.offsets) - 1

    def sums(self, values: npt.NDArray[np.integer]) -> IntArray:
        """Sums a per-item column over each bin.

        Args:
            values: (n,) integers, by item position.

        Returns:
            int64 (bins,).
        """
        if not self.num_bins:
            return np.zeros(0, np.int64)
        return np.add.reduceat(values[self.items], self.offsets[:-1], dtype=np.int64)

    def reordered(self, order: IntArray) -> Bins:
        """Returns the bins in another order.

        Args:
            order: int64 (bins,), a permutation: bin ``order[0]`` comes first.

        Returns:
            The reordered bins.
        """
        counts = np.diff(self.offsets)[order]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        source = np.arange(len(self.items)) + np.repeat(self.offsets[:-1][order] - offsets[:-1], counts)
        return Bins(self.items[source], offsets)

    def bin_of_item(self) -> IntArray:
        """Returns the bin of each item position, int64 (n,)."""
        labels = np.empty(len(self.items), np.int64)
        labels[self.items] = np.repeat(np.arange(self.num_bins), np.diff(self.offsets))
        return labels


@dataclass(frozen=True, eq=False, slots=True)
class SizeClasses:
    """Items grouped by size, largest first.

    Attributes:
        sizes: int64 (D,), the distinct sizes, decreasing.
        counts: int64 (D,), items of each.
        classes: uint32 (n,), index into ``sizes`` of each item.
    """

    sizes: IntArray
    counts: IntArray
    classes: npt.NDArray[np.uint32]

    @classmethod
    def of(cls, sizes: IntArray, capacity: int) -> SizeClasses:
        """Group items by their sizes.

        Args:
            sizes: int64 (n,), each in ``[1, capacity]``.
            capacity: Bin size.
        """
        assert sizes.min() >= 1
        assert sizes.max() <= capacity
        by_size = np.bincount(sizes, minlength=capacity + 1)
        distinct = np.flatnonzero(by_size)[::-1]
        rank = np.zeros(capacity + 1, np.uint32)
        rank[distinct] = np.arange(len(distinct), dtype=np.uint32)
        return cls(distinct, by_size[distinct], rank[sizes])

    def rounded_up(self, sizes: IntArray) -> SizeClasses:
        """Fewer, larger classes.

        Args:
            sizes: int64 (D,), non-increasing: what each size becomes.
        """
        first = np.concatenate([[True], sizes[1:] != sizes[:-1]])
        if first.all():
            return self
        group = (np.cumsum(first) - 1).astype(np.uint32)
        return SizeClasses(sizes[first], np.add.reduceat(self.counts, np.flatnonzero(first)), group[self.classes])

    def place(self, packing: HistogramPacking, key: int) -> tuple[IntArray, IntArray]:
        """Assigns the items of each size at random to the packing's slots for that size.

        Args:
            packing: A packing of exactly ``counts``.
            key: Stream key.

        Returns:
            int64 (n,) item positions and int64 (n,) the bin of each.
        """
        order = grouped_permutation(self.classes, len(self.sizes), derive_key("classes", key))
        return order, _slot_bins(packing)


def learn_preference(sizes: IntArray, capacity: int, key: int) -> Preference:
    """Ranks the strategies on all items together, to save tries when they are packed in many parts.

    Args:
        sizes: int64 (n,), each in ``[1, capacity]``.
        capacity: Bin size.
        key: Stream key.

    Returns:
        The strategies, starting with the fewest bins, and slightly more than the excess of the first.
    """
    if not len(sizes):
        return TRY_ALL
    grouped = SizeClasses.of(sizes, capacity)
    bound = bin_lower_bound(grouped.sizes, grouped.counts, capacity)
    hashes = hash64(len(sizes), key)
    bins = [_try(strategy, grouped, capacity, bound, hashes).num_bins for strategy in STRATEGIES]
    order = np.argsort(bins, kind="stable")
    strategies = tuple(STRATEGIES[index] for index in order)
    expected = tuple(bins[index] / bound - 1 for index in order)
    margin = 1 / _TOLERANCE
    if min(bins) > bound * (1 + margin) and bound >= _MIN_PATTERN_BINS:
        up = round_up_sizes(grouped.sizes, grouped.counts)
        merged = grouped.rounded_up(up)
        patterns = _find_patterns(merged, capacity, hashes)
        packed = pack_by_patterns(merged.sizes, merged.counts, capacity, patterns).num_bins
        if packed < min(bins):
            rounded = np.zeros(capacity + 1, np.int64)
            rounded[grouped.sizes] = up
            return Preference(strategies, packed / bound - 1 + margin, expected, patterns, rounded)
    return Preference(strategies, min(bins) / bound - 1 + margin, expected)


def pack_sizes(sizes: IntArray, capacity: int, key: int, preference: Preference = TRY_ALL) -> Bins:
    """Packs items under one limit, within a fraction of a percent of the lower bound if sizes allow.

    Args:
        sizes: int64 (n,), each in ``[1, capacity]``.
        capacity: Bin size.
        key: Stream key, which determines the places of items of equal size, and the openers.
        preference: From :func:`learn_preference`; the default tries all strategies until one is very good.

    Returns:
        The bins: none empty, none over capacity, each position once. A pure function of the arguments.
    """
    if not len(sizes):
        return Bins(np.zeros(0, np.int64), np.zeros(1, np.int64))
    grouped, packing = _best_packing(sizes, capacity, derive_key("openers", key), preference)
    return group_items(*grouped.place(packing, key), packing.num_bins)


def fill_up(rooms: IntArray, sizes: IntArray, capacity: int, key: int) -> tuple[IntArray, int]:
    """Puts items into existing bins, and into new ones if none has room: plain best-fit-decreasing.

    Args:
        rooms: int64 (B,), room left in each existing bin, in ``[0, capacity]``.
        sizes: int64 (n,), each in ``[1, capacity]``.
        capacity: Size of a new bin.
        key: Stream key.

    Returns:
        int64 (n,) bin of each item, existing bins by their position in ``rooms`` and new ones from B on, and the number
        of all bins.
    """
    if not len(sizes):
        return np.zeros(0, np.int64), len(rooms)
    grouped = SizeClasses.of(sizes, capacity)
    by_room = np.argsort(rooms, kind="stable")
    packing = pack_histogram(grouped.sizes, grouped.counts, capacity, Strategy(None, 0.0), rooms=rooms[by_room])
    items, bins = grouped.place(packing, key)
    number = np.concatenate([by_room, np.arange(len(rooms), packing.num_bins)])
    labels = np.empty(len(sizes), np.int64)
    labels[items] = number[bins]
    return labels, packing.num_bins


def group_items(items: IntArray, bins: IntArray, num_bins: int) -> Bins:
    """Converts (item, bin) pairs to CSR. Items of a bin keep their order.

    Args:
        items: int64 (n,), item positions.
        bins: int64 (n,), the bin of each, in ``[0, num_bins)``.
        num_bins: Number of bins.

    Returns:
        The bins.
    """
    offsets = np.zeros(num_bins + 1, np.int64)
    np.cumsum(np.bincount(bins, minlength=num_bins), out=offsets[1:])
    # One value sort of (bin, slot): keys are unique, so any sorting algorithm gives the same result.
    shift = max(len(items) - 1, 0).bit_length()
    keys = (bins << shift) | np.arange(len(items), dtype=np.int64)
    keys.sort()
    keys &= (1 << shift) - 1
    return Bins(items[keys], offsets)


def _best_packing(
    sizes: IntArray, capacity: int, key: int, preference: Preference
) -> tuple[SizeClasses, HistogramPacking]:
    """Tries the strategies in order. The histogram makes each try cheap, for any number of items.

    Returns:
        The packing with the fewest bins, and the classes that it is about.
    """
    grouped = SizeClasses.of(sizes, capacity)
    bound = bin_lower_bound(grouped.sizes, grouped.counts, capacity)
    tolerated = min(bound // _TOLERANCE, _MAX_TOLERATED_BINS)
    if preference.excess:
        tolerated = 1 + int(bound * preference.excess)  # the last bin of a part is rarely full
    tries: list[tuple[SizeClasses, HistogramPacking]] = []
    if preference.patterns is not None and preference.rounded is not None:
        rounded = SizeClasses.of(preference.rounded[sizes], capacity)
        packing = pack_by_patterns(
            rounded.sizes, rounded.counts, capacity, preference.patterns, preference.strategies[:1]
        )
        if packing.num_bins <= bound + tolerated:
            return rounded, packing
        tries.append((rounded, packing))
    hashes = hash64(len(sizes), key)
    expected = preference.expected or (0.0,) * len(preference.strategies)
    for strategy, excess in zip(preference.strategies, expected, strict=True):
        if tries and bound >= _MIN_EXPECTED_BINS:
            least = min(packing.num_bins for _, packing in tries)
            if bound * (1 + excess - _SPREAD) >= least:
                continue
        packing = _try(strategy, grouped, capacity, bound, hashes)
        if packing.num_bins <= bound + tolerated:
            return grouped, packing
        tries.append((grouped, packing))
    if bound >= _MIN_PATTERN_BINS and not preference.excess:
        rounded = grouped.rounded_up(round_up_sizes(grouped.sizes, grouped.counts))
        patterns = _find_patterns(rounded, capacity, hashes)
        tries.append((rounded, pack_by_patterns(rounded.sizes, rounded.counts, capacity, patterns)))
    return min(tries, key=lambda one: one[1].num_bins)


def _find_patterns(grouped: SizeClasses, capacity: int, hashes: npt.NDArray[np.uint64]) -> Patterns:
    """Column generation, which starts from all strategies; their random openers make patterns differ by key."""
    bound = bin_lower_bound(grouped.sizes, grouped.counts, capacity)
    packings = [_try(strategy, grouped, capacity, bound, hashes) for strategy in STRATEGIES]
    return find_patterns(grouped.sizes, grouped.counts, capacity, packings)


def _try(
    strategy: Strategy, grouped: SizeClasses, capacity: int, bound: int, hashes: npt.NDArray[np.uint64]
) -> HistogramPacking:
    openers = _draw_openers(strategy, grouped.classes, len(grouped.sizes), bound, hashes)
    return pack_histogram(grouped.sizes, grouped.counts, capacity, strategy, openers=openers)


def _draw_openers(
    strategy: Strategy,
    classes: npt.NDArray[np.uint32],
    num_classes: int,
    bound: int,
    hashes: npt.NDArray[np.uint64],
) -> IntArray | None:
    """Counts the items that open a bin, per size class. Each item is drawn independently with equal probability."""
    if not strategy.openers:
        return None
    threshold = int(strategy.openers * bound / len(classes) * 2**64)
    drawn = classes[hashes < np.uint64(min(threshold, 2**64 - 1))]
    return np.bincount(drawn, minlength=num_classes).astype(np.int64)


def _slot_bins(packing: HistogramPacking) -> IntArray:
    """Returns the bin number of each slot, int64 (n,), with slots in the order of size classes."""
    runs = packing.runs[np.argsort(packing.runs[:, 0], kind="stable")]
    first, length, copies = runs[:, 1], runs[:, 2], runs[:, 3]
    within = np.arange(int(length.sum())) - np.repeat(np.cumsum(length) - length, length)
    visited = np.repeat(first, length) + within
    return np.repeat(visited, np.repeat(copies, length))
