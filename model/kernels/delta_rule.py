"""flash-linear-attention's gated delta rule, without what its function asks of the GPU and of the host.

``chunk_gated_delta_rule`` copies the boundaries of samples from the GPU to count chunks, for which the host waits until
the GPU has done all that is queued, and goes through several decorators in each layer. The trainer knows the boundaries
on the host. This calls the same kernels, with chunks counted there (:attr:`PackParams.delta_chunks`).

Shapes: tokens T, value heads h, key width k, value width v, chunks m of 64 tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd
from torch import Tensor


class DeltaRule(torch.autograd.Function):
    """Maps queries (T, h, k) and keys (T, h, k) of unit length and values (T, h, v) to (T, h, v)."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, bounds: Tensor, chunks: Tensor
    ) -> Tensor:
        """Computes the rule; see ``gated_delta_rule`` of :mod:`model.families.qwen3_5.delta_rule`.

        Args:
            ctx: Of autograd.
            query: (T, h, k), contiguous as all that follow.
            key: (T, h, k).
            value: (T, h, v).
            decay: float32 (T, h), the decay's logarithm.
            beta: (T, h).
            bounds: int32 (samples + 1,), boundaries of samples.
            chunks: int32 (m, 2), the sample of each chunk and its number in it.

        Returns:
            (T, h, v).
        """
        total, out, system, *_ = chunk_gated_delta_rule_fwd(
            q=query[None],
            k=key[None],
            v=value[None],
            g=decay[None],
            beta=beta[None],
            scale=key.shape[-1] ** -0.5,
            initial_state=None,
            output_final_state=False,
            cu_seqlens=bounds,
            chunk_indices=chunks,
        )
        ctx.save_for_backward(query, key, value, total, beta, system, bounds, chunks)
        result: Tensor = out[0].to(query.dtype)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients."""
        query, key, value, total, beta, system, bounds, chunks = ctx.saved_tensors
        found = chunk_gated_delta_rule_bwd(
            q=query[None],
            k=key[None],
            v=value[None],
            g=total,
            beta=beta[None],
            A=system,
            scale=key.shape[-1] ** -0.5,
            initial_state=None,
            do=grads[0].contiguous()[None],
            dht=None,
            cu_seqlens=bounds,
            chunk_indices=chunks,
        )
        dquery, dkey, dvalue, dbeta, ddecay, _ = found
        of = (dquery, query), (dkey, key), (dvalue, value), (ddecay, total), (dbeta, beta)
        return *(gradient[0].to(tensor.dtype) for gradient, tensor in of), None, None
