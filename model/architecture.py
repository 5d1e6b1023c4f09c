"""Architectures of models: the fields that all families share.

This module is plain data and needs no torch. A family adds its own fields in subclasses of
:class:`LanguageArchitecture` and :class:`Architecture` (``model/families/NAME/architecture.py``).
:class:`vlmdata.model.network.settings.ModelSettings` says how a model is computed (back end, parallel layout,
recompute).
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

if TYPE_CHECKING:
    from vlmdata.format.tokenizer_info import TokenizerInfo


@dataclass(frozen=True)
class VisionArchitecture:
    """The vision tower, which Qwen3.5 and Qwen3-VL share: transformers' ``Qwen3VLVisionConfig``.

    Attributes:
        depth: Encoder blocks.
        hidden_size: Width of the encoder.
        intermediate_size: Width of its feed-forward layers.
        num_heads: Attention heads; ``hidden_size / num_heads`` must be a multiple of 4 (two axes, rotated in halves).
        out_hidden_size: Width of the merger's output; equals the language model's ``hidden_size``.
        num_position_embeddings: Rows of the learned position table, a square number.
        rope_theta: Base of the 2D rotary embedding.
        in_channels: Colour channels.
        patch_size: Side of a patch in pixels.
        temporal_patch_size: Frames per patch.
        spatial_merge_size: Side of the block of patches that becomes one token.
        layer_norm_eps: Epsilon of the layer norms (a constant in transformers).
        initializer_range: Standard deviation of initial weights.
        deepstack_layers: Blocks, from 0 and ascending, whose outputs are merged too. Each of the first decoder layers
            adds one of them to its output (``deepstack_visual_indexes``).
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    num_position_embeddings: int = 2304
    rope_theta: float = 10_000.0
    in_channels: int = 3
    patch_size: int = 16
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    layer_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    deepstack_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        ascending = sorted({number for number in self.deepstack_layers if 0 <= number < self.depth})
        if list(self.deepstack_layers) != ascending:
            raise ValueError(
                f"vision.deepstack_layers must ascend within the {self.depth} blocks (from 0), got "
                f"{list(self.deepstack_layers)}"
            )
        require_multiple("vision", "hidden_size", self.hidden_size, "4 * num_heads", 4 * self.num_heads)
        side = round(self.num_position_embeddings**0.5)
        if side * side != self.num_position_embeddings:
            raise ValueError(f"vision.num_position_embeddings must be a square, got {self.num_position_embeddings}")

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.hidden_size // self.num_heads

    @property
    def patch_values(self) -> int:
        """Number of values in a patch row of ``pixel_values``: channels x frames x height x width."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merge_unit(self) -> int:
        """Patches per image token."""
        return self.spatial_merge_size**2


@dataclass(frozen=True)
class MoeArchitecture:
    """The mixture-of-experts feed-forward layer: the MoE fields of a transformers text config.

    Attributes:
        num_experts: Routed experts per layer.
        num_experts_per_tok: Experts per token.
        intermediate_size: Width of a routed expert (``moe_intermediate_size``).
        shared_expert_intermediate_size: Width of the shared expert; 0 for none.
        router_aux_loss_coef: Weight of the load-balancing loss.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    shared_expert_intermediate_size: int = 0
    router_aux_loss_coef: float = 0.001

    def __post_init__(self) -> None:
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"moe.num_experts_per_tok must lie in 1..num_experts ({self.num_experts}), "
                f"got {self.num_experts_per_tok}"
            )


@dataclass(frozen=True, kw_only=True)
class LanguageArchitecture(ABC):
    """Decoder fields that all families share.

    Attributes:
        vocab_size: Number of token ids.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the dense feed-forward layers; 0 with ``moe``.
        moe: Mixture of experts in every layer; None for dense layers.
        num_attention_heads: Query heads of full attention.
        num_key_value_heads: Key and value heads of full attention.
        head_dim: Width of a full-attention head.
        rope_theta: Base of the rotary embedding.
        mrope_section: Frequencies of the t, h and w axes; their sum is half the rotated width.
        rms_norm_eps: Epsilon of the RMS norms.
        max_position_embeddings: Longest sequence that the checkpoint supports; not enforced.
        initializer_range: Standard deviation of initial weights.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe: MoeArchitecture | None = None
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    mrope_section: tuple[int, int, int]
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 262_144
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        require_multiple(
            "language", "num_attention_heads", self.num_attention_heads, "num_key_value_heads", self.num_key_value_heads
        )
        if 2 * sum(self.mrope_section) != self.rotary_dim:
            raise ValueError(
                f"language.mrope_section {self.mrope_section} must sum to half the rotated width, {self.rotary_dim} / 2"
            )
        if (self.moe is None) == (self.intermediate_size == 0):
            raise ValueError(
                f"language.intermediate_size is for dense layers and must be 0 with moe, got {self.intermediate_size}"
            )

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """Number of decoder layers."""

    @property
    def rotary_dim(self) -> int:
        """Number of rotated columns of a full-attention head."""
        return self.head_dim


@dataclass(frozen=True)
class Architecture:
    """A whole vision-language model.

    Attributes:
        vision: The vision tower.
        language: The decoder.
        image_token_id: Id of ``<|image_pad|>``.
        video_token_id: Id of ``<|video_pad|>``.
        vision_start_token_id: Id of ``<|vision_start|>``.
        vision_end_token_id: Id of ``<|vision_end|>``.
        tie_embeddings: Whether the output layer shares the embedding table.
        mtp_layers: Multi-token prediction layers of the checkpoint; 0 for families without them.
    """

    #: Name of the model family, in :data:`vlmdata.model.families.REGISTRY`.
    family: ClassVar[str]
    #: Family of the datasets that its models train on, in :data:`vlmdata.families.REGISTRY`.
    data_family: ClassVar[str]

    vision: VisionArchitecture
    language: LanguageArchitecture
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    tie_embeddings: bool = False
    mtp_layers: int = 0

    def __post_init__(self) -> None:
        if self.vision.out_hidden_size != self.language.hidden_size:
            raise ValueError(
                f"vision.out_hidden_size ({self.vision.out_hidden_size}) must equal language.hidden_size "
                f"({self.language.hidden_size})"
            )
        deepstack, layers = len(self.vision.deepstack_layers), self.language.num_layers
        if deepstack > layers:
            raise ValueError(
                f"vision.deepstack_layers names {deepstack} blocks for {layers} decoder layers; it must not name more"
            )
        for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
            if not 0 <= getattr(self, name) < self.language.vocab_size:
                raise ValueError(
                    f"{name} {getattr(self, name)} is outside the vocabulary of {self.language.vocab_size} ids; "
                    "set the ids of your tokenizer with with_vocabulary"
                )

    def with_vocabulary(self, tokenizer: TokenizerInfo, size: int | None = None) -> Self:
        """Returns the same model for the tokenizer of a dataset's manifest.

        Args:
            tokenizer: Ids and vocabulary size.
            size: Rows of the embedding table; ``tokenizer.vocab_size`` if None. A checkpoint's table may be larger.

        Raises:
            ValueError: If ``size`` is smaller than the tokenizer's vocabulary.
        """
        size = tokenizer.vocab_size if size is None else size
        if size < tokenizer.vocab_size:
            raise ValueError(
                f"{size} embedding rows are too few for tokenizer {tokenizer.name} with {tokenizer.vocab_size} ids"
            )
        return dataclasses.replace(
            self,
            language=dataclasses.replace(self.language, vocab_size=size),
            image_token_id=tokenizer.image,
            video_token_id=tokenizer.items["video"].token,
            vision_start_token_id=tokenizer.items["image"].before[0],
            vision_end_token_id=tokenizer.items["image"].after[0],
        )


def require_multiple(section: str, name: str, value: int, other: str, divisor: int) -> None:
    """Raises an error if one size is not a multiple of another.

    Raises:
        ValueError: Naming both sizes and their values.
    """
    if divisor < 1 or value % divisor:
        raise ValueError(f"{section}.{name} ({value}) must be a multiple of {other} ({divisor})")
