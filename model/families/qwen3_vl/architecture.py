"""Architecture of Qwen3-VL: the fields that other families lack. Plain data, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vlmdata.model.architecture import Architecture, LanguageArchitecture


@dataclass(frozen=True, kw_only=True)
class Qwen3VLLanguageArchitecture(LanguageArchitecture):
    """The decoder: transformers' ``Qwen3VLTextConfig`` or ``Qwen3VLMoeTextConfig``.

    Attributes:
        layers: Number of decoder layers, all with full attention.
    """

    layers: int
    head_dim: int = 128
    rope_theta: float = 5_000_000.0
    mrope_section: tuple[int, int, int] = (24, 20, 20)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return self.layers


@dataclass(frozen=True)
class Qwen3VLArchitecture(Architecture):
    """A whole Qwen3-VL: transformers' ``Qwen3VLConfig`` or ``Qwen3VLMoeConfig``.

    Attributes:
        language: The decoder.
    """

    family: ClassVar[str] = "qwen3_vl"
    data_family: ClassVar[str] = "qwen3_vl"

    language: Qwen3VLLanguageArchitecture
    image_token_id: int = 151_655
    video_token_id: int = 151_656
    vision_start_token_id: int = 151_652
    vision_end_token_id: int = 151_653

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mtp_layers:
            raise ValueError(
                f"mtp_layers must be 0, since Qwen3-VL has no multi-token prediction; got {self.mtp_layers}"
            )
