"""The best filling of a bin when every size has a value: the pricing step of column generation.

Values are integers, so a filling and its value are exact and the same on every machine.
"""

import numpy as np

from vlmdata.packing.arrays import IntArray


def best_values(sizes: IntArray, values: IntArray, capacity: int) -> IntArray:
    """Returns the value of the best filling of every room: the unbounded knapsack by dynamic programming.

    Sizes are int64 (D,), each in ``[1, capacity]``, values int64 (D,), at least 0. The result is int64 (capacity + 1,),
    non-decreasing.
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
    """Returns, for each of some sizes, int64 (n,) indices, a best filling among those that contain it.

    ``best`` is from :func:`best_values`, ``slots`` at least the most items that fit a bin. The result is int64 (n,
    slots), indices of sizes in increasing order; D where a filling is shorter.
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
