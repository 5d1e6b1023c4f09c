"""From an architecture and settings to a model.

The one place where the sizes of transformers' ``Qwen3_5Config`` become megatron-core's ``TransformerConfig``.
Nothing is read from global arguments; process groups are those of :mod:`model.parallel.groups`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from model.architecture import FULL_ATTENTION, LINEAR_ATTENTION, Architecture
from model.metrics import MetricSums
from model.network.decoder_layer import (
    Provider,
    Qwen35Router,
    RouterState,
    TorchProvider,
    layer_spec,
    transformer_engine_provider,
)
from model.network.language import Qwen35Language
from model.network.qwen35_vl import Qwen35VL
from model.network.vision import VisionTower

#: A tensor-parallel rank's share of the vocabulary is a multiple of this, as matrix kernels want it.
VOCABULARY_MULTIPLE = 16


@dataclass(frozen=True)
class ModelSettings:
    """How a model is computed. The result does not depend on it, but for rounding.

    Attributes:
        tensor_parallel: Ranks that share every layer.
        sequence_parallel: Whether these ranks also share the tokens between layers.
        context_parallel: Ranks that share the tokens of a pack.
        pipeline_parallel: Stages.
        expert_parallel: Ranks that share the experts.
        backend: ``torch`` runs anywhere; ``transformer_engine`` on CUDA.
        params_dtype: Data type of parameters and activations.
        mtp_layers: Multi-token prediction layers that are trained, at most the architecture's; None for its number.
        mtp_loss_scale: Weight of their loss.
        moe_aux_loss: Weight of the load-balancing loss; None for the architecture's.
        recompute: What is computed again in the backward pass: nothing, feed-forward layers (``selective``) or whole
            layers (``full``).
        vision_recompute: Whether the vision tower's blocks are.
        vision_attention: What attends in the vision tower with Transformer Engine's back end: its own attention
            (cuDNN's kernels), FlashAttention 4, or (``auto``) the latter where it is installed and made for the card.
        cp_comm_type: How attention exchanges over context-parallel ranks (Transformer Engine): ``p2p``,
            ``all_gather``, ``a2a``, ``a2a+p2p``.
        fused_cross_entropy: Cross-entropy by Transformer Engine's kernel.
        gradient_accumulation_fusion: Weight gradients straight into the gradient buffer (Transformer Engine); the model
            must be trained behind megatron-core's ``DistributedDataParallel``, and ``grad`` stays without meaning.
        fp8: FP8 format of linear layers (``hybrid``, ``e4m3``), with Transformer Engine; None for none.
        fp8_recipe: Scaling of FP8: of whole tensors by their present range (``tensorwise``) or by that of earlier steps
            (``delayed``), or of blocks (``blockwise``).
    """

    tensor_parallel: int = 1
    sequence_parallel: bool = False
    context_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    backend: Literal["torch", "transformer_engine"] = "torch"
    params_dtype: torch.dtype = torch.float32
    mtp_layers: int | None = None
    mtp_loss_scale: float = 0.1
    moe_aux_loss: float | None = None
    recompute: Literal["none", "selective", "full"] = "none"
    vision_recompute: bool = False
    vision_attention: Literal["auto", "transformer_engine", "flash_attention_4"] = "auto"
    cp_comm_type: str = "p2p"
    fused_cross_entropy: bool = False
    gradient_accumulation_fusion: bool = False
    fp8: Literal["hybrid", "e4m3"] | None = None
    fp8_recipe: Literal["tensorwise", "delayed", "blockwise"] = "tensorwise"

    def check(self, architecture: Architecture) -> None:
        """Refuses what cannot work, before anything is built.

        Raises:
            ValueError: With the setting, its value, and what to do.
        """
        for check in (_check_values, _check_sizes, _check_combinations):
            check(self, architecture)


def build_model(
    architecture: Architecture,
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
        ValueError: If the settings contradict each other, the architecture or the groups that exist.
        ImportError: If the back end is not installed.
    """
    settings.check(architecture)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    _check_groups(settings, groups)
    provider: Provider = TorchProvider() if settings.backend == "torch" else transformer_engine_provider()
    config = language_config(architecture, settings)
    metrics = MetricSums()
    moe = architecture.language.moe is not None
    predict = _mtp_layers(architecture, settings) > 0
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
        vision = VisionTower(
            vision_config(architecture, settings),
            architecture.vision,
            provider,
            groups,
            recompute=settings.vision_recompute,
            attention=settings.vision_attention,
        )
    state = RouterState(metrics=metrics) if moe else None
    for module in language.modules():
        if isinstance(module, Qwen35Router) and state is not None:
            module.state = state
    model = Qwen35VL(config, architecture, vision, language, metrics, state, predict)
    if settings.gradient_accumulation_fusion:
        _fuse_weight_gradients(model)
    # Some parameters of megatron-core (the shared expert's gate) are made on the CPU whatever the configuration says.
    return model if config.use_cpu_initialization else model.cuda()


def vocabulary_rows(vocab_size: int, tensor_parallel: int) -> int:
    """Rows of the embedding table: the vocabulary, filled up so that every tensor-parallel rank has the same number.

    The rows that fill up are never looked up and their logits are masked, so the result does not depend on them.

    Args:
        vocab_size: Token ids.
        tensor_parallel: Tensor-parallel size.
    """
    unit = VOCABULARY_MULTIPLE * tensor_parallel
    return -(-vocab_size // unit) * unit


def language_config(architecture: Architecture, settings: ModelSettings) -> TransformerConfig:
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


def vision_config(architecture: Architecture, settings: ModelSettings) -> TransformerConfig:
    """The vision tower's ``TransformerConfig``: tensor parallel at most."""
    vision = architecture.vision
    return TransformerConfig(
        **_common_options(settings),
        num_layers=vision.depth,
        hidden_size=vision.hidden_size,
        num_attention_heads=vision.num_heads,
        kv_channels=vision.head_dim,
        ffn_hidden_size=vision.intermediate_size,
        add_bias_linear=True,
        init_method_std=vision.initializer_range,
        gradient_accumulation_fusion=False,
    )


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
        "bf16": settings.params_dtype == torch.bfloat16,
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


def _moe_options(architecture: Architecture, settings: ModelSettings) -> dict[str, Any]:
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


def _recompute_options(architecture: Architecture, settings: ModelSettings) -> dict[str, Any]:
    if settings.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if settings.recompute == "selective":
        modules = ["moe" if architecture.language.moe is not None else "mlp"]
        # Flash attention keeps no scores; torch's may.
        modules += ["core_attn"] if settings.backend == "torch" else ["gdn_norm_out"]
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    return {}


def _block(architecture: Architecture, config: TransformerConfig, provider: Provider) -> TransformerBlockSubmodules:
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


def _mtp_layers(architecture: Architecture, settings: ModelSettings) -> int:
    return architecture.mtp_layers if settings.mtp_layers is None else settings.mtp_layers


def _check_values(settings: ModelSettings, architecture: Architecture) -> None:
    for name in ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel"):
        if getattr(settings, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(settings, name)}")
    allowed = {
        "backend": ("torch", "transformer_engine"),
        "recompute": ("none", "selective", "full"),
        "vision_attention": ("auto", "transformer_engine", "flash_attention_4"),
        "fp8": (None, "hybrid", "e4m3"),
        "fp8_recipe": ("tensorwise", "delayed", "blockwise"),
    }
    for name, values in allowed.items():
        if getattr(settings, name) not in values:
            raise ValueError(f"{name} must be one of {', '.join(map(str, values))}, got {getattr(settings, name)!r}")
    if settings.params_dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"params_dtype must be float32 or bfloat16, got {settings.params_dtype}")
    wanted = _mtp_layers(architecture, settings)
    if not 0 <= wanted <= architecture.mtp_layers:
        raise ValueError(
            f"mtp_layers must lie in 0..{architecture.mtp_layers}, what the architecture has, got {wanted}"
        )


def _check_sizes(settings: ModelSettings, architecture: Architecture) -> None:
    language, vision, tensor = architecture.language, architecture.vision, settings.tensor_parallel
    sizes = {
        "language.num_attention_heads": language.num_attention_heads,
        "language.num_key_value_heads": language.num_key_value_heads,
        "language.linear_num_key_heads": language.linear_num_key_heads,
        "language.hidden_size": language.hidden_size,
        "language.intermediate_size": language.intermediate_size,
        "vision.num_heads": vision.num_heads,
        "vision.intermediate_size": vision.intermediate_size,
    }
    for name, size in sizes.items():
        if size % tensor and not (name == "language.num_key_value_heads" and tensor % size == 0):
            raise ValueError(f"tensor_parallel {tensor} does not divide {name} {size}; choose a divisor of it")
    both = tensor * settings.context_parallel
    if language.linear_num_key_heads % both:
        raise ValueError(
            f"tensor_parallel x context_parallel ({both}) does not divide language.linear_num_key_heads "
            f"{language.linear_num_key_heads}: the gated delta net spreads its heads over both; choose smaller sizes"
        )
    if language.moe is not None and language.moe.num_experts % settings.expert_parallel:
        raise ValueError(
            f"expert_parallel {settings.expert_parallel} does not divide the {language.moe.num_experts} experts"
        )
    if language.num_layers % settings.pipeline_parallel:
        raise ValueError(f"{settings.pipeline_parallel} pipeline stages do not divide the {language.num_layers} layers")


def _check_combinations(settings: ModelSettings, architecture: Architecture) -> None:
    moe = architecture.language.moe is not None
    if settings.sequence_parallel and settings.tensor_parallel == 1:
        raise ValueError("sequence_parallel shares tokens over tensor-parallel ranks: it needs tensor_parallel > 1")
    if settings.expert_parallel > 1 and not moe:
        raise ValueError(
            f"expert_parallel is {settings.expert_parallel}, but the architecture has no experts; set it to 1"
        )
    if moe and settings.tensor_parallel > 1 and not settings.sequence_parallel:
        raise ValueError("experts with tensor_parallel need sequence_parallel: switch it on")
    defaults = ModelSettings()
    engine_only = [
        name
        for name in ("fp8", "fused_cross_entropy", "gradient_accumulation_fusion", "vision_attention")
        if getattr(settings, name) != getattr(defaults, name)
    ]
    if settings.vision_attention == "flash_attention_4" and settings.params_dtype != torch.bfloat16:
        raise ValueError(
            f"vision_attention 'flash_attention_4' computes in bfloat16, got {settings.params_dtype}; choose 'auto'"
        )
    if engine_only and settings.backend != "transformer_engine":
        raise ValueError(f"{', '.join(engine_only)} need backend 'transformer_engine', got {settings.backend!r}")


def _check_groups(settings: ModelSettings, groups: ProcessGroupCollection) -> None:
    made = {
        "tensor_parallel": groups.tp.size(),
        "context_parallel": groups.cp.size(),
        "pipeline_parallel": groups.pp.size(),
        "expert_parallel": groups.ep.size(),
    }
    wrong = [
        f"{name} {getattr(settings, name)} (groups: {size})"
        for name, size in made.items()
        if getattr(settings, name) != size
    ]
    if wrong:
        raise ValueError(
            f"the settings differ from the process groups in {', '.join(wrong)}; give model.parallel.groups.initialize "
            "the same sizes"
        )


__all__ = ["ModelSettings", "build_model", "language_config", "vision_config", "vocabulary_rows"]
