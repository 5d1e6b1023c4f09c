"""Evens out the use of a second limit over bins that are packed by the first.

Items of equal size are exchanged between bins, so each bin keeps its use of the first limit exactly. The items that use
most of the second limit go to the bins whose other items use least of it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

# If all items of a bin changed at once, it would go from too little to too much. So the items are spread over groups
# that are exchanged one after another, and the items of a size over parts; a bin has about one item in each.
_GROUPS = 32
_PART = 64
_MAX_SWEEPS = 8
# A sweep that leaves more than this share of the excess is the last one.
_WORTHWHILE = 0.9
# Less excess than this share of what all bins may hold is left to the repair.
_NEGLIGIBLE = 1e-4


def even_out(labels: IntArray, sizes: IntArray, other: IntArray, limit: int) -> IntArray:
    """Exchanges items of equal size until few bins exceed the second limit.

    Args:
        labels: int64 (n,), bin of each item, from 0; no bin is empty.
        sizes: int64 (n,), use of the limit by which the bins are packed.
        other: int64 (n,), use of the second limit.
        limit: The second limit.

    Returns:
        int64 (n,), bin of each item: the given ones if exchanges reduce the excess by less than half.
    """
    use = _sums(labels, other)
    least = before = _excess(use, limit)
    found = best = labels
    groups: list[tuple[IntArray, IntArray]] = []
    for _ in range(_MAX_SWEEPS):
        if least <= limit * len(use) * _NEGLIGIBLE:
            break
        groups = groups or _groups(sizes, other)
        found = _sweep(found, other, use, groups)
        use, last = _sums(found, other), least
        excess = _excess(use, limit)
        if excess < least:
            best, least = found, excess
        if excess > last * _WORTHWHILE:
            break
    return best if 2 * least < before else labels


def _groups(sizes: IntArray, other: IntArray) -> list[tuple[IntArray, IntArray]]:
    """Items and the numbers of their parts, by group; within a part by decreasing use of the other limit."""
    order = np.lexsort((-other, sizes))
    first = np.flatnonzero(np.concatenate([[True], np.diff(sizes[order]) != 0]))
    counts = np.diff(first, append=len(order))
    parts = -(-counts // _PART)
    within = np.arange(len(order)) - np.repeat(first, counts)
    number = np.repeat(np.cumsum(parts) - parts, counts) + within % np.repeat(parts, counts)
    by_part = np.argsort(number, kind="stable")
    order, number = order[by_part], number[by_part]
    group = number % _GROUPS
    return [(order[here], number[here]) for here in (np.flatnonzero(group == at) for at in range(_GROUPS)) if len(here)]


def _sweep(labels: IntArray, other: IntArray, use: IntArray, groups: list[tuple[IntArray, IntArray]]) -> IntArray:
    labels, use = labels.copy(), use.copy()
    for items, number in groups:
        bins, needs = labels[items], other[items]
        # The places of each part, the one whose bin uses least first.
        rest = use[bins] - needs
        places = bins[np.argsort(number * (int(rest.max()) + 1) + rest, kind="stable")]
        labels[items] = places
        np.subtract.at(use, bins, needs)
        np.add.at(use, places, needs)
    return labels


def _sums(labels: IntArray, values: IntArray) -> IntArray:
    sums = np.zeros(int(labels.max()) + 1, np.int64)
    np.add.at(sums, labels, values)
    return sums


def _excess(use: IntArray, limit: int) -> int:
    return int(np.maximum(use - limit, 0).sum())
