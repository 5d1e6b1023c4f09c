"""What a Qwen3.5-VL model is: the numbers that decide its result, read from and written to transformers' configs.

Everything here is plain data. How a model is computed (back end, parallel layout, recompute) is in
:class:`model.network.build.ModelSettings`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from vlmdata.format.manifest import TokenizerInfo

#: Values of ``layer_types``, as transformers spells them.
LINEAR_ATTENTION = "linear_attention"
FULL_ATTENTION = "full_attention"


@dataclass(frozen=True)
class VisionArchitecture:
    """The vision tower: transformers' ``Qwen3_5VisionConfig``.

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
        _divides("vision", "hidden_size", self.hidden_size, "4 * num_heads", 4 * self.num_heads)
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
    """The mixture-of-experts feed-forward layer: the MoE fields of ``Qwen3_5MoeTextConfig``.

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
class LanguageArchitecture:
    """The decoder: transformers' ``Qwen3_5TextConfig`` or ``Qwen3_5MoeTextConfig``.

    Attributes:
        vocab_size: Token ids.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the dense feed-forward layers; 0 with ``moe``.
        layer_types: One of ``linear_attention`` and ``full_attention`` per layer.
        num_attention_heads: Query heads of full attention.
        num_key_value_heads: Key and value heads of full attention.
        head_dim: Width of a full-attention head.
        linear_num_key_heads: Query and key heads of the gated delta net.
        linear_num_value_heads: Value heads of the gated delta net, a multiple of the key heads.
        linear_key_head_dim: Width of its query and key heads.
        linear_value_head_dim: Width of its value heads.
        linear_conv_kernel_dim: Taps of its causal convolution.
        moe: Mixture of experts in every layer; None for dense layers.
        rope_theta: Base of the rotary embedding.
        partial_rotary_factor: Part of a head that is rotated.
        mrope_section: Frequencies of the t, h and w axes; their sum is half the rotated width.
        rms_norm_eps: Epsilon of the RMS norms.
        max_position_embeddings: Longest sequence the checkpoint was made for; not enforced.
        initializer_range: Standard deviation of fresh weights.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 256
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    moe: MoeArchitecture | None = None
    rope_theta: float = 10_000_000.0
    partial_rotary_factor: float = 0.25
    mrope_section: tuple[int, int, int] = (11, 11, 10)
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 262_144
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        unknown = sorted(set(self.layer_types) - {LINEAR_ATTENTION, FULL_ATTENTION})
        if unknown or not self.layer_types:
            raise ValueError(f"language.layer_types must be {LINEAR_ATTENTION} or {FULL_ATTENTION}, got {unknown}")
        _divides(
            "language", "num_attention_heads", self.num_attention_heads, "num_key_value_heads", self.num_key_value_heads
        )
        _divides(
            "language",
            "linear_num_value_heads",
            self.linear_num_value_heads,
            "linear_num_key_heads",
            self.linear_num_key_heads,
        )
        if 2 * sum(self.mrope_section) != self.rotary_dim:
            raise ValueError(
                f"language.mrope_section {self.mrope_section} must sum to half the rotated width, "
                f"{self.rotary_dim} / 2 (head_dim {self.head_dim} x partial_rotary_factor {self.partial_rotary_factor})"
            )
        if (self.moe is None) == (self.intermediate_size == 0):
            raise ValueError(
                f"language.intermediate_size is the width of dense layers and 0 with moe, got {self.intermediate_size}"
            )

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layer_types)

    @property
    def rotary_dim(self) -> int:
        """Rotated columns of a full-attention head."""
        return int(self.head_dim * self.partial_rotary_factor)


@dataclass(frozen=True)
class Architecture:
    """A whole Qwen3.5-VL: transformers' ``Qwen3_5Config`` or ``Qwen3_5MoeConfig``.

    Attributes:
        vision: The vision tower.
        language: The decoder.
        image_token_id: Id of ``<|image_pad|>``.
        video_token_id: Id of ``<|video_pad|>``.
        vision_start_token_id: Id of ``<|vision_start|>``.
        vision_end_token_id: Id of ``<|vision_end|>``.
        tie_embeddings: Whether the output layer is the embedding table.
        mtp_layers: Multi-token-prediction layers of the checkpoint (``mtp_num_hidden_layers``).
    """

    vision: VisionArchitecture
    language: LanguageArchitecture
    image_token_id: int = 248_056
    video_token_id: int = 248_057
    vision_start_token_id: int = 248_053
    vision_end_token_id: int = 248_054
    tie_embeddings: bool = False
    mtp_layers: int = 1

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
        if self.mtp_layers not in (0, 1):
            raise ValueError(f"mtp_layers must be 0 or 1 (all published checkpoints have 1), got {self.mtp_layers}")

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

    @classmethod
    def from_hf(cls, config: Mapping[str, Any] | Any, *, ignore: Collection[str] = ()) -> Architecture:
        """Reads the config of a Qwen3.5 or Qwen3.5-MoE vision-language checkpoint.

        Args:
            config: The content of ``config.json``, or a transformers config object.
            ignore: Names of unknown fields (without their section) that are known to be harmless.

        Raises:
            ValueError: If it is another kind of model, a field has a value this model does not compute, or fields
                are unknown.
        """
        from model.hf_config import architecture_from_hf

        return architecture_from_hf(cls, config, ignore)

    def to_hf(self) -> dict[str, Any]:
        """The content of a ``config.json`` that :meth:`from_hf` and transformers read back to this model."""
        from model.hf_config import architecture_to_hf

        return architecture_to_hf(self)


def _divides(section: str, name: str, value: int, other: str, divisor: int) -> None:
    if divisor < 1 or value % divisor:
        raise ValueError(f"{section}.{name} ({value}) must be a multiple of {other} ({divisor})")
