"""Best-fit-decreasing under two limits, for many independent cells at once.

With two limits, bins of equal room are no longer interchangeable and there are nearly as many classes as items, so the
histogram does not help. Instead, the items are assigned at random to cells of a few hundred. All cells run the plain
item-by-item algorithm in parallel, with one numpy operation for the j-th item of every cell. Then the worst bins of all
cells are emptied and their items packed again in larger cells, until one cell holds them all. Groups (windows) are
never mixed.
"""

import numpy as np
import numpy.typing as npt

from vlmdata.packing.arrays import IntArray, sums_by
from vlmdata.packing.seeding import derive_key, grouped_permutation

# Larger cells pack tighter but cost more per item. There should be many cells, since a numpy operation on few costs the
# same as on many.
_MAX_CELL_ITEMS = 256
_MIN_CELL_ITEMS = 128
_WANTED_CELLS = 16
_GROWTH = 2
_REPACKED_SHARE = 0.1
# Cells per batch: enough to amortise numpy's overhead, and few enough that their bins stay in cache.
_CELLS_IN_STEP = 1024


def pack_pairs(
    first: IntArray, second: IntArray, first_limit: int, second_limit: int, key: int, groups: IntArray | None = None
) -> IntArray:
    """Packs items that each use two resources: int64 (n,), at most their limits; no item uses neither.

    Best fit: among the bins with room for the item in both resources, choose the one with the least room, where the two
    rooms are added as shares of their limits. Decreasing: by the larger of an item's two shares. (A vector form of
    best-fit-decreasing; see Panigrahy, Talwar, Uyeda, Wieder, "Heuristics for vector bin packing", 2011.)

    Items of different groups, int64 (n,) from 0, do not share a bin; None means one group. Returns the bin of each
    item, int64 (n,), consecutive from 0.
    """
    group = np.zeros(len(first), np.int64) if groups is None else groups
    labels = np.full(len(first), -1, np.int64)
    num_bins = 0
    pool = np.arange(len(first))
    cell_items = min(max(len(first) // _WANTED_CELLS, _MIN_CELL_ITEMS), _MAX_CELL_ITEMS)
    for attempt in range(64):  # every round shrinks the pool; the bound is a safeguard
        if not len(pool):
            break
        num_groups = int(group[pool].max()) + 1
        pool = pool[grouped_permutation(group[pool], num_groups, derive_key("cells", key, attempt))]
        largest = int(np.bincount(group[pool]).max())
        last = largest <= cell_items
        bins, used = _pack_cells(
            first[pool], second[pool], group[pool], first_limit, second_limit, min(cell_items, largest)
        )
        keep = np.ones(used, np.bool_)
        if not last:
            keep = _good_bins(first[pool], second[pool], bins, used, first_limit, second_limit)
        kept = keep[bins]
        labels[pool[kept]] = (np.cumsum(keep) - 1 + num_bins)[bins[kept]]
        num_bins += int(keep.sum())
        pool = np.flatnonzero(labels < 0)
        cell_items *= _GROWTH
    assert not len(pool)
    return labels


def _good_bins(
    first: IntArray, second: IntArray, bins: IntArray, used: int, first_limit: int, second_limit: int
) -> npt.NDArray[np.bool_]:
    """Marks all bins except the emptiest tenth (by their fuller resource)."""
    fill = np.maximum(sums_by(bins, first, used) * second_limit, sums_by(bins, second, used) * first_limit)
    worst = np.argsort(fill, kind="stable")[: max(1, int(used * _REPACKED_SHARE))]
    keep = np.ones(used, np.bool_)
    keep[worst] = False
    return keep


def _pack_cells(
    first: IntArray, second: IntArray, group: IntArray, first_limit: int, second_limit: int, cell_items: int
) -> tuple[IntArray, int]:
    """Splits each group into cells of ``cell_items`` in order and packs each cell. Bins are numbered globally."""
    sizes = np.bincount(group)
    cells_of_group = -(-sizes // cell_items)
    first_cell = np.cumsum(cells_of_group) - cells_of_group
    # Slot of each item in a (cells, cell_items) array; the rest of a group's last cell has items of size 0.
    within = np.arange(len(first)) - (np.cumsum(sizes) - sizes)[group]
    slot = first_cell[group] * cell_items + within
    num_cells = int(cells_of_group.sum())
    filled = np.zeros((2, num_cells * cell_items), np.int64)
    filled[0, slot], filled[1, slot] = first, second
    cells = filled.reshape(2, num_cells, cell_items)
    labels = np.empty((num_cells, cell_items), np.int64)
    num_bins = 0
    for start in range(0, num_cells, _CELLS_IN_STEP):
        part = slice(start, start + _CELLS_IN_STEP)
        local, opened = _pack_in_step(cells[0, part], cells[1, part], first_limit, second_limit)
        labels[part] = local + (np.cumsum(opened) - opened + num_bins)[:, None]
        num_bins += int(opened.sum())
    return labels.ravel()[slot], num_bins


def _pack_in_step(first: IntArray, second: IntArray, first_limit: int, second_limit: int) -> tuple[IntArray, IntArray]:
    """Runs best-fit-decreasing in all rows of two int64 (cells, m) at once.

    An item of size 0 in both is a filler and opens no bin. Returns bin numbers within the cell, int64 (cells, m), and
    numbers of opened bins, int64 (cells,).
    """
    cells, m = first.shape
    share = np.maximum(first * second_limit, second * first_limit)
    order = np.argsort(-share, axis=1, kind="stable")
    rows = np.arange(cells)
    # Half the bytes takes nearly half the time.
    signed, unsigned = (np.int32, np.uint32) if 2 * first_limit * second_limit < 1 << 31 else (np.int64, np.uint64)
    sign_bit = np.iinfo(signed).bits - 1
    first, second = first.astype(signed), second.astype(signed)
    first_room = np.full((cells, m), first_limit, signed)
    second_room = np.full((cells, m), second_limit, signed)
    # Both rooms as shares of their limits, added, times both limits. Only an untouched bin has the full value, and
    # there is always one more of these than any cell has opened, so argmin opens a bin exactly if no open one fits.
    room = np.full((cells, m), 2 * first_limit * second_limit, signed)
    opened = np.zeros(cells, np.int64)
    result = np.empty((cells, m), np.int64)
    for j in range(m):
        item = order[:, j]
        need_first, need_second = first[rows, item], second[rows, item]
        width = min(int(opened.max()) + 1, m)
        # Branch-free "room if the item fits, else the greatest number": a negative difference spreads its sign over
        # all bits, and all ones is the greatest unsigned number.
        score = first_room[:, :width] - need_first[:, None]
        score |= second_room[:, :width] - need_second[:, None]
        score >>= sign_bit
        score |= room[:, :width]
        chosen = score.view(unsigned).argmin(axis=1)
        first_room[rows, chosen] -= need_first
        second_room[rows, chosen] -= need_second
        room[rows, chosen] -= need_first * second_limit + need_second * first_limit
        result[rows, item] = chosen
        real = (need_first > 0) | (need_second > 0)
        np.maximum(opened, np.where(real, chosen + 1, 0), out=opened)
    return result, opened
