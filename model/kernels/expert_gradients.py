"""A Triton kernel for the gradients of all experts' weights of a layer, added to the float32 gradient buffers.

Transformer Engine multiplies expert by expert. torch's grouped product writes the gradients in bfloat16, so they must
be added afterwards. This kernel adds the products in float32 to each gradient in place (docs/decisions/0117).

Shapes: rows R (a token for each expert that it is sent to), experts E, input width k, output width n.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class ProductTiling(NamedTuple):
    """How the gradients are divided among programs."""

    height: int  # rows of a weight in a tile
    width: int  # columns of a weight in a tile
    rows: int  # rows of the inputs that are multiplied at a time
    warps: int  # warps per program
    stages: int  # blocks of rows in flight at once


#: The fastest of ``benchmarks/expert_gradients.py`` on an H200.
TILING = ProductTiling(128, 64, 64, 4, 4)


def add_weight_gradients(x: Tensor, d: Tensor, ends: Tensor, places: Tensor, tiling: ProductTiling = TILING) -> None:
    """Computes ``d.T @ x`` of each expert's rows, and adds it to the expert's gradient.

    Args:
        x: The layer's input, (R, k), contiguous; the first expert's rows first.
        d: The gradient of its output, (R, n), contiguous.
        ends: The number of rows up to and including each expert's, int32 (E,).
        places: Addresses of the gradients, int64 (E,): each is float32 (n, k), contiguous.
        tiling: How the work is divided; see the class.
    """
    n, k = d.shape[1], x.shape[1]
    across, down = triton.cdiv(k, tiling.width), triton.cdiv(n, tiling.height)
    with torch.cuda.device_of(x):
        _add_products[(across * down, len(ends))](
            x, d, ends, places, k=k, n=n,
            height=tiling.height, width=tiling.width, block=tiling.rows,
            num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _add_products(  # type: ignore[no-untyped-def]  # Triton compiles it; its arguments are pointers and numbers
    x, d, ends, places, k: tl.constexpr, n: tl.constexpr,
    height: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Adds to one tile of an expert's gradient. Programs of an expert are neighbours, so they share cached reads."""
    expert, tile = tl.program_id(1), tl.program_id(0)
    across: tl.constexpr = (k + width - 1) // width
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    last = tl.load(ends + expert)
    if first == last:
        return
    down_here = (tile // across) * height + tl.arange(0, height)
    across_here = (tile % across) * width + tl.arange(0, width)
    below, beside = down_here < n, across_here < k
    sums = tl.zeros((height, width), tl.float32)
    for start in range(first, last, block):
        row = start + tl.arange(0, block)
        within = (row < last)[:, None]
        row = row.to(tl.int64)[:, None]
        pull = tl.load(d + row * n + down_here[None, :], mask=within & below[None, :], other=0)
        given = tl.load(x + row * k + across_here[None, :], mask=within & beside[None, :], other=0)
        sums = tl.dot(tl.trans(pull), given, sums)
    place = tl.load(places + expert).to(tl.pointer_type(tl.float32))
    place += down_here.to(tl.int64)[:, None] * k + across_here[None, :]
    mask = below[:, None] & beside[None, :]
    tl.store(place, sums + tl.load(place, mask=mask, other=0), mask=mask)
