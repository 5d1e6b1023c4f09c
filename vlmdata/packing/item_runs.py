"""Assigns images and videos to the ranks that encode them: those of a pack, or those of a step."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlmdata.packing.arrays import IntArray

#: Number of patches at which attention over an image costs as much as the linear layers: 6 x hidden of the encoder
#: (per patch and layer 24 * hidden^2 FLOP linear, 4 * patches * hidden attention), with hidden 1,152 as in 9b and up.
BREAK_EVEN_PATCHES = 6 * 1152


@dataclass(frozen=True, eq=False)
class ItemRuns:
    """The R runs of temporal patches in which items are encoded, by item and by place in it.

    A run is a whole image, a whole video, or some successive temporal patches of a video.
    """

    items: IntArray  # int64 (R,), number of each run's item
    begins: IntArray  # int64 (R,), first temporal patch of each in its item
    counts: IntArray  # int64 (R,), temporal patches of each
    owners: IntArray  # int64 (R,), rank that encodes each

    @classmethod
    def whole(cls, grids: IntArray) -> ItemRuns:
        """Returns the runs of items that rank 0 encodes, each as a whole; grids are int64 (N, 3)."""
        nothing = np.zeros(len(grids), np.int64)
        return cls(np.arange(len(grids)), nothing, grids[:, 0].astype(np.int64), nothing)

    @classmethod
    def joined(cls, groups: Sequence[ItemRuns]) -> ItemRuns:
        """Returns the runs of all groups, one group after another."""
        items, begins, counts, owners = (
            np.concatenate([getattr(each, name) for each in groups]) for name in ("items", "begins", "counts", "owners")
        )
        return cls(items, begins, counts, owners)

    def take(self, chosen: npt.NDArray[np.bool_] | IntArray) -> ItemRuns:
        """Returns some of the runs, by number or by mask."""
        return ItemRuns(self.items[chosen], self.begins[chosen], self.counts[chosen], self.owners[chosen])

    def of(self, rank: int) -> ItemRuns:
        """Returns the runs of a rank."""
        return self.take(self.owners == rank)

    def grids(self, grids: IntArray) -> IntArray:
        """Returns the grid of each run, int64 (R, 3), from those of all items, int64 (N, 3)."""
        found = grids[self.items].astype(np.int64)
        found[:, 0] = self.counts
        return found

    def rows(self, grids: IntArray, of_items: IntArray) -> IntArray:
        """Returns the rows of each run, int64 (R,), where items with these grids have ``of_items`` rows, int64 (N,)."""
        rows: IntArray = of_items[self.items] // np.maximum(grids[self.items, 0], 1) * self.counts
        return rows

    def split(self, grids: IntArray, size: int) -> ItemRuns:
        """Splits the runs, of items with these grids, among ``size`` ranks; ``owners`` of the result are these."""
        inner = pack_runs(self.grids(grids), size)
        return ItemRuns(self.items[inner.items], self.begins[inner.items] + inner.begins, inner.counts, inner.owners)


def pack_runs(grids: npt.ArrayLike, size: int) -> ItemRuns:
    """Assigns the images and videos of a pack to ``size`` ranks so that the encoding work is even.

    Images, and videos of one temporal patch, go first by longest processing time (Graham 1969): by decreasing cost,
    each to the least loaded rank; ties go to the lowest rank. Temporal patches of the other videos then fill the ranks
    up to a common level, in order: attention is within a temporal patch, so any split gives the same result. A rank has
    at most one run of a video, and at most ``size - 1`` videos are split. Every rank computes the same answer from the
    grids alone, (N, 3) integers: patches along t, h, w.
    """
    return step_runs([[grids]], size)[0][0]


def step_runs(micro_batches: Sequence[Sequence[npt.ArrayLike]], size: int) -> tuple[tuple[ItemRuns, ...], ...]:
    """Assigns the images and videos of a step to the ``size`` data-parallel ranks of a vision tower.

    As :func:`pack_runs`, over all packs of a micro-batch together. A micro-batch continues with the loads of those
    before, so ranks are even over the step if a micro-batch has too few images to be even by itself. Returns the runs
    of each micro-batch and pack.
    """
    loads = [0] * size
    found = []
    for packs in micro_batches:
        grids = [np.asarray(pack, dtype=np.int64).reshape(-1, 3) for pack in packs]
        runs = _runs(np.concatenate([np.zeros((0, 3), np.int64), *grids]), loads)
        firsts = np.cumsum([0, *map(len, grids)])
        cuts = np.searchsorted(runs.items, firsts)
        of_packs = []
        for number, first in enumerate(firsts[:-1].tolist()):
            own = runs.take(np.arange(cuts[number], cuts[number + 1]))
            of_packs.append(ItemRuns(own.items - first, own.begins, own.counts, own.owners))
        found.append(tuple(of_packs))
    return tuple(found)


def _runs(grids: IntArray, loads: list[int]) -> ItemRuns:
    """Assigns items to ranks with these loads, which grow by what they get."""
    t, h, w = grids.T
    costs = h * w * (BREAK_EVEN_PATCHES + h * w)  # of a temporal patch
    whole, long = np.flatnonzero(t <= 1), np.flatnonzero(t > 1)
    alone = ItemRuns(whole, np.zeros_like(whole), t[whole], assigned(t[whole] * costs[whole], loads))
    item = np.repeat(long, t[long])
    owner = _filled_up(costs[item], loads)
    begins = np.flatnonzero((np.diff(item, prepend=-1) != 0) | (np.diff(owner, prepend=-1) != 0))
    place = np.arange(len(item)) - np.repeat(np.cumsum(t[long]) - t[long], t[long])
    parts = ItemRuns(item[begins], place[begins], np.diff(begins, append=len(item)), owner[begins])
    both = ItemRuns.joined([alone, parts])
    return both.take(np.lexsort((both.begins, both.items)))


def _filled_up(costs: IntArray, loads: list[int]) -> IntArray:
    """Assigns work to ranks with these loads, which grow by the costs: in order, up to a common level.

    Costs are int64 (N,). Each rank gets a range of the work, and is above or below the level by at most the cost of one
    piece. Integers only, so that every rank finds the same. Returns ranks, int64 (N,).
    """
    ends, before = np.cumsum(costs), np.array(loads, np.int64)
    total = int(ends[-1]) if len(ends) else 0
    low = np.argsort(before, kind="stable")
    sums = np.cumsum(before[low])
    # The level is (total + sum of the loads below it) / number of ranks below it.
    number = int(np.flatnonzero(total + sums >= before[low] * np.arange(1, len(low) + 1))[-1]) + 1
    room = np.zeros(len(loads), np.int64)  # times `number`
    room[low[:number]] = total + sums[number - 1] - number * before[low[:number]]
    middle = 2 * ends - costs  # twice the middle of each piece: it goes where that is
    owners = np.searchsorted(2 * np.cumsum(room), middle * number, side="left")
    owners = np.minimum(owners, len(loads) - 1).astype(np.int64)
    for rank, more in enumerate(np.bincount(owners, weights=costs, minlength=len(loads)).astype(np.int64).tolist()):
        loads[rank] += more
    return owners


def assigned(costs: IntArray, loads: list[int]) -> IntArray:
    """Assigns work to ranks with these loads, which grow by the costs: the most expensive first, to the least loaded.

    Costs are int64 (N,). Returns ranks, int64 (N,).
    """
    owners = np.zeros(len(costs), dtype=np.int64)
    least = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(least)
    for item in np.argsort(-costs, kind="stable").tolist():
        load, rank = least[0]
        owners[item], loads[rank] = rank, load + int(costs[item])
        heapq.heapreplace(least, (loads[rank], rank))
    return owners
