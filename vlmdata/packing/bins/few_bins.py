"""Packing into few bins: each bin is filled as full as any choice of the remaining items allows.

Best fit and patterns fill thousands of bins almost perfectly, but a set of some hundred items offers few items of each
size, and what best fit wastes then is whole bins: 3 of 164 for 626 receipts. Here, a bin starts with a large item, and
the sums that the other items can reach up to its room are kept as a bitset, one shift for each item, until the room
itself is reached. The largest reachable sum is traced back to its items. Large items tend to come first in this order,
so that small ones stay for the last bins, which need them most. The order is random: tries differ, the one with the
fewest bins is kept, and lengths that occur once have other neighbours with another key.

Source: Gupta, Ho, "A new heuristic algorithm for the one-dimensional bin-packing problem" (minimum bin slack), 1999;
Fleszar, Hindi, "New heuristics for one-dimensional bin-packing", 2002, which starts each bin with the largest item.
"""

from __future__ import annotations

import numpy as np

from vlmdata.packing.arrays import IntArray
from vlmdata.packing.patterns.histogram import HistogramPacking
from vlmdata.packing.seeding import derive_key, hash64

_TRIES = 6
# An item counts in the order as up to 1 + NOISE times as large. With less, tries are too alike (decision 0113).
_NOISE = 1.6
# Bits shifted in all tries together, about a second. Many small items get fewer tries, or none.
_MAX_WORK = 10**10


def pack_few(sizes: IntArray, counts: IntArray, capacity: int, key: int, enough: int) -> HistogramPacking | None:
    """Packs into as few bins as some seeded tries find; a pure function of the arguments.

    Args:
        sizes: Distinct sizes, int64 (D,), decreasing, each in ``[1, capacity]``.
        counts: Items of each, int64 (D,).
        capacity: Size of a bin.
        key: Stream key of the orders.
        enough: Number of bins at which to stop.

    Returns:
        The packing with the fewest bins, or None if the first try takes too much work.
    """
    classes = np.repeat(np.arange(len(sizes)), counts)
    work = _MAX_WORK
    best: list[list[int]] | None = None
    for number in range(_TRIES):
        noise = hash64(len(classes), derive_key("few", number, key)) >> np.uint64(11)
        order = np.argsort(-sizes[classes] * (1 + _NOISE * (noise / 2**53)), kind="stable")
        filled, shifts = _fill_each(sizes[classes][order].tolist(), capacity, work // capacity)
        work -= shifts * capacity
        if filled is None:
            break
        if best is None or len(filled) < len(best):
            best = [classes[order[taken]].tolist() for taken in filled]
        if len(best) <= enough:
            break
    return None if best is None else _as_runs(best)


def _fill_each(sizes: list[int], capacity: int, most: int) -> tuple[list[list[int]] | None, int]:
    """Fills one bin after the other. Returns the positions in each, None after ``most`` shifts, and the shifts."""
    left = list(range(len(sizes)))
    bins: list[list[int]] = []
    shifts = 0
    while left and shifts <= most:
        first, *others = left
        taken, steps = _fullest([sizes[position] for position in others], capacity - sizes[first])
        shifts += steps
        chosen = {others[index] for index in taken}
        bins.append([first, *sorted(chosen)])
        left = [position for position in others if position not in chosen]
    return (None if left else bins), shifts


def _fullest(sizes: list[int], room: int) -> tuple[list[int], int]:
    """Returns the positions of the sizes with the largest sum up to ``room``, the first that reach it, and shifts."""
    mask = (1 << (room + 1)) - 1
    reached = [1]  # bit s after i items: some of the first i have the sum s
    for size in sizes:
        if reached[-1] >> room:
            break
        reached.append((reached[-1] | reached[-1] << size) & mask)
    total = reached[-1].bit_length() - 1
    taken = []
    for index in range(len(reached) - 1, 0, -1):
        if not reached[index - 1] >> total & 1:
            taken.append(index - 1)
            total -= sizes[index - 1]
    return taken, len(reached)


def _as_runs(bins: list[list[int]]) -> HistogramPacking:
    """Converts the classes of the items of each bin to runs of one bin."""
    runs = []
    for number, classes in enumerate(bins):
        distinct, copies = np.unique(classes, return_counts=True)
        runs += [(index, number, 1, many) for index, many in zip(distinct.tolist(), copies.tolist(), strict=True)]
    return HistogramPacking(len(bins), np.array(runs, np.int64).reshape(-1, 4))
