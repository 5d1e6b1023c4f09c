"""Triton kernels that multiply by an activated gate (SwiGLU, attention's gate), forward and backward, in one pass each.

megatron-core has torch compile these, which costs seconds at each start. Values are multiplied in float32 and rounded
once, as there. Shapes: rows R, width w.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

#: Values per program.
_TILE = 2048


class Gated(torch.autograd.Function):
    """Maps x (R, w) and gate (R, w) to ``x * sigmoid(gate)``, (R, w). Rows may be apart."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        """Multiplies."""
        x, gate = _with_unit_columns(x), _with_unit_columns(gate)
        out = x.new_empty(x.shape)
        _launch(x, gate, out, (out, out), silu=False, backward=False)
        ctx.save_for_backward(x, gate)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradients of x and gate."""
        x, gate = ctx.saved_tensors
        dx, dgate = x.new_empty(x.shape), gate.new_empty(gate.shape)
        _launch(x, gate, _with_unit_columns(grads[0]), (dx, dgate), silu=False, backward=True)
        return dx, dgate


class SwiGLU(torch.autograd.Function):
    """Maps (R, 2 w), gates before values, to ``silu(gate) * value``, (R, w)."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        """Multiplies."""
        both = _with_unit_columns(both)
        gate, x = both.chunk(2, -1)
        out = x.new_empty(x.shape)
        _launch(x, gate, out, (out, out), silu=True, backward=False)
        ctx.save_for_backward(both)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Returns the gradient of both halves."""
        (both,) = ctx.saved_tensors
        gate, x = both.chunk(2, -1)
        gradient: Tensor = both.new_empty(both.shape)
        dgate, dx = gradient.chunk(2, -1)
        _launch(x, gate, _with_unit_columns(grads[0]), (dx, dgate), silu=True, backward=True)
        return gradient


class SwiGLUActivation(nn.Module):
    """The activation of a megatron-core MLP."""

    def __init__(self, config: Any) -> None:
        super().__init__()

    def forward(self, both: Tensor) -> Tensor:
        """Maps (…, 2 w) to (…, w)."""
        out: Tensor = SwiGLU.apply(both.reshape(-1, both.shape[-1]))
        return out.view(*both.shape[:-1], -1)


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """Multiplies x (…, w) by the sigmoid of a gate of as many values in the same order. The result is like x."""
    width = x.shape[-1]
    out: Tensor = Gated.apply(x.reshape(-1, width), gate.reshape(-1, width)).view(x.shape)
    return out


def _with_unit_columns(x: Tensor) -> Tensor:
    """Rows may be apart, but a row's values must be next to each other."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _launch(x: Tensor, gate: Tensor, out: Tensor, grads: tuple[Tensor, Tensor], *, silu: bool, backward: bool) -> None:
    rows, width = x.shape
    # A power of two that divides the width, or covers it, so that few columns of a tile are empty.
    divisor = min(width & -width, 1024)
    columns = divisor if divisor >= 64 else min(triton.next_power_of_2(width), 1024)
    height = _TILE // columns
    _gate[(triton.cdiv(rows, height), triton.cdiv(width, columns))](
        x, gate, out, *grads, rows, x.stride(0), gate.stride(0), out.stride(0), grads[0].stride(0),
        grads[1].stride(0),
        width=width, height=height, columns=columns, silu=silu, backward=backward, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _gate(  # type: ignore[no-untyped-def]  # Triton compiles it; its arguments are pointers, strides and constants
    x, gate, out, dx, dgate, rows, x_stride, gate_stride, out_stride, dx_stride, dgate_stride,
    width: tl.constexpr, height: tl.constexpr, columns: tl.constexpr, silu: tl.constexpr, backward: tl.constexpr,
):  # fmt: skip
    """Processes a tile. Forward it writes ``out``; backward it reads the gradient from there."""
    row = (tl.program_id(0).to(tl.int64) * height + tl.arange(0, height))[:, None]
    column = (tl.program_id(1) * columns + tl.arange(0, columns))[None, :]
    mask = (row < rows) & (column < width)
    value = tl.load(x + row * x_stride + column, mask=mask).to(tl.float32)
    weight = tl.load(gate + row * gate_stride + column, mask=mask).to(tl.float32)
    open_ = tl.sigmoid(weight)
    if silu:
        active = weight * open_
        slope = open_ * (1 + weight * (1 - open_))
    else:
        active = open_
        slope = open_ * (1 - open_)
    if backward:
        gradient = tl.load(out + row * out_stride + column, mask=mask).to(tl.float32)
        tl.store(dx + row * dx_stride + column, (gradient * active).to(dx.dtype.element_ty), mask=mask)
        tl.store(dgate + row * dgate_stride + column, (gradient * value * slope).to(dgate.dtype.element_ty), mask=mask)
    else:
        tl.store(out + row * out_stride + column, (value * active).to(out.dtype.element_ty), mask=mask)
