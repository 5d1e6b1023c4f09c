"""Packing under one limit: items with integer sizes into bins of one capacity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from vlmdata.packing.arrays import IntArray, offsets_of, ranges, stable_order
from vlmdata.packing.bins.few_bins import pack_few
from vlmdata.packing.patterns.histogram import STRATEGIES, HistogramPacking, Strategy, fill_rooms, pack_histogram
from vlmdata.packing.patterns.lower_bound import bin_lower_bound
from vlmdata.packing.patterns.patterns import Patterns, find_patterns, pack_by_patterns, round_up_sizes
from vlmdata.packing.seeding import derive_key, grouped_permutation, hash64

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
# Up to this many bins, filling one after the other is worthwhile; beyond, patterns do as well in less time.
_FEW_BINS = 500


@dataclass(frozen=True, eq=False, slots=True)
class Preference:
    """The strategies to try, and the acceptable excess.

    Patterns are tried before strategies, with the size that they have for each size, int64 (capacity + 1,).
    """

    strategies: tuple[Strategy, ...] = STRATEGIES  # in the order in which they are tried
    excess: float = 0.0  # acceptable number of bins above the lower bound, as a share of it
    expected: tuple[float, ...] = ()  # the number of each strategy for all parts together; empty if not known
    patterns: tuple[Patterns, IntArray] | None = None


TRY_ALL = Preference()
#: All strategies, but no patterns: to compare two ways of packing quickly.
WITHOUT_PATTERNS = Preference(excess=1e-9)


@dataclass(frozen=True, eq=False, slots=True)
class Bins:
    """Items grouped in bins, as CSR."""

    items: IntArray  # int64 (n,), item positions, bin by bin
    offsets: IntArray  # int64 (bins + 1,); bin b holds items[offsets[b]:offsets[b + 1]]

    @property
    def num_bins(self) -> int:
        """Number of bins."""
        return len(self.offsets) - 1

    def sums(self, values: npt.NDArray[np.integer]) -> IntArray:
        """Sums integers (n,), by item position, over each bin; int64 (bins,)."""
        if not self.num_bins:
            return np.zeros(0, np.int64)
        return np.add.reduceat(values[self.items], self.offsets[:-1], dtype=np.int64)

    def reordered(self, order: IntArray) -> Bins:
        """Returns the bins in another order, int64 (bins,): bin ``order[0]`` comes first."""
        counts = np.diff(self.offsets)[order]
        return Bins(self.items[ranges(self.offsets[:-1][order], counts)], offsets_of(counts))

    def bin_of_item(self) -> IntArray:
        """Returns the bin of each item position, int64 (n,)."""
        labels = np.empty(len(self.items), np.int64)
        labels[self.items] = np.repeat(np.arange(self.num_bins), np.diff(self.offsets))
        return labels


@dataclass(frozen=True, eq=False)
class SizeClasses:
    """Items grouped by size, largest first, and ways to pack them."""

    capacity: int  # bin size
    sizes: IntArray  # int64 (D,), the distinct sizes, decreasing
    counts: IntArray  # int64 (D,), items of each
    classes: npt.NDArray[np.uint32]  # uint32 (n,), index into sizes of each item
    key: int  # stream key of the openers

    @classmethod
    def of(cls, sizes: IntArray, capacity: int, key: int) -> SizeClasses:
        """Groups items by their sizes, int64 (n,), each in ``[1, capacity]``."""
        assert sizes.min() >= 1
        assert sizes.max() <= capacity
        by_size = np.bincount(sizes, minlength=capacity + 1)
        distinct = np.flatnonzero(by_size)[::-1]
        rank = np.zeros(capacity + 1, np.uint32)
        rank[distinct] = np.arange(len(distinct), dtype=np.uint32)
        return cls(capacity, distinct, by_size[distinct], rank[sizes], key)

    @cached_property
    def bound(self) -> int:
        """No packing has fewer bins."""
        return bin_lower_bound(self.sizes, self.counts, self.capacity)

    def rounded_up(self, sizes: IntArray) -> SizeClasses:
        """Returns fewer, larger classes. ``sizes`` is what each size becomes: int64 (D,), non-increasing."""
        first = np.concatenate([[True], sizes[1:] != sizes[:-1]])
        if first.all():
            return self
        group = (np.cumsum(first) - 1).astype(np.uint32)
        counts = np.add.reduceat(self.counts, np.flatnonzero(first))
        return SizeClasses(self.capacity, sizes[first], counts, group[self.classes], self.key)

    @cached_property
    def _hashes(self) -> npt.NDArray[np.uint64]:
        return hash64(len(self.classes), self.key)

    def by_strategy(self, strategy: Strategy) -> HistogramPacking:
        """Packs by a strategy. Each item is drawn as an opener with equal probability, by its hash."""
        openers = None
        if strategy.openers:
            threshold = int(strategy.openers * self.bound / len(self.classes) * 2**64)
            drawn = self.classes[self._hashes < np.uint64(min(threshold, 2**64 - 1))]
            openers = np.bincount(drawn, minlength=len(self.sizes))
        return pack_histogram(self.sizes, self.counts, self.capacity, strategy, openers=openers)

    def find_patterns(self) -> Patterns:
        """Generates columns, starting from all strategies; their random openers make patterns differ by key."""
        packings = [self.by_strategy(strategy) for strategy in STRATEGIES]
        return find_patterns(self.sizes, self.counts, self.capacity, packings)

    def by_patterns(self, patterns: Patterns, strategies: Sequence[Strategy] = STRATEGIES) -> HistogramPacking:
        """Packs by patterns."""
        return pack_by_patterns(self.sizes, self.counts, self.capacity, patterns, strategies)

    def place(self, packing: HistogramPacking, key: int) -> tuple[IntArray, IntArray]:
        """Assigns the items of each size at random to the slots for that size in a packing of these counts.

        Returns int64 (n,) item positions and int64 (n,) the bin of each.
        """
        runs = packing.runs[np.argsort(packing.runs[:, 0], kind="stable")]
        first, bins, copies = runs[:, 1], runs[:, 2], runs[:, 3]
        bin_of_slot = np.repeat(ranges(first, bins), np.repeat(copies, bins))  # slots in the order of size classes
        return grouped_permutation(self.classes, len(self.sizes), derive_key("classes", key)), bin_of_slot


def learn_preference(sizes: IntArray, capacity: int, key: int) -> Preference:
    """Ranks the strategies on all items together, to save tries when they are packed in many parts.

    Sizes are int64 (n,), each in ``[1, capacity]``. Returns the strategies, starting with the fewest bins, and slightly
    more than the excess of the first.
    """
    if not len(sizes):
        return TRY_ALL
    items = SizeClasses.of(sizes, capacity, key)
    bins = [items.by_strategy(strategy).num_bins for strategy in STRATEGIES]
    order = np.argsort(bins, kind="stable")
    strategies = tuple(STRATEGIES[index] for index in order)
    expected = tuple(bins[index] / items.bound - 1 for index in order)
    margin = 1 / _TOLERANCE
    if min(bins) > items.bound * (1 + margin) and items.bound >= _MIN_PATTERN_BINS:
        up = round_up_sizes(items.sizes, items.counts)
        merged = items.rounded_up(up)
        patterns = merged.find_patterns()
        packed = merged.by_patterns(patterns).num_bins
        if packed < min(bins):
            rounded = np.zeros(capacity + 1, np.int64)
            rounded[items.sizes] = up
            return Preference(strategies, packed / items.bound - 1 + margin, expected, (patterns, rounded))
    return Preference(strategies, min(bins) / items.bound - 1 + margin, expected)


def pack_sizes(sizes: IntArray, capacity: int, key: int, preference: Preference = TRY_ALL) -> Bins:
    """Packs items, sizes int64 (n,) in ``[1, capacity]``, under one limit.

    It comes within a fraction of a percent of the lower bound if sizes allow. The stream key determines the places of
    items of equal size, and the openers. With a preference from :func:`learn_preference` fewer strategies are tried. No
    bin is empty or over capacity, and each position is in one. A pure function of the arguments.
    """
    if not len(sizes):
        return Bins(np.zeros(0, np.int64), np.zeros(1, np.int64))
    grouped, packing = _best_packing(sizes, capacity, derive_key("openers", key), preference)
    return group_items(*grouped.place(packing, key), packing.num_bins)


def fill_up(rooms: IntArray, sizes: IntArray, capacity: int, key: int) -> tuple[IntArray, int]:
    """Puts items into existing bins, and into new ones if none has room: plain best-fit-decreasing.

    Rooms are int64 (B,), in ``[0, capacity]``, sizes int64 (n,), in ``[1, capacity]``. Returns the bin of each item,
    int64 (n,), existing bins by their position in ``rooms`` and new ones from B on, and the number of all bins.
    """
    if not len(sizes):
        return np.zeros(0, np.int64), len(rooms)
    grouped = SizeClasses.of(sizes, capacity, key)
    packing, number = fill_rooms(grouped.sizes, grouped.counts, capacity, rooms)
    items, bins = grouped.place(packing, key)
    labels = np.empty(len(sizes), np.int64)
    labels[items] = number[bins]
    return labels, packing.num_bins


def group_items(items: IntArray, bins: IntArray, num_bins: int) -> Bins:
    """Converts (item, bin) pairs, int64 (n,) each, to CSR. Items of a bin keep their order."""
    return Bins(items[stable_order(bins, num_bins)], offsets_of(np.bincount(bins, minlength=num_bins)))


def _best_packing(
    sizes: IntArray, capacity: int, key: int, preference: Preference
) -> tuple[SizeClasses, HistogramPacking]:
    """Tries the strategies in order. The histogram makes each try cheap, for any number of items.

    Returns the packing with the fewest bins, and the classes that it is about.
    """
    items = SizeClasses.of(sizes, capacity, key)
    enough = items.bound + min(items.bound // _TOLERANCE, _MAX_TOLERATED_BINS)
    if preference.excess:
        enough = items.bound + 1 + int(items.bound * preference.excess)  # the last bin of a part is rarely full
    tries: list[tuple[SizeClasses, HistogramPacking]] = []
    if preference.patterns is not None:
        patterns, rounded_size = preference.patterns
        rounded = SizeClasses.of(rounded_size[sizes], capacity, key)
        tries.append((rounded, rounded.by_patterns(patterns, preference.strategies[:1])))
    expected = preference.expected or (0.0,) * len(preference.strategies)
    for strategy, excess in zip(preference.strategies, expected, strict=True):
        least = min((packing.num_bins for _, packing in tries), default=None)
        if least is not None and least <= enough:
            break
        worse = least is not None and items.bound * (1 + excess - _SPREAD) >= least
        if not (worse and items.bound >= _MIN_EXPECTED_BINS):
            tries.append((items, items.by_strategy(strategy)))
    best = min(tries, key=lambda one: one[1].num_bins)
    if best[1].num_bins > enough and items.bound <= _FEW_BINS and not preference.excess:
        few = pack_few(items.sizes, items.counts, capacity, key, enough)
        if few is not None:
            best = min(best, (items, few), key=lambda one: one[1].num_bins)
            enough += 1  # the program behind patterns takes longer than one bin of so few is worth
    if best[1].num_bins > enough and not preference.excess:
        rounded = items.rounded_up(round_up_sizes(items.sizes, items.counts))
        best = min(best, (rounded, rounded.by_patterns(rounded.find_patterns())), key=lambda one: one[1].num_bins)
    return best
