"""Best-fit-decreasing over a histogram of sizes.

Bin packing of token lengths has millions of items but only thousands of distinct sizes, and two bins with the same
remaining room are interchangeable. So both sides are kept as counts: items as (size, count), open bins as runs of bin
numbers with the same room. One step places one size into one whole run. A step either uses up a run or a size, and a
run emptied by a size never comes back for it. So the number of steps is about the number of distinct sizes, regardless
of the number of items.

Two refinements, both computed on the histogram alone:

* Look-ahead. Plain best-fit-decreasing fills a bin with as many of the current (largest) size as fit. With lengths in a
  narrow range, as receipts have, the remaining room is then often less than the smallest size and wasted: 2.5 % of all
  room for lengths of 600 to 1,200 in 8,192. With look-ahead, a bin takes only so many that some whole number of later
  sizes can fill the remaining room exactly, and such bins are preferred.
* Openers. A few bins start with a random item. Without them, lengths that occur once would have the same neighbours
  in every epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vlmdata.packing.arrays import IntArray
from vlmdata.packing.patterns.lower_bound import bin_lower_bound

# Number of whole-number fillings to consider per size; beyond this, any room counts as fillable.
_MAX_FILLING = 64


@dataclass(frozen=True, slots=True)
class Strategy:
    """How to pack a histogram.

    Attributes:
        lookahead: Quantile, among the remaining items, of the smallest size that look-ahead assumes available to
            fill a bin; None for plain best-fit-decreasing.
        openers: Share of the lower bound of bins that start with a random item.
        eager: With look-ahead, the share of the lower bound of bins that may be opened before items must go
            anywhere they fit. Bins beyond those that the volume needs would stay half empty.
    """

    lookahead: float | None
    openers: float
    eager: float = 0.0


# In order of preference: the first within the tolerance is used, else the one with the fewest bins. The values are
# the best of a grid over 55 pairs of length distribution and capacity; plain best-fit-decreasing is the safety net.
STRATEGIES = (
    Strategy(0.5, 0.25, 0.99),
    Strategy(0.3, 0.25, 0.99),
    Strategy(0.4, 0.25, 0.97),
    Strategy(None, 0.02),
    Strategy(None, 0.0),
)


@dataclass(frozen=True, slots=True)
class HistogramPacking:
    """Assignment of sizes to bins, which are numbered from 0, as runs.

    Runs are int64 (K, 4), rows ``(size index, first bin, bins, copies)``: each of ``bins`` consecutive bins from
    ``first bin`` takes ``copies`` items of that size.
    """

    num_bins: int
    runs: IntArray


class _Packer:
    """Bins during packing: runs of consecutive bins by remaining room, and a bitset of these rooms."""

    def __init__(self, capacity: int, eager_limit: int) -> None:
        self.num_bins = 0
        self.placed: list[tuple[int, int, int, int]] = []
        self._capacity = capacity
        self._eager_limit = eager_limit
        self._rooms = 0  # bit r is set if some bin has room r
        self._runs: list[list[tuple[int, int]] | None] = [None] * (capacity + 1)

    def add_bins(self, room: int, bins: int) -> None:
        """Adds existing bins."""
        self._put(room, self.num_bins, bins)
        self.num_bins += bins

    def open_with(self, index: int, size: int, bins: int) -> None:
        """Opens bins that start with one item of a size."""
        self.placed.append((index, self.num_bins, bins, 1))
        self.add_bins(self._capacity - size, bins)

    def place(self, index: int, size: int, count: int, filler: int) -> None:
        """Places all items of one size. No larger size may follow."""
        fillable = _fillable_rooms(size, filler, self._capacity) if self._eager_limit else 0
        while count:
            eager = self._rooms & fillable
            # While new bins may be opened, bins that this size would leave with unfillable room are kept for later
            # sizes.
            fits = eager or ((self._rooms >> size) << size if self.num_bins >= self._eager_limit else 0)
            if fits:
                room, first, bins = self._take(fits)
            else:
                room, first, bins = self._capacity, self.num_bins, 0
            if (fillable >> room) & 1 and (eager or not fits):
                copies = _fillable_copies(room, size, filler)
            else:
                copies = room // size
            if not bins:
                bins = max(1, count // copies)
                if self.num_bins < self._eager_limit:
                    bins = min(bins, self._eager_limit - self.num_bins)
                self.num_bins += bins
            count -= self._fill(index, size, count, copies, room, first, bins)

    def _fill(self, index: int, size: int, count: int, copies: int, room: int, first: int, bins: int) -> int:
        """Puts up to ``copies`` items into each bin of a run and keeps the rest. Returns the number placed."""
        whole = min(bins, count // copies)
        done = whole * copies
        if whole:
            self.placed.append((index, first, whole, copies))
            self._put(room - copies * size, first, whole)
        rest = count - done
        if whole < bins and rest:
            self.placed.append((index, first + whole, 1, rest))
            self._put(room - rest * size, first + whole, 1)
            whole += 1
            done = count
        if whole < bins:
            self._put(room, first + whole, bins - whole)
        return done

    def _put(self, room: int, first: int, bins: int) -> None:
        runs = self._runs[room]
        if runs:
            runs.append((first, bins))
        elif room:  # full bins are finished
            self._runs[room] = [(first, bins)]
            self._rooms |= 1 << room

    def _take(self, candidates: int) -> tuple[int, int, int]:
        """Removes the run with the least room among the bits of ``candidates``: (room, first bin, bins)."""
        room = (candidates & -candidates).bit_length() - 1
        runs = self._runs[room]
        assert runs
        first, bins = runs.pop()
        if not runs:
            self._rooms ^= 1 << room
        return room, first, bins


def pack_histogram(
    sizes: IntArray,
    counts: IntArray,
    capacity: int,
    strategy: Strategy,
    *,
    openers: IntArray | None = None,
    rooms: IntArray | None = None,
) -> HistogramPacking:
    """Packs items, given as a histogram, into as few bins as the strategy can.

    Best-fit-decreasing: Johnson, "Near-optimal bin packing algorithms" (MIT, 1973). With ``Strategy(None, 0)`` the
    number of bins equals that of the item-by-item algorithm.

    Args:
        sizes: int64 (D,), distinct, strictly decreasing, in ``[1, capacity]``.
        counts: int64 (D,), items of each size, at least 1.
        capacity: Bin size.
        strategy: See :class:`Strategy`; the caller draws its ``openers``.
        openers: int64 (D,), items of each size that start a new bin; at most ``counts``.
        rooms: int64 (B,), non-decreasing, room in existing bins, numbered from 0 in this order and counted in the
            result; only for plain best-fit-decreasing.
    """
    eager_limit = 0
    if strategy.lookahead is not None:
        assert rooms is None
        eager_limit = int(bin_lower_bound(sizes, counts, capacity) * strategy.eager)
    packer = _Packer(capacity, eager_limit)
    if rooms is not None:
        for room, bins in zip(*(column.tolist() for column in np.unique(rooms, return_counts=True)), strict=True):
            packer.add_bins(room, bins)
    left = counts
    if openers is not None:
        left = counts - openers
        for index in np.flatnonzero(openers).tolist():
            packer.open_with(index, int(sizes[index]), int(openers[index]))
    fillers = _filler_sizes(sizes, left, strategy.lookahead)
    for index, (size, count, filler) in enumerate(zip(sizes.tolist(), left.tolist(), fillers.tolist(), strict=True)):
        packer.place(index, size, count, filler)
    return HistogramPacking(packer.num_bins, np.array(packer.placed, dtype=np.int64).reshape(-1, 4))


def fill_rooms(sizes: IntArray, counts: IntArray, capacity: int, rooms: IntArray) -> tuple[HistogramPacking, IntArray]:
    """Packs items into bins with some room left, and into new bins, by plain best-fit-decreasing.

    As :func:`pack_histogram`, with ``rooms`` in any order. Also returns the position in ``rooms`` of each bin of the
    packing, int64 (num_bins,); new bins follow them.
    """
    by_room = np.argsort(rooms, kind="stable")
    packing = pack_histogram(sizes, counts, capacity, Strategy(None, 0.0), rooms=rooms[by_room])
    return packing, np.concatenate([by_room, np.arange(len(rooms), packing.num_bins)])


def _filler_sizes(sizes: IntArray, counts: IntArray, quantile: float | None) -> IntArray:
    """Returns, for each size, the smallest size that filling may assume: a quantile of the items not larger."""
    if quantile is None or not len(sizes):
        return sizes
    running = np.cumsum(counts[::-1])  # items up to each size, ascending
    wanted = np.maximum(1, (running * quantile).astype(np.int64))
    at = np.minimum(np.searchsorted(running, wanted), len(sizes) - 1)
    # Openers may have used up a size, so that its filler is above it: look-ahead then degenerates to multiples.
    return np.minimum(sizes[::-1][at][::-1], sizes)


def _fillable_rooms(size: int, filler: int, capacity: int) -> int:
    """Bitset of rooms that one ``size`` and some number of sizes in ``[filler, size]`` can fill exactly."""
    rooms = 0
    low, high = size, size
    for _ in range(_MAX_FILLING):
        if low > capacity:
            return rooms
        if high >= capacity or high + 1 >= low + filler:
            break  # the fillings overlap from here: all rooms above are fillable
        rooms |= ((1 << (high - low + 1)) - 1) << low
        low, high = low + filler, high + size
    return rooms | ((1 << (capacity + 1)) - (1 << low)) if low <= capacity else rooms


def _fillable_copies(room: int, size: int, filler: int) -> int:
    """Returns the most copies of ``size`` that leave room 0 or room fillable by sizes in ``[filler, size]``."""
    copies = room // size
    while copies > 1:
        rest = room - copies * size
        if -(-rest // size) * filler <= rest:
            return copies
        copies -= 1
    return 1
