"""Best-fit-decreasing under two limits, many independent cells at once.

With two limits bins of equal room are no longer interchangeable and there are nearly as many classes as items, so the
histogram does not help. Instead the items are dealt at random into cells of a few hundred; all cells run the plain
item-by-item algorithm in step, one numpy operation for the j-th item of every cell. Then the worst bins of all cells
are emptied and their items packed again in larger cells, until one cell holds them all.
"""

import numpy as np
import numpy.typing as npt

from vlmdata.packing.seeding import derive_key, permutation

IntArray = npt.NDArray[np.int64]

# Larger cells pack tighter, but there should be many, since every operation costs the same for few as for many.
_MAX_CELL_ITEMS = 512
_MIN_CELL_ITEMS = 128
_WANTED_CELLS = 16
_GROWTH = 2
_REPACKED_SHARE = 0.1
# Cells that run in step: enough to make numpy's overhead small, few enough that their bins stay in cache.
_CELLS_IN_STEP = 1024


def pack_pairs(
    first: IntArray, second: IntArray, first_limit: int, second_limit: int, key: int
) -> tuple[IntArray, int]:
    """Pack items that each use up two resources.

    Best fit: among the bins that have room for the item in both, the one with the least room, the two rooms added as
    shares of their limits. Decreasing: by the larger of an item's two shares. (A vector form of best-fit-decreasing;
    see Panigrahy, Talwar, Uyeda, Wieder, "Heuristics for vector bin packing", 2011.)

    Args:
        first: int64 (n,), use of the first resource, in ``[0, first_limit]``.
        second: int64 (n,), use of the second, in ``[0, second_limit]``; no item uses neither.
        first_limit: Per bin.
        second_limit: Per bin.
        key: Stream key.

    Returns:
        int64 (n,) bin numbers, and how many bins there are; none is empty.
    """
    labels = np.full(len(first), -1, np.int64)
    num_bins = 0
    pool = np.arange(len(first))
    cell_items = min(max(len(first) // _WANTED_CELLS, _MIN_CELL_ITEMS), _MAX_CELL_ITEMS)
    for attempt in range(64):  # every round shrinks the pool, the bound is a safeguard
        if not len(pool):
            break
        order = pool[permutation(len(pool), derive_key("cells", key, attempt))]
        bins, used = _pack_cells(first[order], second[order], first_limit, second_limit, cell_items)
        last = len(pool) <= cell_items
        keep = (
            np.ones(used, np.bool_)
            if last
            else _good_bins(first[order], second[order], bins, used, first_limit, second_limit)
        )
        new_number = np.cumsum(keep) - 1 + num_bins
        kept = keep[bins]
        labels[order[kept]] = new_number[bins[kept]]
        num_bins += int(keep.sum())
        pool = np.sort(order[~kept])
        cell_items *= _GROWTH
    assert not len(pool)
    return labels, num_bins


def _good_bins(
    first: IntArray, second: IntArray, bins: IntArray, used: int, first_limit: int, second_limit: int
) -> npt.NDArray[np.bool_]:
    """All bins but the emptiest tenth (by their fuller resource)."""
    first_sum = np.zeros(used, np.int64)
    second_sum = np.zeros(used, np.int64)
    np.add.at(first_sum, bins, first)
    np.add.at(second_sum, bins, second)
    fill = np.maximum(first_sum * second_limit, second_sum * first_limit)
    worst = np.argsort(fill, kind="stable")[: max(1, int(used * _REPACKED_SHARE))]
    keep = np.ones(used, np.bool_)
    keep[worst] = False
    return keep


def _pack_cells(
    first: IntArray, second: IntArray, first_limit: int, second_limit: int, cell_items: int
) -> tuple[IntArray, int]:
    """Cut the items into cells of ``cell_items`` in the order given and pack each cell; bins numbered throughout."""
    n = len(first)
    labels = np.empty(n, np.int64)
    num_bins = 0
    step = cell_items * _CELLS_IN_STEP
    for start in range(0, n, step):
        stop = min(start + step, n)
        cells = -(-(stop - start) // cell_items)
        filled = np.zeros((2, cells * cell_items), np.int64)  # the last cell is filled up with items of no size
        filled[0, : stop - start] = first[start:stop]
        filled[1, : stop - start] = second[start:stop]
        local, opened = _pack_in_step(
            filled[0].reshape(cells, -1), filled[1].reshape(cells, -1), first_limit, second_limit
        )
        base = np.cumsum(opened) - opened + num_bins
        labels[start:stop] = (local + base[:, None]).ravel()[: stop - start]
        num_bins += int(opened.sum())
    return labels, num_bins


def _pack_in_step(first: IntArray, second: IntArray, first_limit: int, second_limit: int) -> tuple[IntArray, IntArray]:
    """Best-fit-decreasing in every row at once.

    Args:
        first: int64 (cells, m).
        second: int64 (cells, m); an item of size 0 in both is a filler and opens no bin.
        first_limit: Per bin.
        second_limit: Per bin.

    Returns:
        int64 (cells, m) bin numbers within the cell, and int64 (cells,) bins opened.
    """
    cells, m = first.shape
    share = np.maximum(first * second_limit, second * first_limit)
    order = np.argsort(-share, axis=1, kind="stable")
    rows = np.arange(cells)
    first_room = np.full((cells, m), first_limit, np.int64)
    second_room = np.full((cells, m), second_limit, np.int64)
    # Both rooms as shares of their limits, added, times both limits. Only an untouched bin has the full value, and
    # there is always one more of them than any cell has opened, so argmin opens a bin exactly when no open one fits.
    room = np.full((cells, m), 2 * first_limit * second_limit, np.int64)
    never = np.iinfo(np.int64).max
    opened = np.zeros(cells, np.int64)
    result = np.empty((cells, m), np.int64)
    for j in range(m):
        item = order[:, j]
        need_first, need_second = first[rows, item], second[rows, item]
        width = min(int(opened.max()) + 1, m)
        fits = (first_room[:, :width] >= need_first[:, None]) & (second_room[:, :width] >= need_second[:, None])
        chosen = np.where(fits, room[:, :width], never).argmin(axis=1)
        first_room[rows, chosen] -= need_first
        second_room[rows, chosen] -= need_second
        room[rows, chosen] -= need_first * second_limit + need_second * first_limit
        result[rows, item] = chosen
        real = (need_first > 0) | (need_second > 0)
        np.maximum(opened, np.where(real, chosen + 1, 0), out=opened)
    return result, opened
