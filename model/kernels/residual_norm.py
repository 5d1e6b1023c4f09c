"""Triton kernels for the residual sums and the layer norms of the vision tower's blocks.

One pass computes ``s = x + y + bias`` and ``normed = LayerNorm(s)``. Backward, one pass combines the gradients of both
outputs (docs/decisions/0067). All is computed in float32. s is rounded before it is normalised, so that the backward
pass can start from what is stored: s, and the mean and inverse deviation of each row. Gradients of parameters are sums
over each program's rows, which torch adds up.

Shapes: rows R, width c. Parts of parameters' gradients: programs p.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tiling(NamedTuple):
    """How rows are divided among programs."""

    height: int  # rows of a tile
    per_warp: int  # columns of a warp: 256 are 16 bytes of bfloat16 per thread
    programs: int  # maximum number of programs, which take tiles in turn
    stages: int = 1  # number of tiles in work at once. All but one of them are being copied to shared memory.


#: Tilings forward, backward, and backward without a norm: the fastest of 42 on an H200 (``benchmarks/tower_kernels.py
#: --tilings``, 55,500 patches of 768). Backward, each program writes a row of 4 c bytes per parameter.
FORWARD, BACKWARD, OF_BIAS = Tiling(2, 256, 528, 3), Tiling(4, 256, 264, 3), Tiling(4, 256, 396, 3)


#: Largest tile, in bytes, with several in work at once. GPUs before Hopper can hold them.
_LARGEST_STAGED = 16384


class SumAndNorm(torch.autograd.Function):
    """Maps x, y (R, c), bias, weight and shift (c,) to s and normed, both (R, c). Without y and bias, s is x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, bias: Tensor | None, weight: Tensor, shift: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Computes s and normed, and saves what the backward pass needs."""
        x = x.contiguous()
        out = x if y is None else torch.empty_like(x)
        normed = torch.empty_like(x)
        moments = x.new_empty((2, len(x)), dtype=torch.float32)
        _forward(x, y, bias, (weight, shift), out, normed, moments, eps)
        ctx.save_for_backward(out, moments, weight)
        return out, normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of all inputs. Those of x and y are the same tensor, as in torch's sum."""
        out, moments, weight = ctx.saved_tensors
        of_x, of_y, of_bias, of_weight, of_shift, _ = ctx.needs_input_grad
        gradient, dnormed = (each.contiguous() for each in grads)
        d = torch.empty_like(out)
        norm = (out, moments, weight, dnormed, d)
        dweight, dshift, *dbias = _backward(gradient, norm, of_bias, of_weight or of_shift).to(weight.dtype)
        return (
            d if of_x else None,
            d if of_y else None,
            dbias[0] if of_bias else None,
            dweight if of_weight else None,
            dshift if of_shift else None,
            None,
        )


class SumWithBias(torch.autograd.Function):
    """Maps x, y (R, c) and bias (c,) to their sum, (R, c)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
        """Computes the sum."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        _forward(x.contiguous(), y, bias, None, out, out, out, 0.0)
        ctx.dtype = bias.dtype
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of all inputs. That of x and of y is the output's gradient itself."""
        of_x, of_y, of_bias = ctx.needs_input_grad
        (d,) = grads
        dbias = _backward(d.contiguous(), None, True, False)[0].to(ctx.dtype) if of_bias else None
        return d if of_x else None, d if of_y else None, dbias


def sum_and_norm(
    x: Tensor, y: Tensor, bias: Tensor, weight: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns ``x + y + bias`` and its layer norm, both (R, c), in the dtype of x.

    x is the residual stream (R, c), y (R, c) and bias (c,) are a layer's product and bias, weight and shift (c,) are
    the norm's, and eps is added to its variance.
    """
    both: tuple[Tensor, Tensor] = SumAndNorm.apply(x, y, bias, weight, shift, eps)
    return both


def keep_and_norm(x: Tensor, weight: Tensor, shift: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns x (R, c) and its layer norm. The gradients of both are added in the norm's backward pass."""
    both: tuple[Tensor, Tensor] = SumAndNorm.apply(x, None, None, weight, shift, eps)
    return both


def sum_with_bias(x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    """Returns ``x + y + bias`` of (R, c), (R, c) and (c,), rounded once, in the dtype of x."""
    out: Tensor = SumWithBias.apply(x, y, bias)
    return out


def grid(x: Tensor, tiling: Tiling) -> tuple[int, int, dict[str, int]]:
    """Returns the number of programs for (R, c), the tiles of each program, and the constants of a launch."""
    rows, width = x.shape
    columns, tiles = triton.next_power_of_2(width), triton.cdiv(rows, tiling.height)
    programs = min(tiles, tiling.programs)
    staged = tiling.height * columns * x.element_size() <= _LARGEST_STAGED
    constants = {"width": width, "columns": columns, "height": tiling.height, "stages": tiling.stages if staged else 1}
    constants |= {"num_warps": min(16, max(1, columns // tiling.per_warp))}
    return programs, triton.cdiv(tiles, max(1, programs)), constants


def _forward(
    x: Tensor,
    y: Tensor | None,
    bias: Tensor | None,
    norm: tuple[Tensor, Tensor] | None,
    out: Tensor,
    normed: Tensor,
    moments: Tensor,
    eps: float,
) -> None:
    programs, tiles, constants = grid(x, FORWARD)
    _sum_and_norm[(programs,)](
        x, x if y is None else y.contiguous(), x if bias is None else bias, *((x, x) if norm is None else norm),
        out, normed, moments, len(x), tiles, eps,
        summed=y is not None, normalised=norm is not None, **constants,
    )  # fmt: skip


def _backward(gradient: Tensor, norm: tuple[Tensor, ...] | None, of_bias: bool, of_norm: bool) -> Tensor:
    """Writes d, the last of ``norm``. Returns float32 (n, c): gradients of weight and shift with a norm, then of bias.

    Those of the norm have no meaning if they are not wanted.
    """
    rows, width = gradient.shape
    programs, tiles, constants = grid(gradient, OF_BIAS if norm is None else BACKWARD)
    kinds = of_bias + (0 if norm is None else 2)
    parts = gradient.new_empty((kinds, programs if of_bias or of_norm else 0, width), dtype=torch.float32)
    _sum_and_norm_backward[(programs,)](
        gradient, *(norm or [gradient] * 5), parts, rows, tiles,
        of_bias=of_bias, of_norm=of_norm, normalised=norm is not None, **constants,
    )  # fmt: skip
    return parts.sum(1)


@triton.jit(do_not_specialize=["rows", "tiles"])  # type: ignore[untyped-decorator]
def _sum_and_norm(  # type: ignore[no-untyped-def]  # Triton compiles it; its arguments are pointers and numbers
    x, y, bias, weight, shift, out, normed, moments, rows, tiles, eps,
    width: tl.constexpr, columns: tl.constexpr, height: tl.constexpr, stages: tl.constexpr, summed: tl.constexpr,
    normalised: tl.constexpr,
):  # fmt: skip
    """Processes some tiles of whole rows."""
    column = tl.arange(0, columns)
    within = column < width
    if summed:
        added = tl.load(bias + column, mask=within, other=0).to(tl.float32)[None, :]
    if normalised:
        scale = tl.load(weight + column, mask=within, other=0).to(tl.float32)[None, :]
        offset = tl.load(shift + column, mask=within, other=0).to(tl.float32)[None, :]
    for tile in tl.range(tiles, num_stages=stages):
        row = (tl.program_id(0).to(tl.int64) + tile * tl.num_programs(0)) * height + tl.arange(0, height)
        mask = (row < rows)[:, None] & within[None, :]
        here = row[:, None] * width + column[None, :]
        value = tl.load(x + here, mask=mask, other=0).to(tl.float32)
        if summed:
            value += tl.load(y + here, mask=mask, other=0).to(tl.float32) + added
            rounded = value.to(out.dtype.element_ty)
            tl.store(out + here, rounded, mask=mask)
            value = rounded.to(tl.float32)
        if normalised:
            mean = tl.sum(value, 1) / width
            apart = tl.where(mask, value - mean[:, None], 0)
            rate = 1 / tl.sqrt(tl.sum(apart * apart, 1) / width + eps)
            tl.store(normed + here, (apart * rate[:, None] * scale + offset).to(normed.dtype.element_ty), mask=mask)
            tl.store(moments + row, mean, mask=row < rows)
            tl.store(moments + rows + row, rate, mask=row < rows)


@triton.jit(do_not_specialize=["rows", "tiles"])  # type: ignore[untyped-decorator]
def _sum_and_norm_backward(  # type: ignore[no-untyped-def]
    gradient, out, moments, weight, dnormed, d, parts, rows, tiles,
    width: tl.constexpr, columns: tl.constexpr, height: tl.constexpr, stages: tl.constexpr, of_bias: tl.constexpr,
    of_norm: tl.constexpr, normalised: tl.constexpr,
):  # fmt: skip
    """Processes some tiles of whole rows. What lies beyond the width is not zero, and not stored."""
    column = tl.arange(0, columns)
    within = column < width
    dbias = tl.zeros((columns,), tl.float32)
    dweight = tl.zeros((columns,), tl.float32)
    dshift = tl.zeros((columns,), tl.float32)
    if normalised:
        scale = tl.load(weight + column, mask=within, other=0).to(tl.float32)[None, :]
    for tile in tl.range(tiles, num_stages=stages):
        row = (tl.program_id(0).to(tl.int64) + tile * tl.num_programs(0)) * height + tl.arange(0, height)
        mask = (row < rows)[:, None] & within[None, :]
        here = row[:, None] * width + column[None, :]
        total = tl.load(gradient + here, mask=mask, other=0).to(tl.float32)
        if normalised:
            pull = tl.load(dnormed + here, mask=mask, other=0).to(tl.float32)
            value = tl.load(out + here, mask=mask, other=0).to(tl.float32)
            mean = tl.load(moments + row, mask=row < rows, other=0)[:, None]
            rate = tl.load(moments + rows + row, mask=row < rows, other=0)[:, None]
            unit = (value - mean) * rate
            if of_norm:
                dweight += tl.sum(pull * unit, 0)
                dshift += tl.sum(pull, 0)
            pull *= scale
            level = tl.sum(pull, 1)[:, None] / width
            along = tl.sum(pull * unit, 1)[:, None] / width
            total += rate * (pull - level - unit * along)
            tl.store(d + here, total.to(d.dtype.element_ty), mask=mask)
        if of_bias:
            dbias += tl.sum(total, 0)
    part = parts + tl.program_id(0).to(tl.int64) * width + column
    kind = tl.num_programs(0) * width
    if of_norm:
        tl.store(part, dweight, mask=within)
        tl.store(part + kind, dshift, mask=within)
    if of_bias:
        tl.store(part + (2 * kind if normalised else 0), dbias, mask=within)
