"""Array types of planning, and operations on groups of positions: orders, sums, offsets."""

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


def stable_order(keys: IntArray, most: int) -> IntArray:
    """Returns ``np.argsort(keys, kind="stable")`` of int64 keys in ``[0, most]``, but several times as fast.

    Key and position share one 64-bit value. Such values are unique, so numpy's vectorised sort gives the same order
    as a stable one.
    """
    shift = max(len(keys) - 1, 0).bit_length()
    if most.bit_length() + shift > 63:
        return np.argsort(keys, kind="stable")
    values = keys << shift
    values |= np.arange(len(keys), dtype=np.int64)
    values.sort()
    values &= (1 << shift) - 1
    return values


def offsets_of(counts: IntArray) -> IntArray:
    """Returns where each of n groups of these sizes begins and the last one ends, int64 (n + 1,)."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def ranges(starts: IntArray, counts: IntArray) -> IntArray:
    """Concatenates the ranges ``[starts[i], starts[i] + counts[i])``, int64."""
    ends = np.cumsum(counts)
    positions: IntArray = np.arange(int(counts.sum())) + np.repeat(starts - (ends - counts), counts)
    return positions


def sums_by(labels: IntArray, values: IntArray, count: int) -> IntArray:
    """Sums integers by label in ``[0, count)``, exactly; int64 (count,)."""
    sums = np.zeros(count, np.int64)
    np.add.at(sums, labels, values)
    return sums
