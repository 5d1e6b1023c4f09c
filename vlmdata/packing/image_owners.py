"""Assigns images to the ranks that encode them: those of a pack, or those of a step."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vlmdata.packing.arrays import IntArray

#: Number of patches at which attention over an image costs as much as the linear layers: 6 x hidden of the encoder
#: (per patch and layer 24 * hidden^2 FLOP linear, 4 * patches * hidden attention), with hidden 1,152 as in 9b and up.
BREAK_EVEN_PATCHES = 6 * 1152


def image_owners(image_grid_thw: npt.ArrayLike, size: int) -> IntArray:
    """Assigns the images of a pack to ``size`` ranks so that the encoding work is even.

    Longest processing time first (Graham 1969): images by decreasing cost, each to the least loaded rank; ties go to
    the lowest rank. Every rank computes the same answer from the grids alone, (N, 3) integers: patches along t, h, w.
    Returns the rank that encodes each image, int64 (N,).
    """
    return step_owners([[image_grid_thw]], size)[0][0]


def step_owners(micro_batches: Sequence[Sequence[npt.ArrayLike]], size: int) -> tuple[tuple[IntArray, ...], ...]:
    """Assigns the images of a step to the ``size`` data-parallel ranks of a vision tower.

    As :func:`image_owners`, over all packs of a micro-batch together. A micro-batch continues with the loads of those
    before, so ranks are even over the step if a micro-batch has too few images to be even by itself. Returns for each
    micro-batch and pack the rank that encodes each image, int64 (N,).
    """
    loads = [0] * size
    found = []
    for packs in micro_batches:
        grids = [np.asarray(pack, dtype=np.int64).reshape(-1, 3) for pack in packs]
        t, h, w = np.concatenate([np.zeros((0, 3), np.int64), *grids]).T
        owners = assigned(t * h * w * (BREAK_EVEN_PATCHES + h * w), loads)
        found.append(tuple(np.split(owners, np.cumsum([len(pack) for pack in grids])[:-1])))
    return tuple(found)


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
