"""Lower bounds on the number of packs, which show how far a plan is from the optimum.

All bounds are exact integers. The bound is the maximum of the volume bound and two families of dual feasible functions.
Each function maps sizes so that any set that fits in a bin still sums to at most 1.
"""

import numpy as np
import numpy.typing as npt

from vlmdata.packing.arrays import IntArray

_MAX_MULTIPLIER = 20


def bin_lower_bound(sizes: npt.ArrayLike, counts: npt.ArrayLike, capacity: int) -> int:
    """Returns a lower bound on the number of bins for one limit; 0 without items.

    The greatest of the volume bound, Martello and Toth's L2 (Discrete Applied Mathematics 28, 1990) and the functions
    u(k), k <= 20, of Fekete and Schepers ("New classes of fast lower bounds for bin packing problems", Mathematical
    Programming 91, 2001). Sizes are (D,) integers in ``[0, capacity]``, counts (D,) integers.
    """
    size = np.asarray(sizes, dtype=np.int64)
    count = np.asarray(counts, dtype=np.int64)
    if not size.size:
        return 0
    volume = -(-int(size @ count) // capacity)
    return max(volume, _l2(size, count, capacity), _multiples(size, count, capacity))


def _l2(size: IntArray, count: IntArray, capacity: int) -> int:
    """Items over half a bin need a bin each; the rest of those bins holds a limited part of the items of size >= k."""
    order = np.argsort(size, kind="stable")
    size, count = size[order], count[order]
    items = np.concatenate([[0], np.cumsum(count)])
    volume = np.concatenate([[0], np.cumsum(count * size)])
    half = np.searchsorted(size, capacity // 2, side="right")  # first size with 2 * size > capacity
    small = np.arange(half + 1)  # k = size[small]; `half` itself stands for "no small items count"
    k = np.append(size[:half], capacity // 2 + 1)
    # Items over capacity - k leave no room for an item of size k; they count only as separate bins.
    huge = np.maximum(np.searchsorted(size, capacity - k, side="right"), half)
    large_items = items[huge] - items[half]
    room = large_items * capacity - (volume[huge] - volume[half])
    rest = volume[half] - volume[small] - room
    bins = items[-1] - items[half] + np.maximum(0, -(-rest // capacity))
    return int(bins.max())


def _multiples(size: IntArray, count: IntArray, capacity: int) -> int:
    """u(k): a size x becomes floor((k + 1) x) / k, or stays x if (k + 1) x is whole (x as a share of the bin)."""
    best = 0
    for k in range(1, _MAX_MULTIPLIER + 1):
        scaled = (k + 1) * size
        whole = scaled % capacity == 0
        steps = scaled // capacity
        kept = int((count * steps)[whole].sum())  # in units of 1 / (k + 1)
        raised = int((count * steps)[~whole].sum())  # in units of 1 / k
        best = max(best, -(-(kept * k + raised * (k + 1)) // (k * (k + 1))))
    return best
