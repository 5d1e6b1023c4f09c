"""A decoder layer, put together from either back end's parts.

Mirrors transformers' ``Qwen3_5DecoderLayer``, ``Qwen3_5MLP`` and ``Qwen3_5MoeSparseMoeBlock``. The layer, the MLP and
the expert layer are megatron-core's; a *provider* says which linear layers, norms and attention they consist of.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from model.families.qwen3_5.gated_delta_net import Qwen35GatedDeltaNet, TorchGatedDeltaNet
from model.network.attention import RotatedSelfAttention
from model.network.provider import Provider, TorchProvider
from model.network.router import BalancedRouter


def layer_spec(config: TransformerConfig, provider: Provider, *, linear: bool, moe: bool) -> ModuleSpec:
    """A decoder layer.

    Args:
        config: Of the decoder.
        provider: The back end.
        linear: Gated delta net, else full attention.
        moe: Mixture of experts, else a dense MLP.
    """
    fused = provider.fuse_layernorm_and_linear()
    norm = provider.layer_norm(rms_norm=True)
    into = provider.column_parallel_layer_norm_linear() if fused else provider.column_parallel_linear()
    if linear:
        attention = ModuleSpec(
            module=TorchGatedDeltaNet if isinstance(provider, TorchProvider) else Qwen35GatedDeltaNet,
            submodules=GatedDeltaNetSubmodules(
                in_proj=into, out_norm=provider.plain_rms_norm(), out_proj=provider.row_parallel_linear()
            ),
        )
    else:
        qk_norm = provider.layer_norm(rms_norm=True, for_qk=True)
        attention = ModuleSpec(
            module=RotatedSelfAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=SelfAttentionSubmodules(
                linear_qkv=into,
                core_attention=provider.core_attention(),
                linear_proj=provider.row_parallel_linear(),
                q_layernorm=qk_norm,
                k_layernorm=qk_norm,
            ),
        )
    # Transformer Engine keeps a norm's weight in the linear layer behind it; its checkpoint keys are used by both.
    keys = {}
    if not fused:
        keys["input_layernorm."] = f"self_attention.{'in_proj' if linear else 'linear_qkv'}.layer_norm_"
        if not moe:
            keys["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=IdentityOp if fused else norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=IdentityOp if fused and not moe else norm,
            mlp=_experts(config, provider) if moe else _dense(provider, into),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=keys,
        ),
    )


def _dense(provider: Provider, into: Any) -> Any:
    """``Qwen3_5MLP``."""
    return partial(
        MLP.as_mlp_submodule, submodules=MLPSubmodules(linear_fc1=into, linear_fc2=provider.row_parallel_linear())
    )


def _experts(config: TransformerConfig, provider: Provider) -> Any:
    """``Qwen3_5MoeSparseMoeBlock``."""
    shared = MLPSubmodules(linear_fc1=provider.column_parallel_linear(), linear_fc2=provider.row_parallel_linear())
    return partial(
        MoELayer,
        submodules=MoESubmodules(
            experts=provider.grouped_mlp_modules(config.moe_grouped_gemm),
            shared_experts=partial(SharedExpertMLP, submodules=shared),
            router=BalancedRouter,
        ),
    )
