"""The gated delta rule with flash-linear-attention's kernels, but fewer waits and launches than its own function has.

That copies the boundaries of samples from the GPU to count chunks, for which the host waits. Here chunks are counted on
the host (:attr:`PackParams.delta_chunks`), and the same kernels called in the same order
(``fla/ops/gated_delta_rule/chunk.py``, version 0.4.2).

Shapes: tokens T, value heads h, key width k, value width v, chunks m of 64 tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu, chunk_gated_delta_rule_fwd_h
from fla.ops.common.chunk_o import chunk_bwd_dqkwg, chunk_bwd_dv_local, chunk_fwd_o
from fla.ops.common.chunk_scaled_dot_kkt import chunk_scaled_dot_kkt_fwd
from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd, recompute_w_u_fwd
from fla.ops.utils import chunk_local_cumsum, solve_tril
from torch import Tensor

_CHUNK = 64


class DeltaRule(torch.autograd.Function):
    """Maps queries (T, h, k) and keys (T, h, k) of unit length and values (T, h, v) to (T, h, v)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        bounds: Tensor,
        chunks: Tensor,
        keep: bool = False,
    ) -> Tensor:
        """Computes the rule; see ``gated_delta_rule`` of :mod:`vlmdata.model.families.qwen3_5.delta_rule`.

        ``decay`` is the decay's logarithm, float32 (T, h), ``beta`` is (T, h), ``bounds`` int32 (samples + 1,), and
        ``chunks`` int32 (m, 2), the sample of each chunk and its number in it. All are contiguous. With ``keep``, the
        states of chunks, (m, h, k, v), and two tensors of the size of key and value are kept for the backward pass,
        instead of computed again.
        """
        packed = {"cu_seqlens": bounds, "chunk_indices": chunks}
        q, k, v, g, b = (each[None] for each in (query, key, value, decay, beta))
        total = chunk_local_cumsum(g, chunk_size=_CHUNK, **packed)
        products = chunk_scaled_dot_kkt_fwd(k=k, g=total, beta=b, output_dtype=torch.float32, **packed)
        system = solve_tril(A=products, output_dtype=k.dtype, **packed)
        kept = _states(k, v, total, b, system, packed)
        _, states, changes = kept
        out = chunk_fwd_o(q=q, k=k, v=changes, h=states, g=total, scale=key.shape[-1] ** -0.5, **packed)
        ctx.save_for_backward(query, key, value, total, beta, system, bounds, chunks, *(kept if keep else ()))
        result: Tensor = out[0].to(query.dtype)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients."""
        query, key, value, total, beta, system, bounds, chunks, *kept = ctx.saved_tensors
        packed = {"cu_seqlens": bounds, "chunk_indices": chunks}
        q, k, v, b = (each[None] for each in (query, key, value, beta))
        scale, do = key.shape[-1] ** -0.5, grads[0].contiguous()[None]
        w, states, changes = kept or _states(k, v, total, b, system, packed)
        dv = chunk_bwd_dv_local(q=q, k=k, g=total, do=do, scale=scale, **packed)
        dstates, _, dv = chunk_gated_delta_rule_bwd_dhu(
            q=q, k=k, w=w, g=total, h0=None, dht=None, do=do, dv=dv, scale=scale, **packed
        )
        dquery, dkey, dw, ddecay = chunk_bwd_dqkwg(
            q=q, k=k, v=changes, w=w, g=total, h=states, dv=dv, do=do, dh=dstates, scale=scale, **packed
        )
        more_dkey, dvalue, dbeta, more_ddecay = prepare_wy_repr_bwd(
            k=k, v=v, beta=b, g=total, A=system, dw=dw, du=dv, **packed
        )
        dkey += more_dkey
        ddecay += more_ddecay
        ddecay = chunk_local_cumsum(ddecay, chunk_size=_CHUNK, reverse=True, **packed)
        of = (dquery, query), (dkey, key), (dvalue, value), (ddecay, total), (dbeta, beta)
        return *(gradient[0].to(tensor.dtype) for gradient, tensor in of), None, None, None


def _states(
    k: Tensor, v: Tensor, total: Tensor, beta: Tensor, system: Tensor, packed: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns keys that read states, (1, T, h, k), chunks' first states, (1, m, h, k, v), and what tokens add."""
    w, u = recompute_w_u_fwd(k=k, v=v, beta=beta, A=system, g=total, **packed)
    states, changes, _ = chunk_gated_delta_rule_fwd_h(
        k=k, w=w, u=u, g=total, initial_state=None, output_final_state=False, **packed
    )
    return w, states, changes
