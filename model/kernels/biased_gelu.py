"""Triton kernels for the GELU of the vision tower's feed-forward part, with the bias of the layer before it.

Forward, one pass computes ``gelu(product + bias)``. Backward, one pass computes the gradient of the product and its sum
over rows, the gradient of the bias. Otherwise, cuBLASLt sums the rows in a kernel of its own before the layer's
products, which reads the gradient once more (docs/decisions/0067). All is computed in float32 and rounded once.

With ``z = sqrt(8 / pi) (x + 0.044715 x^3)``, the approximation of GELU by tanh is ``x sigmoid(z)``, because
``(1 + tanh(z / 2)) / 2 = sigmoid(z)``. Its derivative is ``s (1 + x z' (1 - s))`` with ``s = sigmoid(z)``.

Shapes: rows R, width w.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class GeluTiling(NamedTuple):
    """How a matrix is divided among programs."""

    height: int  # rows of a tile
    columns: int  # columns of a tile: 256 are 16 bytes of bfloat16 for each thread of a warp
    warps: int  # warps of a program
    #: Maximum number of programs, except that each block of columns has one. A program has a block of columns and
    #: takes tiles of rows in turn.
    programs: int
    stages: int = 1  # number of tiles in work at once. All but one of them are being copied to shared memory.


#: Tilings forward and backward: the fastest of 20 on an H200 (``benchmarks/tower_biases.py --tilings``, 55,500 patches
#: of 4,096). Backward, each program writes a row of 4 bytes per column.
FORWARD, BACKWARD = GeluTiling(8, 512, 8, 528, 1), GeluTiling(16, 256, 4, 1056, 2)

#: ``z`` and its derivative as polynomials of x, and -z in powers of 2.
_LINEAR = tl.constexpr(math.sqrt(8 / math.pi))
_CUBIC = tl.constexpr(0.044715 * math.sqrt(8 / math.pi))
_BINARY = tl.constexpr(-math.log2(math.e))


class GeluWithBias(torch.autograd.Function):
    """Maps a product (R, w) and a bias (w,) to the GELU of their sum, (R, w)."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, bias: Tensor) -> Tensor:
        """Computes the GELU, and saves the product and the bias."""
        product = product.contiguous()
        out = torch.empty_like(product)
        grid, tiles, constants = _grid(product, FORWARD)
        _gelu_with_bias[grid](product, bias, out, len(product), tiles, **constants)
        ctx.save_for_backward(product, bias)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the gradients of the product and the bias."""
        product, bias = ctx.saved_tensors
        _, of_bias = ctx.needs_input_grad
        gradient = grads[0].contiguous()
        d = torch.empty_like(product)
        grid, tiles, constants = _grid(product, BACKWARD)
        parts = product.new_empty((grid[1] if of_bias else 0, len(bias)), dtype=torch.float32)
        _gelu_with_bias_backward[grid](
            gradient, product, bias, d, parts, len(product), tiles, of_bias=of_bias, **constants
        )
        return d, parts.sum(0).to(bias.dtype) if of_bias else None


def gelu_with_bias(product: Tensor, bias: Tensor) -> Tensor:
    """Returns ``gelu(product + bias)``, approximated by tanh, for (R, w) and (w,), in the dtype of the product."""
    out: Tensor = GeluWithBias.apply(product, bias)
    return out


def _grid(x: Tensor, tiling: GeluTiling) -> tuple[tuple[int, int], int, dict[str, int]]:
    """Returns programs across and down, tiles per program, and constants."""
    rows, width = x.shape
    across, tiles = triton.cdiv(width, tiling.columns), triton.cdiv(rows, tiling.height)
    down = min(tiles, max(1, tiling.programs // across))
    constants = {"width": width, "height": tiling.height, "columns": tiling.columns, "stages": tiling.stages}
    return (across, down), triton.cdiv(tiles, max(1, down)), constants | {"num_warps": tiling.warps}


@triton.jit
def _sigmoid(x, square):  # type: ignore[no-untyped-def]  # Triton compiles it
    """Sigmoid of z and exp(-z). The square of a root is two instructions, where a division is eight."""
    decay = tl.exp2(x * (_BINARY * _LINEAR + _BINARY * _CUBIC * square))
    root = tl.rsqrt(1 + decay)
    return root * root, decay


@triton.jit(do_not_specialize=["rows", "tiles"])  # type: ignore[untyped-decorator]
def _gelu_with_bias(  # type: ignore[no-untyped-def]  # Triton compiles it; its arguments are pointers and numbers
    product, bias, out, rows, tiles,
    width: tl.constexpr, height: tl.constexpr, columns: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """Processes some tiles of a block of columns."""
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    within = column < width
    added = tl.load(bias + column, mask=within, other=0).to(tl.float32)[None, :]
    for tile in tl.range(tiles, num_stages=stages):
        row = (tl.program_id(1).to(tl.int64) + tile * tl.num_programs(1)) * height + tl.arange(0, height)
        mask = (row < rows)[:, None] & within[None, :]
        here = row[:, None] * width + column[None, :]
        x = tl.load(product + here, mask=mask, other=0).to(tl.float32) + added
        sigmoid, _ = _sigmoid(x, x * x)
        tl.store(out + here, (x * sigmoid).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "tiles"])  # type: ignore[untyped-decorator]
def _gelu_with_bias_backward(  # type: ignore[no-untyped-def]
    gradient, product, bias, d, parts, rows, tiles,
    width: tl.constexpr, height: tl.constexpr, columns: tl.constexpr, stages: tl.constexpr, of_bias: tl.constexpr,
):  # fmt: skip
    """Processes some tiles of a block of columns. Each thread sums what it has, and threads add up at the end."""
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    within = column < width
    added = tl.load(bias + column, mask=within, other=0).to(tl.float32)[None, :]
    dbias = tl.zeros((height, columns), tl.float32)
    for tile in tl.range(tiles, num_stages=stages):
        row = (tl.program_id(1).to(tl.int64) + tile * tl.num_programs(1)) * height + tl.arange(0, height)
        mask = (row < rows)[:, None] & within[None, :]
        here = row[:, None] * width + column[None, :]
        pull = tl.load(gradient + here, mask=mask, other=0).to(tl.float32)
        x = tl.load(product + here, mask=mask, other=0).to(tl.float32) + added
        square = x * x
        sigmoid, decay = _sigmoid(x, square)
        slope = x * (_LINEAR + 3 * _CUBIC * square)
        # 1 - sigmoid, of which a subtraction would leave few digits. Where sigmoid is 0, decay is infinite.
        rest = sigmoid * tl.minimum(decay, 1e38)
        pull *= sigmoid + sigmoid * slope * rest
        tl.store(d + here, pull.to(d.dtype.element_ty), mask=mask)
        if of_bias:
            dbias += pull
    if of_bias:
        tl.store(parts + tl.program_id(1).to(tl.int64) * width + column, tl.sum(dbias, 0), mask=within)
