"""Exchanges items of equal size between bins, to even out their use of the second limit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vlmdata.packing.arrays import IntArray, stable_order, sums_by

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
    """Exchanges items of equal size until few bins exceed ``limit``, the limit on ``other``. Arrays are int64 (n,).

    No bin may be empty. Returns the bin of each item, or ``labels`` if exchanges reduce the excess by less than half.
    """
    use = sums_by(labels, other, int(labels.max()) + 1)
    least = before = _excess(use, limit)
    if least <= limit * len(use) * _NEGLIGIBLE:
        return labels
    groups = _Groups.of(sizes, other)
    bins = best = labels[groups.items]
    needs = other[groups.items]
    for _ in range(_MAX_SWEEPS):
        bins = _sweep(bins, needs, use, groups)
        last, excess = least, _excess(use, limit)
        if excess < least:
            best, least = bins, excess
        if excess > last * _WORTHWHILE or least <= limit * len(use) * _NEGLIGIBLE:
            break
    if 2 * least >= before:
        return labels
    found = np.empty_like(labels)
    found[groups.items] = best
    return found


@dataclass(frozen=True, eq=False, slots=True)
class _Groups:
    """Items by group, within a group by part, and within a part by decreasing use of the second limit."""

    items: IntArray  # int64 (n,), positions of items
    parts: IntArray  # int64 (n,), number of each one's part within its group, non-decreasing in a group
    bounds: tuple[int, ...]  # group g is [bounds[g], bounds[g + 1])

    @classmethod
    def of(cls, sizes: IntArray, other: IntArray) -> _Groups:
        """Spreads the items of each size over parts, and the parts over groups."""
        most = int(other.max())
        order = stable_order(sizes * (most + 1) + (most - other), (int(sizes.max()) + 1) * (most + 1))
        first = np.flatnonzero(np.concatenate([[True], np.diff(sizes[order]) != 0]))
        counts = np.diff(first, append=len(order))
        parts = -(-counts // _PART)
        within = np.arange(len(order)) - np.repeat(first, counts)
        number = np.repeat(np.cumsum(parts) - parts, counts) + within % np.repeat(parts, counts)
        part, group = np.divmod(number, _GROUPS)
        in_group = -(-int(parts.sum()) // _GROUPS)
        by_group = stable_order(group * in_group + part, _GROUPS * in_group)
        bounds = np.cumsum(np.bincount(group, minlength=_GROUPS)).tolist()
        return cls(order[by_group], part[by_group], (0, *bounds))


def _sweep(bins: IntArray, needs: IntArray, use: IntArray, groups: _Groups) -> IntArray:
    """Exchanges the items of one group after another; all arrays are int64, in the order of ``groups``.

    ``use`` is the bins' use of the second limit, and is brought up to date. Returns the new bins, int64 (n,).
    """
    found = np.empty_like(bins)
    for start, stop in zip(groups.bounds, groups.bounds[1:], strict=False):
        if start == stop:
            continue
        old, need, part = bins[start:stop], needs[start:stop], groups.parts[start:stop]
        # The places of each part, starting with the bin that uses least.
        rest = use[old] - need
        most = int(rest.max()) + 1
        new = old[stable_order(part * most + rest, (int(part[-1]) + 1) * most)]
        np.subtract.at(use, old, need)
        np.add.at(use, new, need)
        found[start:stop] = new
    return found


def _excess(use: IntArray, limit: int) -> int:
    return int(np.maximum(use - limit, 0).sum())
