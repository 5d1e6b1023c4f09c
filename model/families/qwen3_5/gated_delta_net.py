"""The gated delta net: linear attention with a decaying, error-correcting state.

Mirrors transformers' ``Qwen3_5GatedDeltaNet`` and ``Qwen3_5RMSNormGated``.
The split tables and the sharded checkpoint are megatron-core's ``GatedDeltaNet``.

Shapes: batch 1, tokens t of this rank and T of the pack, value heads h (keys are repeated to match), value width v,
channels c, taps K, columns of a projection w.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net.common import get_parameter_local_cp
from megatron.core.ssm.gated_delta_net.gdn import GatedDeltaNet
from megatron.core.tensor_parallel import CheckpointWithoutOutput, set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from vlmdata.model.families.qwen3_5.delta_rule import causal_convolution, gated_delta_rule, l2_normalised
from vlmdata.model.network.awaited import await_weight
from vlmdata.model.network.quantized import device_of
from vlmdata.model.parallel.exchange import all_tokens_of_some_columns, some_tokens_of_all_columns, summed
from vlmdata.model.parallel.packed import PackParams


class Qwen35GatedDeltaNet(GatedDeltaNet):
    """``Qwen3_5GatedDeltaNet`` with flash-linear-attention's kernels (CUDA) and four fixes to megatron-core's layer.

    1. The decay is exponentiated in float32 for any parameter dtype, as in transformers.
    2. The pack boundaries are checked once per forward pass and not copied to the host in every layer.
    3. Without sequence parallelism, each tensor-parallel rank sees the output norm of its own heads only. The gradient
       of that norm is summed over the ranks (megatron-core leaves it 46 to 92 % wrong).
    4. The layer waits for the weight of its convolution; see ``await_weight``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reduce_out_norm_gradient()

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """See ``GatedDeltaNet.forward``."""
        await_weight(self.conv1d)
        output: tuple[Tensor, Tensor | None] = super().forward(*args, **kwargs)
        return output

    def _reduce_out_norm_gradient(self) -> None:
        if self.tp_size > 1 and not self.config.sequence_parallel:
            self.out_norm.weight.register_hook(partial(summed, self.pg_collection.tp))

    def _tokens_for_heads(self, x: Tensor, pack: PackParams) -> Tensor:
        """Context parallelism: exchanges some tokens of all heads, (t, w), for all tokens of some heads."""
        if self.cp_size == 1:
            return x
        assert pack.gathered_order is not None
        return all_tokens_of_some_columns(
            x, self.in_proj_split_sections, pack.gathered_order, pack.rank_order, self.pg_collection.cp
        )

    def _normalise(self, x: Tensor, gate: Tensor, pack: PackParams) -> Tensor:
        """Applies norm and gate to all tokens of some heads, (T, h, v)."""
        normed: Tensor = self._apply_gated_norm(x, gate).reshape(len(x), -1)
        if self.cp_size > 1:
            assert pack.gathered_order is not None
            normed = some_tokens_of_all_columns(normed, pack.gathered_order, pack.rank_order, self.pg_collection.cp)
        return normed.unsqueeze(1)

    def _local_taps(self) -> Tensor:
        """The convolution's weight for the channels of this context-parallel rank, (c, 1, K)."""
        return self._of_rank(self.conv1d.weight, [self.qk_dim_local_tp, self.qk_dim_local_tp, self.v_dim_local_tp])

    def _of_rank(self, parameter: Tensor, sections: list[int] | None = None) -> Tensor:
        """Returns the part of a parameter, or of each of its sections, for this context-parallel rank's heads."""
        if self.cp_size == 1:  # skips a query for the group's size, which takes an H200's host 0.1 ms
            return parameter
        part: Tensor = get_parameter_local_cp(parameter, 0, self.pg_collection.cp, split_sections=sections)
        return part

    def _compute_g_and_beta(
        self, A_log_local_cp: Tensor, dt_bias_local_cp: Tensor, alpha: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        decay = -A_log_local_cp.float().exp() * F.softplus(alpha.float() + dt_bias_local_cp.float())
        return decay, beta.sigmoid()

    def _resolve_cu_seqlens(
        self, cu_seqlens_padded: Tensor, cu_seqlens_actual: Tensor, total_seq_len: int, name: str, cp_size: int = 1
    ) -> Tensor:
        return cu_seqlens_padded


class PackedGatedDeltaNet(Qwen35GatedDeltaNet):
    """The same over the segments of a pack, computed as subclasses choose. Inputs are projected and exchanged here."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: PackParams | None = None,
        sequence_len_offset: int | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the layer over the segments of a pack.

        Args:
            hidden_states: (tokens held here, 1, hidden).
            attention_mask: Ignored.
            inference_context: Must be None.
            packed_seq_params: The pack.
            sequence_len_offset: Ignored.

        Returns:
            (tokens held here, 1, hidden), and no bias.
        """
        pack = packed_seq_params
        assert isinstance(pack, PackParams)
        assert inference_context is None
        assert not self.conv_bias
        await_weight(self.conv1d)
        projected, _ = self.in_proj(hidden_states)
        out, gate = self._heads(self._tokens_for_heads(projected.squeeze(1), pack), pack)
        normalise = partial(self._normalise, pack=pack)
        if not self.recompute_norm_out:
            output: tuple[Tensor, Tensor | None] = self.out_proj(normalise(out, gate))
            return output
        # Selective recomputation: as in megatron-core, the norm's output is dropped once the projection has used it.
        self.norm_out_checkpoint = CheckpointWithoutOutput()
        output = self.out_proj(self.norm_out_checkpoint.checkpoint(normalise, out, gate))
        self.norm_out_checkpoint.discard_output_and_register_recompute(output[0])
        return output

    @abstractmethod
    def _heads(self, projected: Tensor, pack: PackParams) -> tuple[Tensor, Tensor]:
        """Computes the delta rule and what precedes it."""


class KernelGatedDeltaNet(PackedGatedDeltaNet):
    """The same with our own Triton kernels before (:mod:`vlmdata.model.kernels.delta_inputs`) and after the delta rule.

    megatron-core has torch compile what is around its norms, and calls flash-linear-attention's convolution.
    """

    def _heads(self, projected: Tensor, pack: PackParams) -> tuple[Tensor, Tensor]:
        from vlmdata.model.kernels.delta_inputs import DeltaInputs  # Triton is only available with CUDA
        from vlmdata.model.kernels.short_convolution import DeltaHeads

        split = self.tp_size * self.cp_size
        query, key, value, gate, decay, beta = DeltaInputs.apply(
            projected,
            self._local_taps(),
            self._of_rank(self.A_log),
            self._of_rank(self.dt_bias),
            pack.sample_starts,
            DeltaHeads(
                self.num_key_heads // split, self.num_value_heads // split, self.key_head_dim, self.value_head_dim
            ),
        )
        return self._rule(query, key, value, decay, beta, pack), gate

    def _rule(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, pack: PackParams) -> Tensor:
        from vlmdata.model.kernels.delta_rule import DeltaRule  # flash-linear-attention needs CUDA

        bounds, chunks = pack.cu_seqlens_q_padded, pack.delta_chunks
        # With full recomputation, what is kept lives until the layer's own backward pass only.
        keep = self.config.recompute_granularity != "selective"
        out: Tensor = DeltaRule.apply(query, key, value, decay, beta, bounds, chunks, keep)
        return out

    def _apply_gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:
        """``Qwen3_5RMSNormGated`` in one pass, computed in float32. Tokens of the gate may be apart."""
        from vlmdata.model.kernels.gated_norm import gated_norm  # Triton is only available with CUDA

        await_weight(self.out_norm)
        return gated_norm(x, gate, self.out_norm.weight, self.config.layernorm_epsilon)


class TorchGatedDeltaNet(PackedGatedDeltaNet):
    """``Qwen3_5GatedDeltaNet`` in plain torch, for the torch back end on any device.

    Parameters, layouts and exchanges are megatron-core's. Its constructor needs both CUDA and fla.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any,
        layer_number: int | None = None,
        pg_collection: Any = None,
        name: str | None = None,
        cp_comm_type: str | None = None,
    ) -> None:
        MegatronModule.__init__(self, config)
        self.layer_number, self.pg_collection, self.tp_group = layer_number, pg_collection, pg_collection.tp
        self.bias = self.conv_bias = False
        self.cp_size, self.tp_size = pg_collection.cp.size(), pg_collection.tp.size()
        self.hidden_size, self.conv_kernel_dim = config.hidden_size, config.linear_conv_kernel_dim
        self.key_head_dim, self.value_head_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.num_key_heads, self.num_value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.qk_dim = self.key_head_dim * self.num_key_heads
        self.v_dim = self.value_head_dim * self.num_value_heads
        self.qk_dim_local_tp, self.v_dim_local_tp = self.qk_dim // self.tp_size, self.v_dim // self.tp_size
        self.num_v_heads_local_tp = self.num_value_heads // self.tp_size
        self._setup_variant_attrs()
        self.in_proj_qkvg_dim = self.qk_dim * 2 + self.v_dim * 2
        self.in_proj_dim = self.in_proj_qkvg_dim + self.in_proj_extra_dim
        self.conv_dim = self.qk_dim * 2 + self.v_dim
        self.conv_dim_local_tp = self.conv_dim // self.tp_size
        self.recompute_norm_out, self.norm_out_checkpoint = False, None
        self._build_projections(submodules)
        self._build_local_parameters()
        self._reduce_out_norm_gradient()

    def _build_projections(self, submodules: Any) -> None:
        config = self.config
        common = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = build_module(
            submodules.in_proj,
            self.hidden_size,
            self.in_proj_dim,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **common,
        )
        self.out_norm = build_module(
            submodules.out_norm, config=config, hidden_size=self.value_head_dim, eps=config.layernorm_epsilon
        )
        self.out_proj = build_module(
            submodules.out_proj,
            self.v_dim,
            self.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **common,
        )

    def _build_local_parameters(self) -> None:
        dtype, device = self.config.params_dtype, device_of(self.in_proj)
        channels = self.conv_dim_local_tp
        self.conv1d = nn.Conv1d(
            channels,
            channels,
            self.conv_kernel_dim,
            bias=False,
            groups=channels,
            padding=self.conv_kernel_dim - 1,
            device=device,
            dtype=dtype,
        )
        self.dt_bias = nn.Parameter(torch.ones(self.dt_bias_dim, dtype=dtype, device=device))
        rates = torch.empty(self.a_log_dim, dtype=torch.float32, device=device).uniform_(1, 16)
        self.A_log = nn.Parameter(rates.log().to(dtype))
        for parameter in (self.conv1d.weight, self.dt_bias, self.A_log):
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)

    def _heads(self, projected: Tensor, pack: PackParams) -> tuple[Tensor, Tensor]:
        cp = self.pg_collection.cp
        qkv, gate, beta, alpha = torch.split(projected, self.feat_dim_split, dim=-1)
        tokens = len(qkv)
        qkv = F.silu(causal_convolution(qkv, self._local_taps().squeeze(1), pack.bounds))
        widths = (self.qk_dim_local_tp, self.qk_dim_local_tp, self.v_dim_local_tp)
        query, key, value = qkv.split([width // self.cp_size for width in widths], -1)
        repeats = self.num_value_heads // self.num_key_heads
        query, key = (
            l2_normalised(x.reshape(tokens, -1, self.key_head_dim)).repeat_interleave(repeats, 1) for x in (query, key)
        )
        decay, beta = self._compute_g_and_beta(
            get_parameter_local_cp(self.A_log, 0, cp), get_parameter_local_cp(self.dt_bias, 0, cp), alpha, beta
        )
        value = value.reshape(tokens, -1, self.value_head_dim)
        out = gated_delta_rule(query, key, value, decay, beta, pack.bounds)
        return out, gate.reshape(tokens, -1, self.value_head_dim)

    def _apply_gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:
        """``Qwen3_5RMSNormGated``: norm first, then the gate, in float32."""
        normed: Tensor = self.out_norm(x.reshape(-1, x.shape[-1]))
        return (normed * F.silu(gate.reshape(-1, gate.shape[-1]).float())).to(x.dtype)
