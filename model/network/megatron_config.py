"""Translates an architecture and settings into megatron-core's ``TransformerConfig``. It reads no global arguments.

A family's ``build.py`` adds what only its decoder has.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from vlmdata.model.architecture import Architecture
from vlmdata.model.network.settings import ModelSettings


def language_config(
    architecture: Architecture, settings: ModelSettings, *, recomputed: tuple[str, ...] = (), **own: Any
) -> TransformerConfig:
    """Returns a decoder's ``TransformerConfig``.

    Args:
        architecture: What to compute.
        settings: How to compute it.
        recomputed: Modules that ``recompute="selective"`` computes again with Transformer Engine, beside feed-forward
            layers.
        own: Options of the family.
    """
    language = architecture.language
    options = _common_options(settings) | {
        "num_layers": language.num_layers,
        "hidden_size": language.hidden_size,
        "num_attention_heads": language.num_attention_heads,
        "num_query_groups": language.num_key_value_heads,
        "kv_channels": language.head_dim,
        "ffn_hidden_size": language.intermediate_size or language.hidden_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": language.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "qk_layernorm": True,
        "add_bias_linear": False,
        "mrope_section": list(language.mrope_section),
        "sequence_parallel": settings.sequence_parallel,
        "context_parallel_size": settings.context_parallel,
        "pipeline_model_parallel_size": settings.pipeline_parallel,
        "expert_model_parallel_size": settings.expert_parallel,
        "expert_tensor_parallel_size": 1,
        "pipeline_dtype": settings.params_dtype,
        # Packs differ in length, so stages exchange shapes and expert ranks exchange token counts.
        "variable_seq_lengths": settings.pipeline_parallel > 1,
        # "allgather" would need packs of equal length on all ranks.
        "moe_token_dispatcher_type": "alltoall",
        "calculate_per_token_loss": True,
        "init_method_std": language.initializer_range,
        # megatron-core would enable it everywhere, but its own output layer needs Apex; see
        # vlmdata.model.network.assembly.
        "gradient_accumulation_fusion": False,
        "cross_entropy_loss_fusion": settings.fused_cross_entropy,
        "cross_entropy_fusion_impl": "te" if settings.fused_cross_entropy else "native",
        "cp_comm_type": settings.cp_comm_type,
    }
    if settings.fp8 is not None:
        options |= {"fp8": settings.fp8, "fp8_recipe": settings.fp8_recipe}
    if settings.backend == "transformer_engine" and not settings.compile and architecture.language.moe is None:
        options |= {"bias_activation_fusion": False, "use_te_activation_func": True}  # see decoder_layer._swiglu
    options |= _moe_options(architecture, settings) | _recompute_options(architecture, settings, recomputed)
    return TransformerConfig(**(options | own))


def vision_config(architecture: Architecture, settings: ModelSettings) -> TransformerConfig:
    """The vision tower's ``TransformerConfig``: no parallelism except tensor parallelism."""
    vision = architecture.vision
    return TransformerConfig(
        **(_common_options(settings) | {"tensor_model_parallel_size": settings.vision_parallel}),
        num_layers=vision.depth,
        hidden_size=vision.hidden_size,
        num_attention_heads=vision.num_heads,
        kv_channels=vision.head_dim,
        ffn_hidden_size=vision.intermediate_size,
        add_bias_linear=True,
        # As for the language model: gradients are sums, which the step divides by its targets.
        calculate_per_token_loss=True,
        init_method_std=vision.initializer_range,
        gradient_accumulation_fusion=False,
    )


def _common_options(settings: ModelSettings) -> dict[str, Any]:
    engine = settings.backend == "transformer_engine"
    return {
        "tensor_model_parallel_size": settings.tensor_parallel,
        "params_dtype": settings.params_dtype,
        "bf16": settings.precision == "bf16",
        # Conversion uses the meta device, where nothing may be allocated on a GPU either.
        "use_cpu_initialization": not torch.cuda.is_available() or torch.get_default_device().type == "meta",
        "transformer_impl": "transformer_engine" if engine else "local",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "bias_activation_fusion": engine,
        "bias_dropout_fusion": engine and settings.compile,  # torch compiles the fused sum
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": engine,
        "deterministic_mode": False,
    }


def _moe_options(architecture: Architecture, settings: ModelSettings) -> dict[str, Any]:
    moe = architecture.language.moe
    if moe is None:
        return {}
    engine = settings.backend == "transformer_engine"
    aux = moe.router_aux_loss_coef if settings.moe_aux_loss is None else settings.moe_aux_loss
    shared = moe.shared_expert_intermediate_size
    return {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.num_experts_per_tok,
        "moe_ffn_hidden_size": moe.intermediate_size,
        "moe_shared_expert_intermediate_size": shared or None,
        "moe_shared_expert_gate": bool(shared),
        "moe_layer_freq": 1,
        # Softmax over the chosen experts equals transformers' softmax over all, renormalised over the chosen.
        "moe_router_pre_softmax": False,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss" if aux else "none",
        "moe_aux_loss_coeff": aux,
        "moe_grouped_gemm": engine,
        "moe_permute_fusion": engine,
    }


def _recompute_options(
    architecture: Architecture, settings: ModelSettings, recomputed: tuple[str, ...]
) -> dict[str, Any]:
    if settings.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if settings.recompute == "selective":
        modules = ["moe" if architecture.language.moe is not None else "mlp"]
        # Flash attention does not store scores; torch's attention may.
        modules += ["core_attn"] if settings.backend == "torch" else recomputed
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    return {}
