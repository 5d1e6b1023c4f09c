"""The lower bound of the linear program over all patterns, for one limit.

Volume does not see that lengths which do not divide the room must waste some of it. The linear program does: its prices
say what an item of each size costs. The bound is worked out from these prices in integers, so it holds whatever they
are.
"""

import numpy as np
import numpy.typing as npt

from vlmdata.packing.patterns.column_generation import bound_of_prices, solve_patterns, worth_of_rooms
from vlmdata.packing.patterns.histogram import STRATEGIES, pack_histogram
from vlmdata.packing.patterns.lower_bound import bin_lower_bound
from vlmdata.packing.patterns.patterns import patterns_of, round_up_sizes, split_small

# How near the bound is to the linear program's value, at most; and never above it.
_GAP = 1e-4


def program_bound(sizes: npt.ArrayLike, counts: npt.ArrayLike, capacity: int) -> int:
    """Returns the linear program's lower bound on the bins for one limit, or :func:`bin_lower_bound` if greater.

    Sizes are (D,) distinct integers in ``[0, capacity]``, counts (D,) integers, at least 1. The bound is 0 without
    items. Sizes that fit a bin more than 32 times have no price in it. With more than 256 distinct others, prices are
    found for 256 sizes. The price of a size is the worth of a bin less its worth without the room that the size takes.
    """
    bound = bin_lower_bound(sizes, counts, capacity)
    size, count = np.asarray(sizes, np.int64), np.asarray(counts, np.int64)
    order = np.argsort(-size, kind="stable")
    size, count = size[order], count[order]
    large = split_small(size, capacity)
    size, count = size[:large], count[:large]
    if not large:
        return bound
    up = round_up_sizes(size, count)
    first = np.flatnonzero(np.concatenate([[True], up[1:] != up[:-1]]))
    few, total = up[first], np.add.reduceat(count, first)
    slots = int(capacity // few[-1])
    packings = [pack_histogram(few, total, capacity, strategy) for strategy in STRATEGIES]
    known = np.concatenate([patterns_of(one, len(few), slots) for one in packings])
    prices = solve_patterns(few, total, capacity, known, _GAP).prices
    # Any prices give a true bound. Good ones rise in steps, and so does the worth of a room.
    worth = worth_of_rooms(few, prices, capacity)
    return max(bound, bound_of_prices(size, count, capacity, worth[capacity] - worth[capacity - size]))
