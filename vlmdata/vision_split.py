"""Assigns the images of a pack to the context-parallel ranks that encode them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

#: Number of patches at which attention over an image costs as much as the linear layers: 6 x hidden of the encoder
#: (per patch and layer 24 * hidden^2 FLOP linear, 4 * patches * hidden attention), with hidden 1,152 as in 9b and up.
BREAK_EVEN_PATCHES = 6 * 1152


def image_owners(image_grid_thw: npt.ArrayLike, size: int) -> npt.NDArray[np.int64]:
    """Assigns the images of a pack to ranks so that the encoding work is even.

    Longest processing time first (Graham 1969): images by decreasing cost, each to the least loaded rank; ties go
    to the lowest rank. Every rank computes the same answer from the grids alone.

    Args:
        image_grid_thw: (N, 3) integers, patches along t, h, w.
        size: Number of ranks, at least 1.

    Returns:
        int64 (N,): the rank that encodes each image.
    """
    grids = np.asarray(image_grid_thw, dtype=np.int64).reshape(-1, 3)
    span = grids[:, 1] * grids[:, 2]
    cost = grids[:, 0] * span * (BREAK_EVEN_PATCHES + span)
    owners = np.zeros(len(grids), dtype=np.int64)
    loads = [0] * size
    for image in np.argsort(-cost, kind="stable").tolist():
        owners[image] = min(range(size), key=lambda rank: (loads[rank], rank))
        loads[owners[image]] += int(cost[image])
    return owners
