"""The best filling of a bin when every size has a value: the pricing step of column generation.

Values are integers, so a filling and its value are exact and the same on every machine.
"""

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


def best_values(sizes: IntArray, values: IntArray, capacity: int) -> IntArray:
    """Value of the best filling of every room: the unbounded knapsack by dynamic programming.

    Args:
        sizes: int64 (D,), each in ``[1, capacity]``.
        values: int64 (D,), at least 0.
        capacity: Bin size.

    Returns:
        int64 (capacity + 1,), non-decreasing: the greatest value that fits each room.
    """
    best = np.zeros(capacity + 1, np.int64)
    for size, value in zip(sizes.tolist(), values.tolist(), strict=True):
        if not value:
            continue
        # In blocks of the size, so that a block may build on the one before: any number of copies.
        for start in range(size, capacity + 1, size):
            stop = min(start + size, capacity + 1)
            block = best[start:stop]
            np.maximum(block, best[start - size : stop - size] + value, out=block)
    return best


def fillings_with(starts: IntArray, best: IntArray, sizes: IntArray, values: IntArray, slots: int) -> IntArray:
    """For each of some sizes, a best filling among those that contain it.

    Args:
        starts: int64 (n,), indices of sizes.
        best: From :func:`best_values`.
        sizes: int64 (D,).
        values: int64 (D,).
        slots: At least the most items that fit a bin.

    Returns:
        int64 (n, slots), indices of sizes in increasing order; D where a filling is shorter.
    """
    filling = np.full((len(starts), slots), len(sizes), np.int64)
    filling[:, 0] = starts
    room = len(best) - 1 - sizes[starts]
    live = np.arange(len(starts))
    for slot in range(1, slots):
        live = live[best[room[live]] > 0]
        if not len(live):
            break
        rest = room[live][:, None] - sizes
        reached = np.where(rest >= 0, best[np.maximum(rest, 0)] + values, -1)
        chosen = ((reached == best[room[live]][:, None]) & (values > 0)).argmax(axis=1)
        filling[live, slot] = chosen
        room[live] -= sizes[chosen]
    filling.sort(axis=1)
    return filling
