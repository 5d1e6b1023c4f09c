"""Stable orders of integers, by sorting values."""

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


def stable_order(keys: IntArray, most: int) -> IntArray:
    """Returns ``np.argsort(keys, kind="stable")``, but several times as fast.

    Key and position share one 64-bit value. Such values are unique, so numpy's vectorised sort gives the same order
    as a stable one.

    Args:
        keys: int64 (n,), at least 0.
        most: No key is greater.

    Returns:
        int64 (n,), positions.
    """
    shift = max(len(keys) - 1, 0).bit_length()
    if most.bit_length() + shift > 63:
        return np.argsort(keys, kind="stable")
    values = keys << shift
    values |= np.arange(len(keys), dtype=np.int64)
    values.sort()
    values &= (1 << shift) - 1
    return values
