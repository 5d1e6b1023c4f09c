"""From an architecture and settings to a model.

The one place where the sizes of transformers' ``Qwen3_5Config`` become megatron-core's ``TransformerConfig``.
Nothing is read from global arguments; process groups are those of :mod:`model.parallel.groups`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from model.families.qwen3_5.architecture import FULL_ATTENTION, LINEAR_ATTENTION, Qwen35Architecture
from model.families.qwen3_5.decoder_layer import layer_spec
from model.families.qwen3_5.language import Qwen35Language
from model.families.qwen3_5.model import Qwen35VL
from model.families.qwen3_5.sizes import check
from model.metrics import MetricSums
from model.network.provider import Provider, TorchProvider, transformer_engine_provider
from model.network.router import BalancedRouter, RouterState
from model.network.settings import Field, ModelSettings, SettingError, vocabulary_rows
from model.network.vision import VisionTower


def build_model(
    architecture: Qwen35Architecture,
    settings: ModelSettings,
    *,
    pre_process: bool = True,
    post_process: bool = True,
) -> Qwen35VL:
    """Builds this rank's part of a model, with fresh weights.

    Args:
        architecture: What is computed.
        settings: How.
        pre_process: Whether this is the first stage (vision tower, embedding).
        post_process: Whether this is the last stage (output layer).

    Raises:
        SettingError: If the settings contradict each other, the architecture or the groups that exist.
        ImportError: If the back end is not installed.
    """
    check(settings, architecture)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    _check_groups(settings, groups)
    provider: Provider = (
        TorchProvider() if settings.backend == "torch" else transformer_engine_provider("flash-linear-attention")
    )
    config = language_config(architecture, settings)
    metrics = MetricSums()
    moe = architecture.language.moe is not None
    predict = settings.mtp_layers_of(architecture) > 0
    language = Qwen35Language(
        config,
        architecture,
        _block(architecture, config, provider),
        provider,
        mtp_layer=layer_spec(config, provider, linear=False, moe=moe) if predict else None,
        mtp_loss_scale=settings.mtp_loss_scale,
        vocab_rows=vocabulary_rows(architecture.language.vocab_size, settings.tensor_parallel),
        metrics=metrics,
        pre_process=pre_process,
        post_process=post_process,
        pg_collection=groups,
    )
    vision = None
    if pre_process:
        tower_groups, sharing_group = _vision_groups(settings, groups)
        vision = VisionTower(
            vision_config(architecture, settings),
            architecture.vision,
            provider,
            tower_groups,
            sharing_group,
            recompute=settings.vision_recompute,
            attention=settings.vision_attention,
        )
    state = RouterState(metrics=metrics) if moe else None
    for module in language.modules():
        if isinstance(module, BalancedRouter) and state is not None:
            module.state = state
    model = Qwen35VL(config, architecture, vision, language, metrics, state, predict)
    if settings.gradient_accumulation_fusion:
        _fuse_weight_gradients(model)
    # Some parameters of megatron-core (the shared expert's gate) are made on the CPU whatever the configuration says.
    return model if config.use_cpu_initialization else model.cuda()


def language_config(architecture: Qwen35Architecture, settings: ModelSettings) -> TransformerConfig:
    """The decoder's ``TransformerConfig``."""
    language = architecture.language
    linear = [int(kind == LINEAR_ATTENTION) for kind in language.layer_types]
    options = _common_options(settings) | {
        "num_layers": language.num_layers,
        "hidden_size": language.hidden_size,
        "num_attention_heads": language.num_attention_heads,
        "num_query_groups": language.num_key_value_heads,
        "kv_channels": language.head_dim,
        "ffn_hidden_size": language.intermediate_size or language.hidden_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": language.rms_norm_eps,
        "layernorm_zero_centered_gamma": True,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "qk_layernorm": True,
        "attention_output_gate": True,
        "add_bias_linear": False,
        "mrope_section": list(language.mrope_section),
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": linear,
        "linear_conv_kernel_dim": language.linear_conv_kernel_dim,
        "linear_key_head_dim": language.linear_key_head_dim,
        "linear_value_head_dim": language.linear_value_head_dim,
        "linear_num_key_heads": language.linear_num_key_heads,
        "linear_num_value_heads": language.linear_num_value_heads,
        "sequence_parallel": settings.sequence_parallel,
        "context_parallel_size": settings.context_parallel,
        "pipeline_model_parallel_size": settings.pipeline_parallel,
        "expert_model_parallel_size": settings.expert_parallel,
        "expert_tensor_parallel_size": 1,
        "pipeline_dtype": settings.params_dtype,
        # Packs differ in length, so stages tell each other shapes, and ranks of experts their numbers of tokens.
        "variable_seq_lengths": settings.pipeline_parallel > 1,
        # Not allgather, which needs packs of equal length on all ranks.
        "moe_token_dispatcher_type": "alltoall",
        "calculate_per_token_loss": True,
        "init_method_std": language.initializer_range,
        # megatron-core would have it everywhere, and its own output layer needs Apex; see _fuse_weight_gradients.
        "gradient_accumulation_fusion": False,
        "cross_entropy_loss_fusion": settings.fused_cross_entropy,
        "cross_entropy_fusion_impl": "te" if settings.fused_cross_entropy else "native",
        "cp_comm_type": settings.cp_comm_type,
    }
    if settings.fp8 is not None:
        options |= {"fp8": settings.fp8, "fp8_recipe": settings.fp8_recipe}
    return TransformerConfig(
        **(options | _moe_options(architecture, settings) | _recompute_options(architecture, settings))
    )


def vision_config(architecture: Qwen35Architecture, settings: ModelSettings) -> TransformerConfig:
    """The vision tower's ``TransformerConfig``: tensor parallel at most."""
    vision = architecture.vision
    return TransformerConfig(
        **(_common_options(settings) | {"tensor_model_parallel_size": settings.vision_parallel}),
        num_layers=vision.depth,
        hidden_size=vision.hidden_size,
        num_attention_heads=vision.num_heads,
        kv_channels=vision.head_dim,
        ffn_hidden_size=vision.intermediate_size,
        add_bias_linear=True,
        init_method_std=vision.initializer_range,
        gradient_accumulation_fusion=False,
    )


def _vision_groups(settings: ModelSettings, groups: ProcessGroupCollection) -> tuple[ProcessGroupCollection, Any]:
    """The tower's process groups, and that of the ranks which share its images."""
    alone = groups.expt_tp  # experts are never tensor parallel here, so each rank is alone in its group
    if settings.vision_parallel == settings.tensor_parallel:
        return groups, alone
    of_tower = copy.copy(groups)
    of_tower.tp = alone
    return of_tower, groups.tp


def _fuse_weight_gradients(model: Qwen35VL) -> None:
    """Has Transformer Engine's linear layers add weight gradients to ``main_grad`` in float32, within the product."""
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


def _common_options(settings: ModelSettings) -> dict[str, Any]:
    engine = settings.backend == "transformer_engine"
    return {
        "tensor_model_parallel_size": settings.tensor_parallel,
        "params_dtype": settings.params_dtype,
        "bf16": settings.precision == "bf16",
        # On the meta device, for conversion, nothing may be allocated on a GPU either.
        "use_cpu_initialization": not torch.cuda.is_available() or torch.get_default_device().type == "meta",
        "transformer_impl": "transformer_engine" if engine else "local",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "bias_activation_fusion": engine,
        "bias_dropout_fusion": engine,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": engine,
        "deterministic_mode": False,
    }


def _moe_options(architecture: Qwen35Architecture, settings: ModelSettings) -> dict[str, Any]:
    moe = architecture.language.moe
    if moe is None:
        return {}
    engine = settings.backend == "transformer_engine"
    aux = moe.router_aux_loss_coef if settings.moe_aux_loss is None else settings.moe_aux_loss
    return {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.num_experts_per_tok,
        "moe_ffn_hidden_size": moe.intermediate_size,
        "moe_shared_expert_intermediate_size": moe.shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
        "moe_layer_freq": 1,
        # Softmax over the chosen experts equals transformers' softmax over all, renormalised over the chosen.
        "moe_router_pre_softmax": False,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss" if aux else "none",
        "moe_aux_loss_coeff": aux,
        "moe_grouped_gemm": engine,
        "moe_permute_fusion": engine,
    }


def _recompute_options(architecture: Qwen35Architecture, settings: ModelSettings) -> dict[str, Any]:
    if settings.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if settings.recompute == "selective":
        modules = ["moe" if architecture.language.moe is not None else "mlp"]
        # Flash attention keeps no scores; torch's may.
        modules += ["core_attn"] if settings.backend == "torch" else ["gdn_norm_out"]
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    return {}


def _block(
    architecture: Qwen35Architecture, config: TransformerConfig, provider: Provider
) -> TransformerBlockSubmodules:
    """Specs of this stage's decoder layers and of the final norm."""
    moe = architecture.language.moe is not None
    kinds = {
        kind: layer_spec(config, provider, linear=kind == LINEAR_ATTENTION, moe=moe)
        for kind in (LINEAR_ATTENTION, FULL_ATTENTION)
    }
    first = get_transformer_layer_offset(config)
    count = get_num_layers_to_build(config)
    types = architecture.language.layer_types[first : first + count]
    return TransformerBlockSubmodules(
        layer_specs=[kinds[kind] for kind in types], layer_norm=provider.layer_norm(rms_norm=True)
    )


def _check_groups(settings: ModelSettings, groups: ProcessGroupCollection) -> None:
    if groups.expt_tp.size() > 1:
        raise ValueError(
            f"experts are tensor parallel over {groups.expt_tp.size()} ranks in these process groups, which is not "
            "supported: make them with model.parallel.groups.initialize, or with expert_tensor_parallel_size=1"
        )
    made = {
        "tensor_parallel": groups.tp.size(),
        "context_parallel": groups.cp.size(),
        "pipeline_parallel": groups.pp.size(),
        "expert_parallel": groups.ep.size(),
    }
    for name, size in made.items():
        if getattr(settings, name) != size:
            raise SettingError(
                Field(name),
                f" {getattr(settings, name)} differs from the process groups (groups: {size}); give "
                "model.parallel.groups.initialize the same sizes",
            )
