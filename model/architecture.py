"""What every model is, whichever family it belongs to: the numbers that decide its result.

Everything here is plain data and needs no torch. A family adds what only its models have in a subclass of
:class:`LanguageArchitecture` and of :class:`Architecture` (``model/families/NAME/architecture.py``). How a model is
computed (back end, parallel layout, recompute) is in :class:`model.network.settings.ModelSettings`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self

if TYPE_CHECKING:
    from vlmdata.format.manifest import TokenizerInfo


@dataclass(frozen=True)
class VisionArchitecture:
    """The vision tower, which Qwen3.5 has of Qwen3-VL: transformers' ``Qwen3_5VisionConfig``.

    Attributes:
        depth: Encoder blocks.
        hidden_size: Width of the encoder.
        intermediate_size: Width of its feed-forward layers.
        num_heads: Attention heads; ``hidden_size / num_heads`` must be a multiple of 4 (two axes, rotated in halves).
        out_hidden_size: Width of what the merger puts out; the language model's ``hidden_size``.
        num_position_embeddings: Rows of the learned position table, a square number.
        rope_theta: Base of the 2D rotary embedding.
        in_channels: Colour channels.
        patch_size: Side of a patch in pixels.
        temporal_patch_size: Frames a patch spans.
        spatial_merge_size: Side of the block of patches that becomes one token.
        layer_norm_eps: Epsilon of the layer norms (a constant in transformers).
        initializer_range: Standard deviation of fresh weights.
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

    def __post_init__(self) -> None:
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
        """Values of a patch row of ``pixel_values``: channels, frames, height, width."""
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
        num_experts_per_tok: Experts a token is sent to.
        intermediate_size: Width of a routed expert (``moe_intermediate_size``).
        shared_expert_intermediate_size: Width of the shared expert.
        router_aux_loss_coef: Weight of the load-balancing loss.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    shared_expert_intermediate_size: int
    router_aux_loss_coef: float = 0.001

    def __post_init__(self) -> None:
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"moe.num_experts_per_tok must lie in 1..num_experts ({self.num_experts}), "
                f"got {self.num_experts_per_tok}"
            )


@dataclass(frozen=True)
class LanguageArchitecture(ABC):
    """What the decoders of all families have.

    Attributes:
        vocab_size: Token ids.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the dense feed-forward layers; 0 with ``moe``.
        moe: Mixture of experts in every layer; None for dense layers.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe: MoeArchitecture | None = field(default=None, kw_only=True)

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """Decoder layers."""


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
        tie_embeddings: Whether the output layer is the embedding table.
        mtp_layers: Multi-token-prediction layers of the checkpoint; 0 in families without them.
    """

    #: Name of the model family, in :data:`model.families.REGISTRY`.
    family: ClassVar[str]

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
        for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
            if not 0 <= getattr(self, name) < self.language.vocab_size:
                raise ValueError(
                    f"{name} {getattr(self, name)} is outside the vocabulary of {self.language.vocab_size} ids; "
                    "give the ids of your tokenizer with with_vocabulary"
                )

    def with_vocabulary(self, tokenizer: TokenizerInfo, size: int | None = None) -> Self:
        """The same model for another tokenizer, as a dataset's manifest describes it.

        Args:
            tokenizer: Ids and vocabulary size.
            size: Rows of the embedding table; ``tokenizer.vocab_size`` if None. A checkpoint's table may be longer.

        Raises:
            ValueError: If ``size`` is less than the tokenizer's ids.
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
            video_token_id=tokenizer.video,
            vision_start_token_id=tokenizer.vision_start,
            vision_end_token_id=tokenizer.vision_end,
        )


def require_multiple(section: str, name: str, value: int, other: str, divisor: int) -> None:
    """Refuses a size that is no multiple of another.

    Raises:
        ValueError: With both names and values.
    """
    if divisor < 1 or value % divisor:
        raise ValueError(f"{section}.{name} ({value}) must be a multiple of {other} ({divisor})")
