"""A Triton kernel pair for the norm and the gate at the end of a delta net: ``Qwen3_5RMSNormGated`` of transformers.

``out = x / rms(x) * weight * silu(gate)`` over each head, with half the memory traffic of Transformer Engine's norm and
a gate. All is computed in float32 and rounded once. Nothing is saved but the inputs.

Shapes: tokens T, heads h, width w of a head, rows R = T h.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

#: The widest head, for which a program keeps ``_HEIGHT`` rows in registers.
WIDEST = 256
#: Rows of a tile, and tiles of a program. Each program of the backward pass has its own part of the weight's gradient.
_HEIGHT, _TILES = 16, 8


class GatedNorm(torch.autograd.Function):
    """Maps x (T, h, w), gate (T, h w) and weight (w,) to (T, h w). Rows of the gate may be apart."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalises and multiplies."""
        x = x.contiguous()
        gate = gate if gate.stride(-1) == 1 else gate.contiguous()
        out = x.new_empty(gate.shape)
        _launch(x, gate, weight, out, (out, out, out), eps, backward=False)
        ctx.save_for_backward(x, gate, weight)
        ctx.eps = eps
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Returns the gradients of x, gate and weight."""
        x, gate, weight = ctx.saved_tensors
        dx, dgate = torch.empty_like(x), gate.new_empty(gate.shape)
        rows, width = x.numel() // x.shape[-1], x.shape[-1]
        parts = x.new_empty((triton.cdiv(rows, _HEIGHT * _TILES), width), dtype=torch.float32)
        _launch(x, gate, weight, grads[0].contiguous(), (dx, dgate, parts), ctx.eps, backward=True)
        return dx, dgate, parts.sum(0).to(weight.dtype), None


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalises each head of x (…, h, w), scales it by the weight (w,), and multiplies it by SiLU of the gate.

    w is at most :data:`WIDEST`. The gate, (…, h, w) or (…, h w), has as many values in the same order; its tokens may
    be apart. Returns (…, h w), in the dtype of x.
    """
    heads, width = x.shape[-2:]
    assert width <= WIDEST
    before = x.shape[:-2]
    flat: Tensor = GatedNorm.apply(x.reshape(-1, heads, width), gate.reshape(-1, heads * width), weight, eps)
    return flat.view(*before, heads * width)


def _launch(
    x: Tensor, gate: Tensor, weight: Tensor, out: Tensor, grads: tuple[Tensor, ...], eps: float, *, backward: bool
) -> None:
    _, heads, width = x.shape
    rows = x.numel() // width
    _norm_and_gate[(triton.cdiv(rows, _HEIGHT * _TILES),)](
        x, gate, weight, out, *grads, rows, gate.stride(0), eps,
        heads=heads, width=width, columns=triton.next_power_of_2(width), height=_HEIGHT, tiles=_TILES,
        backward=backward, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _norm_and_gate(  # type: ignore[no-untyped-def]  # Triton compiles it; its arguments are pointers and numbers
    x, gate, weight, out, dx, dgate, parts, rows, gate_stride, eps,
    heads: tl.constexpr, width: tl.constexpr, columns: tl.constexpr, height: tl.constexpr, tiles: tl.constexpr,
    backward: tl.constexpr,
):  # fmt: skip
    """Processes some tiles of rows. Forward it writes ``out``; backward it reads the gradient from there."""
    column = tl.arange(0, columns)
    within = column < width
    scale = tl.load(weight + column, mask=within, other=0).to(tl.float32)[None, :]
    of_weight = tl.zeros((columns,), tl.float32)
    for tile in range(tiles):
        row = (tl.program_id(0).to(tl.int64) * tiles + tile) * height + tl.arange(0, height)
        mask = (row < rows)[:, None] & within[None, :]
        here = row[:, None] * width + column[None, :]
        there = (row // heads)[:, None] * gate_stride + (row % heads)[:, None] * width + column[None, :]
        value = tl.load(x + here, mask=mask, other=0).to(tl.float32)
        opening = tl.load(gate + there, mask=mask, other=0).to(tl.float32)
        rate = 1 / tl.sqrt(tl.sum(value * value, 1) / width + eps)[:, None]
        unit = value * rate
        open_ = tl.sigmoid(opening)
        if backward:
            gradient = tl.load(out + here, mask=mask, other=0).to(tl.float32)
            slope = open_ * (1 + opening * (1 - open_))
            tl.store(dgate + here, (gradient * unit * scale * slope).to(dgate.dtype.element_ty), mask=mask)
            of_norm = gradient * opening * open_
            of_weight += tl.sum(of_norm * unit, 0)
            of_unit = of_norm * scale
            along = tl.sum(of_unit * unit, 1)[:, None] / width
            tl.store(dx + here, (rate * (of_unit - unit * along)).to(dx.dtype.element_ty), mask=mask)
        else:
            tl.store(out + here, (unit * scale * opening * open_).to(out.dtype.element_ty), mask=mask)
    if backward:
        tl.store(parts + tl.program_id(0) * width + column, of_weight, mask=within)
