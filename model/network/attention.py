"""Full attention with interleaved 3D rotary positions.

Mirrors transformers' ``Qwen3_5Attention``, ``Qwen3VLTextAttention``, their rotary embeddings and
``apply_rotary_pos_emb``.
Projections, q/k norms and the output gate (where a family has one) are megatron-core's ``SelfAttention``.

Shapes: tokens on this rank t, batch 1, heads n, key-value heads g, head width d, rotated width r.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from vlmdata.model.network.awaited import await_weight
from vlmdata.model.parallel.exchange import all_gather_rows
from vlmdata.model.parallel.packed import PackParams


class InterleavedMRoPE(nn.Module):
    """Rotation angles of tokens with three positions: ``Qwen3VLTextRotaryEmbedding``.

    The frequencies go to the axes t, h, w, t, h, w, … in turn, up to the sections of h and w. The remaining frequencies
    go to t. megatron-core's own class gives each axis a consecutive block, which is a different model.
    """

    def __init__(self, rotary_dim: int, base: float) -> None:
        super().__init__()
        self.rotary_dim, self.base = rotary_dim, base

    def forward(self, position_ids: Tensor, mrope_section: list[int], cp_group: Any = None) -> Tensor:
        """Computes the angles.

        Args:
            position_ids: int64 (3, 1, t), of the tokens on this rank.
            mrope_section: Frequencies of t, h, w.
            cp_group: Ignored; megatron-core passes it, but the positions are already local.

        Returns:
            float32 (t, 1, 1, r), in radians; both halves equal.
        """
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32, device=position_ids.device)
        inv_freq = 1.0 / (self.base ** (exponents / self.rotary_dim))
        angles_3btf = position_ids[..., None].float() * inv_freq
        angles_btf = angles_3btf[0].clone()
        for axis in (1, 2):
            mine = slice(axis, mrope_section[axis] * 3, 3)
            angles_btf[..., mine] = angles_3btf[axis, ..., mine]
        return torch.cat([angles_btf, angles_btf], -1).transpose(0, 1).unsqueeze(2).contiguous()


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates the first columns of each head: ``apply_rotary_pos_emb``.

    Args:
        x: (t, 1, n, d).
        angles: float32 (t, 1, 1, r), r <= d.

    Returns:
        (t, 1, n, d), computed in x's dtype.
    """
    width = angles.shape[-1]
    turned, passed = x[..., :width], x[..., width:]
    first, second = turned.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    turned = turned * cos + torch.cat([-second, first], -1) * sin
    return torch.cat([turned, passed], -1)


def _rotate_fused(x: Tensor, angles: Tensor) -> Tensor:
    """:func:`rotate` with Transformer Engine's kernel, in float32."""
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    turned: Tensor = apply_rotary_pos_emb(x, angles, tensor_format="sbhd", fused=True)
    return turned


class RotatedSelfAttention(SelfAttention):
    """``Qwen3VLTextAttention``: megatron-core's self-attention with rotation angles per token.

    megatron-core's rotary code for packed batches copies boundaries to the host in every layer and assumes that
    positions count up within a segment. Here the angles arrive with one row per token, and the layer applies them with
    Transformer Engine's kernel for one long sequence (in float32) or with :func:`rotate`.
    """

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See ``Attention.forward``. ``rotary_pos_emb`` holds the angles of :class:`InterleavedMRoPE`."""
        self._angles = kwargs.pop("rotary_pos_emb", None)
        try:
            output: tuple[Tensor, Tensor] = super().forward(
                hidden_states, attention_mask, rotary_pos_emb=None, **kwargs
            )
        finally:
            self._angles = None
        return output

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Returns normalised and rotated queries and keys, values, and the gate if the model has one."""
        query, key, *rest = super().get_query_key_value_tensors(*args, **kwargs)
        if self._angles is not None:
            turn = _rotate_fused if self.config.apply_rope_fusion else rotate
            query, key = turn(query, self._angles), turn(key, self._angles)
        return query, key, *rest


class KernelSelfAttention(RotatedSelfAttention):
    """The same with Triton kernels of our own between the first projection and attention, and for the gate."""

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> Any:
        """Returns normalised and rotated queries and keys, values, and the gate if the model has one."""
        # Triton is only there with CUDA.
        from vlmdata.model.kernels.attention_inputs import WIDEST, AttentionHeads, AttentionInputs

        width, groups = self.hidden_size_per_attention_head, self.num_query_groups_per_partition
        shared_groups = (self.config.num_query_groups or groups) < self.world_size  # by tensor-parallel ranks
        if self._angles is None or not split_qkv or shared_groups or width > WIDEST:
            return super().get_query_key_value_tensors(
                hidden_states, key_value_states, output_gate=output_gate, split_qkv=split_qkv
            )
        heads = AttentionHeads(
            groups=groups,
            queries=self.num_attention_heads_per_partition // groups,
            width=width,
            gated=output_gate,
            zero_centered=self.config.layernorm_zero_centered_gamma,
            eps=self.config.layernorm_epsilon,
        )
        mixed, _ = self.linear_qkv(hidden_states)
        for norm in (self.q_layernorm, self.k_layernorm):
            await_weight(norm)
        weights = self.q_layernorm.weight, self.k_layernorm.weight
        query, key, value, gate = (
            each.unsqueeze(1)
            for each in AttentionInputs.apply(mixed.squeeze(1), self._angles[:, 0, 0], *weights, heads)
        )
        return (query, key, value, gate) if output_gate else (query, key, value)

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """``attn_output * torch.sigmoid(gate)``, in float32."""
        from vlmdata.model.kernels.gating import gated  # Triton is only available with CUDA

        return gated(x, gate.reshape(x.shape))


class SegmentAttention(MegatronModule):
    """Causal attention within the segments of a pack, with torch's scaled dot product, for the torch back end.

    With context parallelism, keys and values are gathered from all ranks. Each rank computes the rows of its two chunks
    of each segment.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackParams | None = None,
    ) -> Tensor:
        """Computes attention.

        Args:
            query: (t, n, d).
            key: (t, g, d).
            value: (t, g, d).
            attention_mask: Ignored; the segments define the mask.
            attn_mask_type: Ignored.
            attention_bias: Must be None.
            packed_seq_params: The pack.

        Returns:
            (t, n * d).
        """
        pack = packed_seq_params
        assert isinstance(pack, PackParams)
        assert attention_bias is None
        size, rank = pack.context_size, pack.context_rank
        if size > 1:
            assert pack.gathered_order is not None
            counts = [query.shape[0]] * size
            both = all_gather_rows(torch.cat([key, value], -1), counts, self.cp_group)
            key, value = both.index_select(0, pack.gathered_order).split(key.shape[-1], -1)
        pieces = []
        for start, stop, local in zip(pack.bounds, pack.bounds[1:], pack.local_bounds, strict=False):
            if size == 1:
                pieces.append(self._attend(query[start:stop], key[start:stop], value[start:stop]))
                continue
            chunk = (stop - start) // (2 * size)
            for half, number in enumerate((rank, 2 * size - 1 - rank)):
                mine = query[local + half * chunk : local + (half + 1) * chunk]
                seen = start + (number + 1) * chunk
                pieces.append(self._attend(mine, key[start:seen], value[start:seen]))
        return torch.cat(pieces).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attends with queries that end where the keys end."""
        if not query.shape[0]:
            return query
        rows, columns = query.shape[0], key.shape[0]
        mask = None
        if rows != columns:
            mask = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril(columns - rows)
        q_1ntd, k_1gtd, v_1gtd = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        out_1ntd = F.scaled_dot_product_attention(
            q_1ntd,
            k_1gtd,
            v_1gtd,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=True,
        )
        return out_1ntd[0].transpose(0, 1)
