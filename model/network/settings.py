"""Compute settings of a model (layout, precision, recomputation, kernels) and the checks that they are compatible.

Nothing here needs torch, so that the trainer refuses wrong settings before it imports it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from model.architecture import Architecture

if TYPE_CHECKING:
    import torch


#: A tensor-parallel rank's share of the vocabulary is a multiple of this, as matrix kernels want it.
VOCABULARY_MULTIPLE = 16


class Field(str):
    """The name of a setting within an error's message."""

    __slots__ = ()


class SettingError(ValueError):
    """A setting contradicts another one, the architecture, or the process groups.

    The message is told in parts, so that whoever calls the settings by other names can say it in those.

    Args:
        parts: The message; names of settings in it are :class:`Field`.
    """

    def __init__(self, *parts: str) -> None:
        self.parts = parts
        super().__init__("".join(parts))

    @property
    def fields(self) -> tuple[str, ...]:
        """The settings that the message names."""
        return tuple(str(part) for part in self.parts if isinstance(part, Field))

    def renamed(self, names: Mapping[str, str]) -> str:
        """The message with other names of settings; a setting without another name keeps its own."""
        return "".join(names.get(part, part) if isinstance(part, Field) else part for part in self.parts)


TENSOR = Field("tensor_parallel")


def joined_fields(names: Iterable[str]) -> tuple[str, ...]:
    """Parts of a message: names with commas between them."""
    parts: list[str] = []
    for name in names:
        parts += [", "] * bool(parts) + [Field(name)]
    return tuple(parts)


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
        precision: Data type of parameters and activations.
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
    precision: Literal["fp32", "bf16"] = "fp32"
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

    @property
    def params_dtype(self) -> torch.dtype:
        """``precision`` as torch has it."""
        import torch

        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def mtp_layers_of(self, architecture: Architecture) -> int:
        """Multi-token prediction layers that are trained."""
        return architecture.mtp_layers if self.mtp_layers is None else self.mtp_layers


def vocabulary_rows(vocab_size: int, tensor_parallel: int) -> int:
    """Rows of the embedding table: the vocabulary, filled up so that every tensor-parallel rank has the same number.

    The rows that fill up are never looked up and their logits are masked, so the result does not depend on them.

    Args:
        vocab_size: Token ids.
        tensor_parallel: Tensor-parallel size.
    """
    unit = VOCABULARY_MULTIPLE * tensor_parallel
    return -(-vocab_size // unit) * unit


def check_settings(settings: ModelSettings, architecture: Architecture) -> None:
    """Refuses what no model of any family can do, before anything is built. A family's own check calls it first.

    Raises:
        SettingError: With the setting, its value, and what to do.
    """
    _check_values(settings, architecture)
    _check_sizes(settings, architecture)
    _check_experts(settings, architecture)
    _check_back_end(settings)


def require_divides(settings: ModelSettings, sizes: Mapping[str, int]) -> None:
    """Refuses a tensor-parallel size that does not divide sizes of the architecture, given by name.

    Raises:
        SettingError: If one is no multiple of it.
    """
    tensor = settings.tensor_parallel
    for name, size in sizes.items():
        if size % tensor:
            raise SettingError(TENSOR, f" {tensor} does not divide {name} {size}; choose a divisor of it")


def _check_values(settings: ModelSettings, architecture: Architecture) -> None:
    for name in ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel"):
        if getattr(settings, name) < 1:
            raise SettingError(Field(name), f" must be at least 1, got {getattr(settings, name)}")
    allowed = {
        "backend": ("torch", "transformer_engine"),
        "precision": ("fp32", "bf16"),
        "recompute": ("none", "selective", "full"),
        "vision_attention": ("auto", "transformer_engine", "flash_attention_4"),
        "fp8": (None, "hybrid", "e4m3"),
        "fp8_recipe": ("tensorwise", "delayed", "blockwise"),
    }
    for name, values in allowed.items():
        if getattr(settings, name) not in values:
            wanted = ", ".join(map(str, values))
            raise SettingError(Field(name), f" must be one of {wanted}, got {getattr(settings, name)!r}")
    if settings.vision_tensor_parallel not in (None, 1, settings.tensor_parallel):
        raise SettingError(
            Field("vision_tensor_parallel"),
            " must be 1 or ",
            TENSOR,
            f", {settings.tensor_parallel}, got {settings.vision_tensor_parallel}",
        )
    layers = settings.mtp_layers_of(architecture)
    if not 0 <= layers <= architecture.mtp_layers:
        raise SettingError(
            Field("mtp_layers"), f" must lie in 0..{architecture.mtp_layers}, what the architecture has, got {layers}"
        )


def _check_sizes(settings: ModelSettings, architecture: Architecture) -> None:
    language, vision = architecture.language, architecture.vision
    sizes = {
        "language.hidden_size": language.hidden_size,
        "language.intermediate_size": language.intermediate_size,
    }
    if settings.vision_parallel > 1:
        sizes |= {"vision.num_heads": vision.num_heads, "vision.intermediate_size": vision.intermediate_size}
    require_divides(settings, sizes)
    if language.num_layers % settings.pipeline_parallel:
        raise SettingError(
            Field("pipeline_parallel"),
            f" {settings.pipeline_parallel} does not divide the {language.num_layers} layers into equal stages",
        )


def _check_experts(settings: ModelSettings, architecture: Architecture) -> None:
    moe, experts = architecture.language.moe, settings.expert_parallel
    if settings.sequence_parallel and settings.tensor_parallel == 1:
        raise SettingError(
            Field("sequence_parallel"), " shares tokens over tensor-parallel ranks: it needs ", TENSOR, " > 1"
        )
    if moe is None:
        if experts > 1:
            raise SettingError(
                Field("expert_parallel"), f" is {experts}, but the architecture has no experts; set it to 1"
            )
        return
    if moe.num_experts % experts:
        raise SettingError(Field("expert_parallel"), f" {experts} does not divide the {moe.num_experts} experts")
    if settings.tensor_parallel > 1 and not settings.sequence_parallel:
        raise SettingError("experts with ", TENSOR, " need ", Field("sequence_parallel"), ": switch it on")


def _check_back_end(settings: ModelSettings) -> None:
    if settings.vision_attention == "flash_attention_4" and settings.precision != "bf16":
        raise SettingError(
            Field("vision_attention"),
            f" 'flash_attention_4' computes in bfloat16, got {settings.precision}; choose 'auto'",
        )
    defaults = ModelSettings()
    engine_only = [
        name
        for name in ("fp8", "fused_cross_entropy", "gradient_accumulation_fusion", "vision_attention")
        if getattr(settings, name) != getattr(defaults, name)
    ]
    if engine_only and settings.backend != "transformer_engine":
        needs = "need" if len(engine_only) > 1 else "needs"
        raise SettingError(
            *joined_fields(engine_only),
            f" {needs} ",
            Field("backend"),
            f" 'transformer_engine', got {settings.backend!r}",
        )
