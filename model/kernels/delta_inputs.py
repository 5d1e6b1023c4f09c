"""From a delta net's input projection to the arguments of its delta rule, as one step of autograd.

Both passes use the projection's columns where they are. torch would copy parts of them and join their gradients.

Shapes: tokens T, projected width w, channels C, taps K, value heads h, key width k, value width v.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from vlmdata.model.kernels.decay import decays, decays_backward
from vlmdata.model.kernels.short_convolution import BLOCK, DeltaHeads, convolve, convolve_backward


class DeltaInputs(torch.autograd.Function):
    """Maps the projection to queries, keys, values, gate, decay and step size.

    The projection is (T, w): queries, keys and values (C), gate (h v), beta (h) and alpha (h).
    """

    @staticmethod
    def forward(
        ctx: Any, projected: Tensor, taps: Tensor, a_log: Tensor, dt_bias: Tensor, first: Tensor, heads: DeltaHeads
    ) -> tuple[Tensor, ...]:
        """Computes the arguments from the taps (C, 1, K), ``a_log`` and ``dt_bias`` (h,), and ``first``, int32 (T,).

        ``first`` is the first token of each token's sample. Returns queries (T, h, k) and keys (T, h, k), of unit
        length, values (T, h, v), the gate (T, h v), which is a part of the projection, the decay's logarithm, float32
        (T, h), and beta (T, h).
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
        heads: DeltaHeads = ctx.heads
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
        of_decays = of_rates.to(a_log.dtype), of_bias.to(dt_bias.dtype)
        return dx, of_taps.view(taps.shape).to(taps.dtype), *of_decays, None, None


def _copy_rows(source: Tensor, target: Tensor) -> None:
    """Copies, eight bytes at once where possible: torch copies rows that are apart value by value."""
    values = 8 // target.element_size()
    sizes = [n for x in (source, target) for n in (x.shape[1], x.stride(0), x.storage_offset())]
    if source.dtype == target.dtype and source.stride(1) == 1 and not any(n % values for n in sizes):
        source, target = source.view(torch.int64), target.view(torch.int64)
    target.copy_(source)


def _columns(projected: Tensor, heads: DeltaHeads) -> tuple[Tensor, Tensor]:
    """Returns the gate's columns and those of beta and alpha."""
    gate = heads.values * heads.value_width
    _, gates, rates = projected.split([heads.channels, gate, 2 * heads.values], -1)
    return gates, rates
