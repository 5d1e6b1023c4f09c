"""How a model is computed, and which ways of it go together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from model.architecture import Architecture


@dataclass(frozen=True)
class ModelSettings:
    """How a model is computed. The result does not depend on it, but for rounding.

    Attributes:
        tensor_parallel: Ranks that share every layer.
        vision_tensor_parallel: The same in the vision tower: ``tensor_parallel`` (None is that), or 1, where each of
            those ranks encodes some of the images instead, and training must go through
            :func:`model.training.optimizer.build_learner`, which sums their gradients.
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
    vision_tensor_parallel: int | None = None
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

    @property
    def vision_parallel(self) -> int:
        """Tensor-parallel size of the vision tower."""
        return self.tensor_parallel if self.vision_tensor_parallel is None else self.vision_tensor_parallel

    def mtp_layers_of(self, architecture: Architecture) -> int:
        """Multi-token prediction layers that are trained."""
        return architecture.mtp_layers if self.mtp_layers is None else self.mtp_layers

    def check(self, architecture: Architecture) -> None:
        """Refuses what cannot work, before anything is built.

        Raises:
            ValueError: With the setting, its value, and what to do.
        """
        for check in (_check_values, _check_sizes, _check_combinations):
            check(self, architecture)


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
    if settings.vision_tensor_parallel not in (None, 1, settings.tensor_parallel):
        raise ValueError(
            f"vision_tensor_parallel must be 1 or tensor_parallel, {settings.tensor_parallel}, got "
            f"{settings.vision_tensor_parallel}"
        )
    wanted = settings.mtp_layers_of(architecture)
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
    }
    if settings.vision_parallel > 1:
        sizes |= {"vision.num_heads": vision.num_heads, "vision.intermediate_size": vision.intermediate_size}
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
