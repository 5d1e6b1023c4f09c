"""Architecture of Qwen3.5-VL: the fields that other families lack. Plain data, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vlmdata.model.architecture import Architecture, LanguageArchitecture, require_multiple

#: Values of ``layer_types``, as transformers spells them.
LINEAR_ATTENTION = "linear_attention"
FULL_ATTENTION = "full_attention"


@dataclass(frozen=True, kw_only=True)
class Qwen35LanguageArchitecture(LanguageArchitecture):
    """The decoder: transformers' ``Qwen3_5TextConfig`` or ``Qwen3_5MoeTextConfig``.

    Attributes:
        layer_types: ``linear_attention`` or ``full_attention`` for each layer.
        linear_num_key_heads: Query and key heads of the gated delta net.
        linear_num_value_heads: Value heads of the gated delta net, a multiple of the key heads.
        linear_key_head_dim: Width of its query and key heads.
        linear_value_head_dim: Width of its value heads.
        linear_conv_kernel_dim: Taps of its causal convolution.
        partial_rotary_factor: Fraction of a head that is rotated.
    """

    layer_types: tuple[str, ...]
    head_dim: int = 256
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    rope_theta: float = 10_000_000.0
    partial_rotary_factor: float = 0.25
    mrope_section: tuple[int, int, int] = (11, 11, 10)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.layer_types) - {LINEAR_ATTENTION, FULL_ATTENTION})
        if unknown or not self.layer_types:
            raise ValueError(f"language.layer_types must be {LINEAR_ATTENTION} or {FULL_ATTENTION}, got {unknown}")
        require_multiple(
            "language",
            "linear_num_value_heads",
            self.linear_num_value_heads,
            "linear_num_key_heads",
            self.linear_num_key_heads,
        )
        super().__post_init__()

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layer_types)

    @property
    def rotary_dim(self) -> int:
        """Number of rotated columns of a full-attention head."""
        return int(self.head_dim * self.partial_rotary_factor)


@dataclass(frozen=True)
class Qwen35Architecture(Architecture):
    """A whole Qwen3.5-VL: transformers' ``Qwen3_5Config`` or ``Qwen3_5MoeConfig``.

    Attributes:
        language: The decoder.
        mtp_layers: Multi-token-prediction layers of the checkpoint (``mtp_num_hidden_layers``).
    """

    family: ClassVar[str] = "qwen3_5"
    data_family: ClassVar[str] = "qwen3_5"

    language: Qwen35LanguageArchitecture
    image_token_id: int = 248_056
    video_token_id: int = 248_057
    vision_start_token_id: int = 248_053
    vision_end_token_id: int = 248_054
    mtp_layers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mtp_layers not in (0, 1):
            raise ValueError(f"mtp_layers must be 0 or 1 (all published checkpoints have 1), got {self.mtp_layers}")
