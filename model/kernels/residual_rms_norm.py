"""Triton kernels for the residual sums and the RMS norms of a decoder layer.

One pass computes ``s = x + y`` and ``normed = RMSNorm(s)``. Backward, one pass combines the gradients of both outputs,
where torch had a norm's kernels and a sum of two gradients (docs/decisions/0067). All is computed in float32. s is
rounded before it is normalised, so that the backward pass can start from what is stored: s, and the inverse root mean
square of each row.

The gradient of the norm's weight is a sum over rows. Each program sums over its own rows, and a second kernel adds up
the programs, always in the same order.

Shapes: rows R (tokens, any number of axes), width c. Parts of the weight's gradient: programs p.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.kernels.residual_norm import Tiling, grid

#: Tilings of rows of 1,024 columns, forward and backward; of wider rows, a tile has fewer. They reach 3.3 to 3.7 TB/s
#: on an H200 (``benchmarks/decoder_norms.py``); others were not timed.
FORWARD, BACKWARD = Tiling(4, 256, 528, 3), Tiling(4, 256, 264, 3)

#: Columns of a program that adds up parts of the weight's gradient, and parts that it adds at once.
_SUMMED_COLUMNS, _SUMMED_PARTS = 16, 128


class SumAndRMSNorm(torch.autograd.Function):
    """Maps x and y (…, c) and weight (c,) to s and normed, both (…, c). Without y, s is x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, weight: Tensor, eps: float, zero_centered: bool
    ) -> tuple[Tensor, Tensor]:
        """Computes s and normed, and saves what the backward pass needs."""
        x = x.contiguous()
        out = x if y is None else torch.empty_like(x)
        normed = torch.empty_like(x)
        width = x.shape[-1]
        rates = x.new_empty(x.numel() // width, dtype=torch.float32)
        programs, tiles, constants = _grid(x, FORWARD)
        _sum_and_rms_norm[(programs,)](
            x,
            x if y is None else y.contiguous(),
            weight,
            out,
            normed,
            rates,
            len(rates),
            tiles,
            eps,
            summed=y is not None,
            zero_centered=zero_centered,
            **constants,
        )
        ctx.save_for_backward(out, rates, weight)
        ctx.zero_centered = zero_centered
        return out, normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of all inputs. Those of x and y are the same tensor, as in torch's sum."""
        out, rates, weight = ctx.saved_tensors
        of_x, of_y, of_weight, *_ = ctx.needs_input_grad
        gradient, dnormed = (each.contiguous() for each in grads)
        d = torch.empty_like(out)
        programs, tiles, constants = _grid(out, BACKWARD)
        parts = rates.new_empty(programs if of_weight else 0, len(weight))
        _sum_and_rms_norm_backward[(programs,)](
            gradient,
            out,
            rates,
            weight,
            dnormed,
            d,
            parts,
            len(rates),
            tiles,
            of_weight=of_weight,
            zero_centered=ctx.zero_centered,
            **constants,
        )
        dweight = _total(parts, weight) if of_weight else None
        return d if of_x else None, d if of_y else None, dweight, None, None


def sum_and_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """Adds a layer's output to the residual stream and normalises the sum.

    Args:
        x: (…, c).
        y: (…, c), the product of a layer.
        weight: (c,), the norm's weight.
        eps: Added to the mean square.
        zero_centered: Whether the scale is 1 + weight, instead of the weight itself.

    Returns:
        ``x + y`` and its RMS norm, (…, c), in the dtype of x.
    """
    both: tuple[Tensor, Tensor] = SumAndRMSNorm.apply(x, y, weight, eps, zero_centered)
    return both


def keep_and_rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """Returns x (…, c) and its RMS norm. The gradients of both are added in the norm's backward pass."""
    both: tuple[Tensor, Tensor] = SumAndRMSNorm.apply(x, None, weight, eps, zero_centered)
    return both


def run_residual_rms_norm(width: int, zero_centered: bool, device: str) -> None:
    """Runs all kernels forward and backward on one row, for example to compile them for a width.

    Args:
        width: Width of the decoder.
        zero_centered: Whether scales are 1 + weight.
        device: ``meta`` for tensors without content.
    """
    x, y, weight = (
        torch.empty(shape, dtype=torch.bfloat16, device=device, requires_grad=True)
        for shape in ((1, width), (1, width), (width,))
    )
    norm = weight, 1e-6, zero_centered
    made = [*keep_and_rms_norm(x, *norm), *sum_and_rms_norm(x, y, *norm)]
    torch.autograd.backward(made, [torch.ones_like(each) for each in made])


def _grid(x: Tensor, tiling: Tiling) -> tuple[int, int, dict[str, int]]:
    """As :func:`model.kernels.residual_norm.grid`, with a tile of as many values in rows of any width."""
    width = x.shape[-1]
    height = max(1, tiling.height * 1024 // max(1024, triton.next_power_of_2(width)))
    return grid(x.view(x.numel() // width, width), tiling._replace(height=height))


def _total(parts: Tensor, weight: Tensor) -> Tensor:
    """Adds up float32 (p, c) over programs: (c,), in the dtype of the weight."""
    total = torch.empty_like(weight)
    programs, width = parts.shape
    _sum_of_parts[(triton.cdiv(width, _SUMMED_COLUMNS),)](
        parts, total, programs, width, columns=_SUMMED_COLUMNS, height=_SUMMED_PARTS
    )
    return total


@triton.jit(do_not_specialize=["rows", "tiles"])  # type: ignore[untyped-decorator]
def _sum_and_rms_norm(  # type: ignore[no-untyped-def]  # Triton compiles it; its arguments are pointers and numbers
    x,
    y,
    weight,
    out,
    normed,
    rates,
    rows,
    tiles,
    eps,
    width: tl.constexpr,
    columns: tl.constexpr,
    height: tl.constexpr,
    stages: tl.constexpr,
    summed: tl.constexpr,
    zero_centered: tl.constexpr,
):
    """Processes some tiles of whole rows."""
    column = tl.arange(0, columns)
    within = column < width
    scale = tl.load(weight + column, mask=within, other=0).to(tl.float32)[None, :]
    if zero_centered:
        scale += 1
    for tile in tl.range(tiles, num_stages=stages):
        row = (tl.program_id(0).to(tl.int64) + tile * tl.num_programs(0)) * height + tl.arange(0, height)
        mask = (row < rows)[:, None] & within[None, :]
        here = row[:, None] * width + column[None, :]
        value = tl.load(x + here, mask=mask, other=0).to(tl.float32)
        if summed:
            value += tl.load(y + here, mask=mask, other=0).to(tl.float32)
            rounded = value.to(out.dtype.element_ty)
            tl.store(out + here, rounded, mask=mask)
            value = rounded.to(tl.float32)
        rate = 1 / tl.sqrt(tl.sum(value * value, 1) / width + eps)
        tl.store(normed + here, (value * rate[:, None] * scale).to(normed.dtype.element_ty), mask=mask)
        tl.store(rates + row, rate, mask=row < rows)


@triton.jit(do_not_specialize=["rows", "tiles"])  # type: ignore[untyped-decorator]
def _sum_and_rms_norm_backward(  # type: ignore[no-untyped-def]
    gradient,
    out,
    rates,
    weight,
    dnormed,
    d,
    parts,
    rows,
    tiles,
    width: tl.constexpr,
    columns: tl.constexpr,
    height: tl.constexpr,
    stages: tl.constexpr,
    of_weight: tl.constexpr,
    zero_centered: tl.constexpr,
):
    """Processes some tiles of whole rows."""
    column = tl.arange(0, columns)
    within = column < width
    dweight = tl.zeros((columns,), tl.float32)
    scale = tl.load(weight + column, mask=within, other=0).to(tl.float32)[None, :]
    if zero_centered:
        scale += 1
    for tile in tl.range(tiles, num_stages=stages):
        row = (tl.program_id(0).to(tl.int64) + tile * tl.num_programs(0)) * height + tl.arange(0, height)
        mask = (row < rows)[:, None] & within[None, :]
        here = row[:, None] * width + column[None, :]
        total = tl.load(gradient + here, mask=mask, other=0).to(tl.float32)
        pull = tl.load(dnormed + here, mask=mask, other=0).to(tl.float32)
        rate = tl.load(rates + row, mask=row < rows, other=0)[:, None]
        unit = tl.load(out + here, mask=mask, other=0).to(tl.float32) * rate
        if of_weight:
            dweight += tl.sum(pull * unit, 0)
        pull *= scale
        along = tl.sum(pull * unit, 1)[:, None] / width
        total += rate * (pull - unit * along)
        tl.store(d + here, total.to(d.dtype.element_ty), mask=mask)
    if of_weight:
        tl.store(parts + tl.program_id(0).to(tl.int64) * width + column, dweight, mask=within)


@triton.jit(do_not_specialize=["programs"])  # type: ignore[untyped-decorator]
def _sum_of_parts(  # type: ignore[no-untyped-def]
    parts, total, programs, width: tl.constexpr, columns: tl.constexpr, height: tl.constexpr
):
    """Adds up some columns of (programs, width)."""
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    within = column < width
    added = tl.zeros((height, columns), tl.float32)
    for first in range(0, programs, height):
        row = first + tl.arange(0, height)
        mask = (row < programs)[:, None] & within[None, :]
        added += tl.load(parts + row[:, None] * width + column[None, :], mask=mask, other=0)
    tl.store(total + column, tl.sum(added, 0).to(total.dtype.element_ty), mask=within)
