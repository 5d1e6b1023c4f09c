"""From a delta net's input projection to the arguments of its delta rule, as one step of autograd.

Forward and backward read and write the projection's columns where they are. torch would copy parts of them and join
their gradients.

Shapes: tokens T, projected width w, channels C, taps K, value heads h, key width k, value width v.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from model.kernels.decay import decays, decays_backward
from model.kernels.delta_net import DeltaNetShape
from model.kernels.short_convolution import BLOCK, Heads, convolve, convolve_backward

__all__ = ["DeltaInputs", "Heads", "run_delta_inputs"]


class DeltaInputs(torch.autograd.Function):
    """Maps the projection to queries, keys, values, gate, decay and step size.

    The projection is (T, w): queries, keys and values (C), gate (h v), beta (h) and alpha (h).
    """

    @staticmethod
    def forward(
        ctx: Any, projected: Tensor, taps: Tensor, a_log: Tensor, dt_bias: Tensor, first: Tensor, heads: Heads
    ) -> tuple[Tensor, ...]:
        """Computes the arguments.

        Args:
            ctx: Of autograd.
            projected: (T, w).
            taps: (C, 1, K), the convolution's weight.
            a_log: (h,).
            dt_bias: (h,).
            first: int32 (T,), the first token of each token's sample.
            heads: Heads on this rank.

        Returns:
            Queries (T, h, k) and keys (T, h, k), of unit length, values (T, h, v), the gate (T, h v), which is a part
            of the projection, the decay's logarithm, float32 (T, h), and beta (T, h).
        """
        taps = taps.contiguous()
        gate, rates = _columns(projected, heads)
        ctx.save_for_backward(projected, taps, a_log, dt_bias, first)
        ctx.heads = heads
        return *convolve(projected, taps, first, heads), gate, *decays(rates, a_log, dt_bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the projection and of the parameters."""
        projected, taps, a_log, dt_bias, first = ctx.saved_tensors
        heads: Heads = ctx.heads
        query, key, value, gate, decay, beta = grads
        tokens, size = projected.shape[0], taps.numel()
        dx = projected.new_empty(projected.shape)
        dgate, drates = _columns(dx, heads)
        # All sums over tokens in one tensor, so that one kernel adds the blocks.
        blocks = projected.new_empty(triton.cdiv(tokens, BLOCK), size + 2 * heads.values, dtype=torch.float32)
        decays_backward(
            _columns(projected, heads)[1], a_log, dt_bias, (decay, beta), drates, blocks[:, size:], block=BLOCK
        )
        convolve_backward(projected, taps, first, heads, (query, key, value), dx, blocks)
        _copy_rows(gate, dgate)
        sums = blocks.sum(0)
        if taps.dtype == a_log.dtype == dt_bias.dtype:  # one conversion in place of three
            sums = sums.to(taps.dtype)
        of_taps, of_rates, of_bias = sums.split([size, heads.values, heads.values])
        return (
            dx,
            of_taps.view(taps.shape).to(taps.dtype),
            of_rates.to(a_log.dtype),
            of_bias.to(dt_bias.dtype),
            None,
            None,
        )


def run_delta_inputs(shape: DeltaNetShape, device: str) -> None:
    """Runs the kernels forward and backward, such as to compile them for a shape.

    Args:
        shape: Of the delta net on a rank.
        device: ``meta`` for tensors without content.
    """
    heads = Heads(shape.key_heads, shape.value_heads, shape.key_width, shape.value_width)

    def empty(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.bfloat16, device=device, requires_grad=True)

    width = heads.channels + heads.values * (heads.value_width + 2)
    out = DeltaInputs.apply(
        empty(shape.tokens, width),
        empty(heads.channels, 1, shape.taps),
        empty(heads.values),
        empty(heads.values),
        torch.zeros(shape.tokens, dtype=torch.int32, device=device),
        heads,
    )
    torch.autograd.backward(out, [torch.ones_like(each) for each in out])


def _copy_rows(source: Tensor, target: Tensor) -> None:
    """Copies, eight bytes at once where possible: torch copies rows that are apart value by value."""
    values = 8 // target.element_size()
    sizes = [n for x in (source, target) for n in (x.shape[1], x.stride(0), x.storage_offset())]
    if source.dtype == target.dtype and source.stride(1) == 1 and not any(n % values for n in sizes):
        source, target = source.view(torch.int64), target.view(torch.int64)
    target.copy_(source)


def _columns(projected: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
    """Returns the gate's columns and those of beta and alpha."""
    gate = heads.values * heads.value_width
    _, gates, rates = projected.split([heads.channels, gate, 2 * heads.values], -1)
    return gates, rates
