"""Compute settings of a model (layout, precision, recomputation, kernels) and the checks that they are compatible.

This module needs no torch, so the trainer can reject invalid settings before importing it.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, get_args, get_origin, get_type_hints

from vlmdata.model.architecture import Architecture
from vlmdata.model.kernels.flash_cache import flash_attention_4_takes
from vlmdata.options import OptionHelp

if TYPE_CHECKING:
    import torch


#: How frozen weights of the language model's linear layers are stored: in the precision of the others, or in 4 bits.
Storage = Literal["plain", "nf4"]
#: A tensor-parallel rank's share of the vocabulary is a multiple of this, as matrix kernels prefer.
VOCABULARY_MULTIPLE = 16


class SettingError(ValueError):
    """A setting contradicts another one, the architecture, or the process groups.

    Args:
        message: Each name of a setting stands in «quotes», so that a caller with other names can substitute them.
    """

    def __init__(self, message: str) -> None:
        self.message = message
        super().__init__(self.renamed({}))

    def renamed(self, names: Mapping[str, str]) -> str:
        """Returns the message with settings renamed by ``names``; others keep their names."""
        return re.sub("«(.*?)»", lambda found: names.get(found[1], found[1]), self.message)


@dataclass(frozen=True)
class ModelOptions:
    """Options of a model's computation that are settings of a training run by the same name."""

    mtp_loss_scale: Annotated[float, OptionHelp("Weight of the loss of multi-token prediction.", least=0)] = 0.1
    moe_aux_loss: Annotated[
        float | None, OptionHelp("Weight of the load-balancing loss; None means the architecture's.", least=0)
    ] = None
    language_only: Annotated[bool, "Build the language model without the vision tower, for data without images."] = (
        False
    )
    recompute: Annotated[
        Literal["none", "selective", "full"],
        (
            'Activations of the language model that the backward pass computes again: "none"; "selective" for '
            'feed-forward layers and the delta rule\'s states; "full" for whole layers.'
        ),
    ] = "none"
    vision_recompute: Annotated[bool, "Compute the activations of all vision blocks again in the backward pass."] = (
        False
    )
    vision_attention: Annotated[
        Literal["auto", "transformer_engine", "flash_attention_4"],
        (
            'Attention of the vision tower with the Transformer Engine back end: its own with "transformer_engine" '
            '(kernels of cuDNN), "flash_attention_4" (package flash-attn-4), or "auto" for FlashAttention 4 if '
            "installed and made for the GPU."
        ),
    ] = "auto"
    compile: Annotated[
        bool,
        (
            "With Transformer Engine, have torch compile some small functions of megatron-core: activation, gates, "
            "residual sums. It takes seconds at each start. If not, Triton kernels and plain sums take their place; "
            "only experts are compiled then."
        ),
    ] = False
    tune_kernels: Annotated[
        bool,
        (
            "Have Triton's autotuner time all configurations of the delta net's kernels at the first start, instead "
            "of those in :mod:`vlmdata.model.kernels.configurations`."
        ),
    ] = False


@dataclass(frozen=True)
class ModelSettings(ModelOptions):
    """How a model is computed. Apart from rounding, the result does not depend on it.

    Attributes:
        tensor_parallel: Ranks that share every layer.
        vision_tensor_parallel: Tensor-parallel size of the vision tower: ``tensor_parallel`` (the same as None) or 1.
            With 1, each of those ranks encodes some of the images. Training must then use
            :func:`vlmdata.model.training.optimizer.learner.build_learner`, which sums their gradients. If other ranks
            hold the
            tower: any size, and None is the same as 1.
        separate_vision: Whether other ranks hold the vision tower (:mod:`vlmdata.model.parallel.separation`).
        sequence_parallel: Whether these ranks also share the tokens between layers.
        context_parallel: Ranks that share the tokens of a pack.
        pipeline_parallel: Number of pipeline stages.
        expert_parallel: Ranks that share the experts.
        backend: ``torch`` runs anywhere; ``transformer_engine`` needs CUDA.
        precision: Data type of parameters and activations.
        mtp_layers: Multi-token prediction layers to train, at most the architecture's; None means all of them.
        cp_comm_type: How attention exchanges data between context-parallel ranks (Transformer Engine): ``p2p``,
            ``all_gather``, ``a2a``, ``a2a+p2p``.
        fused_cross_entropy: Compute cross-entropy with Transformer Engine's kernel.
        gradient_accumulation_fusion: Add weight gradients directly to the gradient buffer (Transformer Engine). The
            model must be wrapped in megatron-core's ``DistributedDataParallel``, and ``grad`` has no meaning.
        fp8: FP8 format of linear layers (``hybrid``, ``e4m3``) with Transformer Engine; None disables FP8.
        fp8_recipe: FP8 scaling: of whole tensors by their current range (``tensorwise``) or by that of earlier steps
            (``delayed``), or of blocks (``blockwise``).
        storage: How the weights of the language model's linear layers are stored. With ``nf4``
            (:mod:`vlmdata.model.network.quantized`) they cannot be trained; adapters of them can.
    """

    tensor_parallel: int = 1
    vision_tensor_parallel: int | None = None
    separate_vision: bool = False
    sequence_parallel: bool = False
    context_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    backend: Literal["torch", "transformer_engine"] = "torch"
    precision: Literal["fp32", "bf16"] = "fp32"
    mtp_layers: int | None = None
    cp_comm_type: str = "p2p"
    fused_cross_entropy: bool = False
    gradient_accumulation_fusion: bool = False
    fp8: Literal["hybrid", "e4m3", None] = None
    fp8_recipe: Literal["tensorwise", "delayed", "blockwise"] = "tensorwise"
    storage: Storage = "plain"

    @property
    def vision_parallel(self) -> int:
        """Tensor-parallel size of the vision tower."""
        if self.vision_tensor_parallel is None:
            return 1 if self.separate_vision else self.tensor_parallel
        return self.vision_tensor_parallel

    @property
    def params_dtype(self) -> torch.dtype:
        """``precision`` as a torch dtype."""
        import torch

        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def mtp_layers_of(self, architecture: Architecture) -> int:
        """Number of multi-token prediction layers to train."""
        return architecture.mtp_layers if self.mtp_layers is None else self.mtp_layers


def vocabulary_rows(vocab_size: int, tensor_parallel: int) -> int:
    """Returns the rows of the embedding table: the vocabulary padded to the same number on each tensor-parallel rank.

    Padding rows are never looked up and their logits are masked, so the result does not depend on them.

    Args:
        vocab_size: Number of token ids.
        tensor_parallel: Tensor-parallel size.
    """
    unit = VOCABULARY_MULTIPLE * tensor_parallel
    return -(-vocab_size // unit) * unit


def check_settings(settings: ModelSettings, architecture: Architecture) -> None:
    """Raises an error for settings that no family supports. Each family's own check calls it first.

    Raises:
        SettingError: Naming the setting, its value and the remedy.
    """
    _check_values(settings, architecture)
    _check_sizes(settings, architecture)
    _check_experts(settings, architecture)
    _check_back_end(settings, architecture)
    _check_attention_heads(settings, architecture)


def require_divides(setting: str, value: int, sizes: Mapping[str, int]) -> None:
    """Raises an error if a parallel size does not divide these named sizes of the architecture.

    Raises:
        SettingError: If a size is not a multiple of it.
    """
    for name, size in sizes.items():
        if size % value:
            raise SettingError(f"«{setting}» {value} does not divide {name} {size}; choose a divisor of it")


def _check_attention_heads(settings: ModelSettings, architecture: Architecture) -> None:
    """Raises an error if the heads of full attention do not divide over tensor-parallel ranks."""
    language = architecture.language
    sizes = {"language.num_attention_heads": language.num_attention_heads}
    if settings.tensor_parallel % language.num_key_value_heads:  # several ranks may hold copies of one key-value head
        sizes["language.num_key_value_heads"] = language.num_key_value_heads
    require_divides("tensor_parallel", settings.tensor_parallel, sizes)


def _check_values(settings: ModelSettings, architecture: Architecture) -> None:
    names = ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel")
    sizes = {name: getattr(settings, name) for name in names} | {"vision_tensor_parallel": settings.vision_parallel}
    for name, size in sizes.items():
        if size < 1:
            raise SettingError(f"«{name}» must be at least 1, got {size}")
    for name, kind in get_type_hints(ModelSettings).items():
        if get_origin(kind) is Literal and getattr(settings, name) not in get_args(kind):
            wanted = ", ".join(map(str, get_args(kind)))
            raise SettingError(f"«{name}» must be one of {wanted}, got {getattr(settings, name)!r}")
    if settings.separate_vision and settings.language_only:
        raise SettingError("«language_only» has no vision tower for ranks of its own: leave out «separate_vision»")
    if not settings.separate_vision and settings.vision_tensor_parallel not in (None, 1, settings.tensor_parallel):
        raise SettingError(
            f"«vision_tensor_parallel» must be 1 or «tensor_parallel», {settings.tensor_parallel}, got "
            f"{settings.vision_tensor_parallel}"
        )
    layers = settings.mtp_layers_of(architecture)
    if not 0 <= layers <= architecture.mtp_layers:
        raise SettingError(
            f"«mtp_layers» must be between 0 and the architecture's {architecture.mtp_layers}, got {layers}"
        )


def _check_sizes(settings: ModelSettings, architecture: Architecture) -> None:
    language, vision = architecture.language, architecture.vision
    sizes = {
        "language.hidden_size": language.hidden_size,
        "language.intermediate_size": language.intermediate_size,
    }
    require_divides("tensor_parallel", settings.tensor_parallel, sizes)
    own = settings.separate_vision or settings.vision_parallel == 1
    require_divides(
        "vision_tensor_parallel" if own else "tensor_parallel",
        settings.vision_parallel,
        {"vision.num_heads": vision.num_heads, "vision.intermediate_size": vision.intermediate_size},
    )
    if language.num_layers % settings.pipeline_parallel:
        raise SettingError(
            f"«pipeline_parallel» {settings.pipeline_parallel} does not divide the {language.num_layers} layers into "
            "equal stages"
        )


def _check_experts(settings: ModelSettings, architecture: Architecture) -> None:
    moe, experts = architecture.language.moe, settings.expert_parallel
    if settings.sequence_parallel and settings.tensor_parallel == 1:
        raise SettingError(
            "«sequence_parallel» splits tokens over tensor-parallel ranks: it needs «tensor_parallel» > 1"
        )
    if moe is None:
        if experts > 1:
            raise SettingError(f"«expert_parallel» is {experts}, but the architecture has no experts; set it to 1")
        return
    if moe.num_experts % experts:
        raise SettingError(f"«expert_parallel» {experts} does not divide the {moe.num_experts} experts")
    if settings.tensor_parallel > 1 and not settings.sequence_parallel:
        raise SettingError("experts with «tensor_parallel» need «sequence_parallel»: switch it on")


def _check_back_end(settings: ModelSettings, architecture: Architecture) -> None:
    if settings.vision_attention == "flash_attention_4":
        width = architecture.vision.head_dim
        if settings.precision != "bf16":
            raise SettingError(
                f"«vision_attention» 'flash_attention_4' computes in bfloat16, got {settings.precision}; choose 'auto'"
            )
        if not flash_attention_4_takes(width):
            raise SettingError(
                f"«vision_attention» 'flash_attention_4' computes wrong gradients for heads of {width} columns (right: "
                "multiples of 32); choose 'auto'"
            )
    _check_storage(settings)
    defaults = ModelSettings()
    engine_only = [
        f"«{name}»"
        for name in ("fp8", "fused_cross_entropy", "gradient_accumulation_fusion", "vision_attention")
        if getattr(settings, name) != getattr(defaults, name)
    ]
    if engine_only and settings.backend != "transformer_engine":
        needs = "need" if len(engine_only) > 1 else "needs"
        raise SettingError(f"{', '.join(engine_only)} {needs} «backend» 'transformer_engine', got {settings.backend!r}")


def _check_storage(settings: ModelSettings) -> None:
    if settings.storage == "plain":
        return
    if settings.fp8 is not None:
        raise SettingError(
            f"«storage» {settings.storage!r} does not go together with «fp8»: Transformer Engine would keep an FP8 "
            "copy of the weights. Leave out one"
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise SettingError(
            f"«storage» {settings.storage!r} needs the package bitsandbytes, which is not installed: pip install "
            "bitsandbytes"
        )
