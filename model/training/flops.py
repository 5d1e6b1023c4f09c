"""Model FLOP of a batch: what the arithmetic of the model needs at least, padding and recomputation not counted.

A multiply-add is 2 FLOP. Per sample of s true tokens and images of p patches, forward:

- per token: every matrix a token passes (full attention with its gate, gated delta net, dense layers or the routed and
  shared experts it is sent to, router), the convolution, and the delta rule in its recurrent form (read, correct,
  write: 6 d_k d_v per value head);
- per target: the output layer over the whole vocabulary; tokens that are no target need no logits;
- per squared token: causal attention, 2 heads d s^2 per full-attention layer (half of 4 heads d s^2);
- per patch: patch embedding from 768 stored values, vision blocks, and per four patches the merger;
- per squared patch: 4 hidden p^2 per vision block;
- multi-token prediction: its projection, one full-attention layer with feed-forward, and the output layer again.

Backward is twice the forward pass. A frozen part needs no gradients of weights, and a frozen part that nothing
trained lies before needs none at all. MFU is this over time and the peak of all devices; the peaks are the dense bf16
figures of the data sheets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from model.architecture import FULL_ATTENTION, Architecture, LanguageArchitecture, VisionArchitecture
from model.presets import PRESETS
from vlmdata.packing.cost import CostModel

if TYPE_CHECKING:
    import torch

#: Dense bf16 FLOP/s by a part of the device's name.
_PEAKS = {"H200": 989e12, "H100": 989e12, "H800": 989e12, "B200": 2250e12, "A100": 312e12, "A800": 312e12}


@dataclass(frozen=True)
class StepFlops:
    """Coefficients of the formula, forward and backward together.

    Attributes:
        per_token: FLOP per token.
        per_token_squared: FLOP per squared token of a sample.
        per_patch: FLOP per vision patch.
        per_patch_squared: FLOP per squared patch of an image.
        per_target: FLOP per target.
    """

    per_token: int
    per_token_squared: int
    per_patch: int
    per_patch_squared: int
    per_target: int

    @classmethod
    def for_model(cls, model: Architecture, mtp: bool = True, frozen: tuple[str, ...] = ()) -> Self:
        """The formula of an architecture.

        Args:
            model: The architecture.
            mtp: Whether multi-token prediction is trained.
            frozen: Parts that are not trained: of "vision", "merger", "language".
        """
        language, vision = model.language, model.vision
        tokens = sum(_layer_per_token(language, kind) for kind in language.layer_types)
        squared = language.layer_types.count(FULL_ATTENTION) * _attention_per_token_squared(language)
        output = 2 * language.hidden_size * language.vocab_size
        heads = 1
        if mtp and model.mtp_layers:
            layers = model.mtp_layers
            projection = 2 * 2 * language.hidden_size * language.hidden_size
            tokens += layers * (projection + _layer_per_token(language, FULL_ATTENTION))
            heads += layers
            squared += layers * _attention_per_token_squared(language)
        trains_vision = "vision" not in frozen
        trains_images = trains_vision or "merger" not in frozen
        of_language = 3 if "language" not in frozen else 2 if trains_images else 1
        of_vision = 3 if trains_vision else 1
        of_merger = 3 if "merger" not in frozen else 2 if trains_vision else 1
        patches = of_vision * _blocks_per_patch(vision) + of_merger * _merger_per_patch(vision)
        return cls(
            per_token=of_language * tokens,
            per_token_squared=of_language * squared,
            per_patch=patches,
            per_patch_squared=of_vision * vision.depth * 4 * vision.hidden_size,
            per_target=of_language * heads * output,
        )

    def of(self, lengths: npt.NDArray[np.int64], patches: npt.NDArray[np.int64]) -> float:
        """FLOP of samples with these true lengths (n,) and images with these patches (N,), but for ``per_target``."""
        tokens, spans = lengths.astype(np.float64), patches.astype(np.float64)
        text = self.per_token * tokens.sum() + self.per_token_squared * (tokens**2).sum()
        return float(text + self.per_patch * spans.sum() + self.per_patch_squared * (spans**2).sum())

    def cost_model(self) -> CostModel:
        """The same formula as the loader's cost model, by which packs are spread over ranks."""
        return CostModel(
            self.per_token, self.per_token_squared, self.per_target, self.per_patch, self.per_patch_squared
        )


def preset_costs() -> dict[str, CostModel]:
    """Cost models of all presets, all parts trained; found by ``vlmdata plan --cost NAME`` through an entry point."""
    return {name: StepFlops.for_model(architecture).cost_model() for name, architecture in PRESETS.items()}


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of a device, or None where it is not known."""
    if device.type != "cuda":
        return None
    import torch

    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAKS.items() if part in name), None)


def _layer_per_token(language: LanguageArchitecture, kind: str) -> int:
    mixer = _attention_per_token(language) if kind == FULL_ATTENTION else _delta_net_per_token(language)
    return mixer + _feed_forward_per_token(language)


def _attention_per_token(language: LanguageArchitecture) -> int:
    queries = language.num_attention_heads * language.head_dim
    keys = language.num_key_value_heads * language.head_dim
    return 2 * language.hidden_size * (2 * queries + 2 * keys + queries)  # q and gate, k and v, output


def _attention_per_token_squared(language: LanguageArchitecture) -> int:
    return 2 * language.num_attention_heads * language.head_dim


def _delta_net_per_token(language: LanguageArchitecture) -> int:
    keys = language.linear_num_key_heads * language.linear_key_head_dim
    heads = language.linear_num_value_heads
    values = heads * language.linear_value_head_dim
    projections = 2 * language.hidden_size * (2 * keys + 2 * values + 2 * heads + values)
    convolution = 2 * language.linear_conv_kernel_dim * (2 * keys + values)
    return projections + convolution + 6 * heads * language.linear_key_head_dim * language.linear_value_head_dim


def _feed_forward_per_token(language: LanguageArchitecture) -> int:
    width, moe = language.hidden_size, language.moe
    if moe is None:
        return 6 * width * language.intermediate_size
    experts = moe.num_experts_per_tok * moe.intermediate_size + moe.shared_expert_intermediate_size
    return 6 * width * experts + 2 * width * (moe.num_experts + 1)  # router, and the shared expert's gate


def _blocks_per_patch(vision: VisionArchitecture) -> int:
    width = vision.hidden_size
    block = 2 * 4 * width * width + 2 * 2 * width * vision.intermediate_size
    return 2 * vision.patch_values // vision.temporal_patch_size * width + vision.depth * block


def _merger_per_patch(vision: VisionArchitecture) -> int:
    merged = vision.hidden_size * vision.merge_unit
    return 2 * vision.hidden_size * (merged + vision.out_hidden_size)
