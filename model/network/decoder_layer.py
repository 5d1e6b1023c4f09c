"""Decoder layer specs for both back ends.

Mirrors transformers' ``Qwen3VLTextDecoderLayer``, ``Qwen3VLTextMLP``, ``Qwen3VLMoeTextSparseMoeBlock`` and, with a
shared expert, ``Qwen3_5MoeSparseMoeBlock``. The layer, the MLP and the expert layer are megatron-core's. A *provider*
selects their linear layers, norms and attention.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import nn

from vlmdata.model.network.attention import KernelSelfAttention, RotatedSelfAttention
from vlmdata.model.network.dispatch import ExpertsLayer
from vlmdata.model.network.provider import Provider
from vlmdata.model.network.router import BalancedRouter


def full_attention(provider: Provider) -> ModuleSpec:
    """Returns causal attention with norms of queries and keys."""
    qk_norm = provider.layer_norm(rms_norm=True, for_qk=True)
    return ModuleSpec(
        module=RotatedSelfAttention if provider.compiled else KernelSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=first_linear(provider),
            core_attention=provider.core_attention(),
            linear_proj=provider.row_parallel_linear(),
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )


def first_linear(provider: Provider) -> Any:
    """Returns the linear layer that follows a norm, which Transformer Engine fuses with the norm."""
    fused = provider.fuse_layernorm_and_linear()
    return provider.column_parallel_layer_norm_linear() if fused else provider.column_parallel_linear()


def layer_spec(
    config: TransformerConfig,
    provider: Provider,
    mixer: ModuleSpec,
    projection: str = "linear_qkv",
    module: type[TransformerLayer] = TransformerLayer,
) -> ModuleSpec:
    """Returns the spec of a decoder layer, with experts if the configuration has any.

    Args:
        config: Configuration of the decoder.
        provider: The back end.
        mixer: Attention, or what a layer has in its place.
        projection: Name of its first linear layer, which follows the layer's first norm.
        module: The layer's class.
    """
    fused, moe = provider.fuse_layernorm_and_linear(), config.num_moe_experts is not None
    norm = provider.layer_norm(rms_norm=True)
    # Transformer Engine keeps a norm's weight in the linear layer that follows. Both back ends use its checkpoint keys.
    keys = {}
    if not fused:
        keys["input_layernorm."] = f"self_attention.{projection}.layer_norm_"
        if not moe:
            keys["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return ModuleSpec(
        module=module,
        submodules=TransformerLayerSubmodules(
            input_layernorm=IdentityOp if fused else norm,
            self_attention=mixer,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=IdentityOp if fused and not moe else norm,
            mlp=_experts(config, provider) if moe else _dense(provider),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=keys,
        ),
    )


def _dense(provider: Provider) -> Any:
    return partial(
        MLP.as_mlp_submodule,
        submodules=MLPSubmodules(
            linear_fc1=first_linear(provider), linear_fc2=provider.row_parallel_linear(), activation_func=_swiglu
        ),
    )


def _swiglu(config: TransformerConfig) -> nn.Module:
    """The activation if ``use_te_activation_func`` is set: a Triton kernel, where megatron-core has torch compile."""
    from vlmdata.model.kernels.gating import SwiGLUActivation  # Triton is only available with CUDA

    return SwiGLUActivation(config)


def _experts(config: TransformerConfig, provider: Provider) -> Any:
    shared = MLPSubmodules(linear_fc1=provider.column_parallel_linear(), linear_fc2=provider.row_parallel_linear())
    has_shared = config.moe_shared_expert_intermediate_size is not None
    return partial(
        ExpertsLayer,
        submodules=MoESubmodules(
            experts=provider.grouped_mlp_modules(config.moe_grouped_gemm),
            shared_experts=partial(SharedExpertMLP, submodules=shared) if has_shared else None,
            router=BalancedRouter,
        ),
    )
