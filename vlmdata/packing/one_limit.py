"""Packing under one limit: items with integer sizes into bins of one capacity."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlmdata.packing.histogram import (
    STRATEGIES,
    HistogramPacking,
    Strategy,
    pack_histogram,
)
from vlmdata.packing.lower_bound import bin_lower_bound
from vlmdata.packing.seeding import derive_key, grouped_permutation, hash64

IntArray = npt.NDArray[np.int64]

# A strategy within one bin per thousand of the lower bound is good enough, but no more than 16 bins: another try costs
# the same however many items there are, so with many it is worth it.
_TOLERANCE = 1000
_MAX_TOLERATED_BINS = 16


@dataclass(frozen=True, slots=True)
class Preference:
    """Which strategies to try, and what to be content with.

    Attributes:
        strategies: In the order in which they are tried.
        excess: Share of the lower bound by which the number of bins may exceed it without another try.
    """

    strategies: tuple[Strategy, ...] = STRATEGIES
    excess: float = 0.0


TRY_ALL = Preference()


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
        """Sum a per-item column over each bin.

        Args:
            values: (n,) integers, by item position.

        Returns:
            int64 (bins,).
        """
        if not self.num_bins:
            return np.zeros(0, np.int64)
        return np.add.reduceat(values[self.items], self.offsets[:-1], dtype=np.int64)

    def reordered(self, order: IntArray) -> Bins:
        """The same bins in another order.

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
        """int64 (n,): the bin of each item position."""
        labels = np.empty(len(self.items), np.int64)
        labels[self.items] = np.repeat(np.arange(self.num_bins), np.diff(self.offsets))
        return labels


class SizeClasses:
    """Items grouped by size, largest first.

    Attributes:
        sizes: int64 (D,), the distinct sizes, decreasing.
        counts: int64 (D,), items of each.
        classes: uint32 (n,), index into ``sizes`` of each item.
    """

    def __init__(self, sizes: IntArray, capacity: int) -> None:
        assert sizes.min() >= 1
        assert sizes.max() <= capacity
        by_size = np.bincount(sizes, minlength=capacity + 1)
        self.sizes = np.flatnonzero(by_size)[::-1]
        self.counts = by_size[self.sizes]
        rank = np.zeros(capacity + 1, np.uint32)
        rank[self.sizes] = np.arange(len(self.sizes), dtype=np.uint32)
        self.classes = rank[sizes]

    def place(self, packing: HistogramPacking, key: int) -> tuple[IntArray, IntArray]:
        """Deal the items of each size at random to the slots that the packing has for that size.

        Args:
            packing: A packing of exactly ``counts``.
            key: Stream key.

        Returns:
            int64 (n,) item positions and int64 (n,) the bin of each.
        """
        order = grouped_permutation(self.classes, len(self.sizes), derive_key("classes", key))
        return order, _slot_bins(packing)


def learn_preference(sizes: IntArray, capacity: int, key: int) -> Preference:
    """Find what works for all items together, to save the tries when they are packed in many parts.

    Args:
        sizes: int64 (n,), each in ``[1, capacity]``.
        capacity: Bin size.
        key: Stream key.

    Returns:
        The strategies, the one with the fewest bins first, and a little more than the excess it leaves.
    """
    if not len(sizes):
        return TRY_ALL
    grouped = SizeClasses(sizes, capacity)
    bound = bin_lower_bound(grouped.sizes, grouped.counts, capacity)
    hashes = hash64(len(sizes), key)
    bins = [_try(strategy, grouped, capacity, bound, hashes).num_bins for strategy in STRATEGIES]
    order = np.argsort(bins, kind="stable")
    excess = min(bins) / bound - 1 + 1 / _TOLERANCE
    return Preference(tuple(STRATEGIES[index] for index in order), excess)


def pack_sizes(sizes: IntArray, capacity: int, key: int, preference: Preference = TRY_ALL) -> Bins:
    """Pack items under one limit, within a fraction of a percent of the lower bound where sizes allow it.

    Args:
        sizes: int64 (n,), each in ``[1, capacity]``.
        capacity: Bin size.
        key: Stream key: decides which of several items of one size goes where, and the opening items.
        preference: From :func:`learn_preference`; the default tries all strategies until one is very good.

    Returns:
        The bins, none empty, none over capacity, every position once. A function of the arguments only.
    """
    if not len(sizes):
        return Bins(np.zeros(0, np.int64), np.zeros(1, np.int64))
    grouped = SizeClasses(sizes, capacity)
    packing = _best_packing(grouped, capacity, derive_key("openers", key), preference)
    return group_items(*grouped.place(packing, key), packing.num_bins)


def fill_up(rooms: IntArray, sizes: IntArray, capacity: int, key: int) -> tuple[IntArray, int]:
    """Put items into bins that exist already, and into new ones where none has room: plain best-fit-decreasing.

    Args:
        rooms: int64 (B,), room left in each existing bin, in ``[0, capacity]``.
        sizes: int64 (n,), each in ``[1, capacity]``.
        capacity: Size of a new bin.
        key: Stream key.

    Returns:
        int64 (n,) bin of each item, existing bins by their position in ``rooms`` and new ones from B on, and the number
        of bins in all.
    """
    if not len(sizes):
        return np.zeros(0, np.int64), len(rooms)
    grouped = SizeClasses(sizes, capacity)
    by_room = np.argsort(rooms, kind="stable")
    packing = pack_histogram(grouped.sizes, grouped.counts, capacity, Strategy(None, 0.0), rooms=rooms[by_room])
    items, bins = grouped.place(packing, key)
    number = np.concatenate([by_room, np.arange(len(rooms), packing.num_bins)])
    labels = np.empty(len(sizes), np.int64)
    labels[items] = number[bins]
    return labels, packing.num_bins


def group_items(items: IntArray, bins: IntArray, num_bins: int) -> Bins:
    """Turn (item, bin) pairs into CSR; items of a bin keep the order in which they come.

    Args:
        items: int64 (n,), item positions.
        bins: int64 (n,), the bin of each, in ``[0, num_bins)``.
        num_bins: Number of bins.

    Returns:
        The bins.
    """
    offsets = np.zeros(num_bins + 1, np.int64)
    np.cumsum(np.bincount(bins, minlength=num_bins), out=offsets[1:])
    # One value sort of (bin, slot): unique keys, so any sorting algorithm gives the same result.
    shift = max(len(items) - 1, 0).bit_length()
    keys = (bins << shift) | np.arange(len(items), dtype=np.int64)
    keys.sort()
    keys &= (1 << shift) - 1
    return Bins(items[keys], offsets)


def _best_packing(grouped: SizeClasses, capacity: int, key: int, preference: Preference) -> HistogramPacking:
    """Try the strategies in order; the histogram makes each try cheap, however many items there are."""
    bound = bin_lower_bound(grouped.sizes, grouped.counts, capacity)
    tolerated = min(bound // _TOLERANCE, _MAX_TOLERATED_BINS)
    if preference.excess:
        tolerated = 1 + int(bound * preference.excess)  # the last bin of a part is rarely full
    hashes = hash64(len(grouped.classes), key)
    best: HistogramPacking | None = None
    for strategy in preference.strategies:
        packing = _try(strategy, grouped, capacity, bound, hashes)
        if best is None or packing.num_bins < best.num_bins:
            best = packing
        if best.num_bins <= bound + tolerated:
            break
    assert best is not None
    return best


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
    """Count per size class the items that open a bin: each item is drawn independently with the same probability."""
    if not strategy.openers:
        return None
    threshold = int(strategy.openers * bound / len(classes) * 2**64)
    drawn = classes[hashes < np.uint64(min(threshold, 2**64 - 1))]
    return np.bincount(drawn, minlength=num_classes).astype(np.int64)


def _slot_bins(packing: HistogramPacking) -> IntArray:
    """Bin number of every slot, slots in order of size class; int64 (n,)."""
    runs = packing.runs[np.argsort(packing.runs[:, 0], kind="stable")]
    first, length, copies = runs[:, 1], runs[:, 2], runs[:, 3]
    within = np.arange(int(length.sum())) - np.repeat(np.cumsum(length) - length, length)
    visited = np.repeat(first, length) + within
    return np.repeat(visited, np.repeat(copies, length))
