"""Model FLOP of a batch: the minimum arithmetic of the model, without padding and recomputation.

A multiply-add counts as 2 FLOP. A family supplies the coefficients (``model/families/NAME/spec.py``). All families
share these terms, per sample with images, and temporal patches of videos, of p patches, forward:

- per target: the output layer over the whole vocabulary; tokens that are not targets need no logits;
- per patch: patch embedding from 768 stored values (1,536 in a video), vision blocks, and for every four patches the
  mergers;
- per squared patch: 4 hidden p^2 per vision block.

The backward pass of a matrix product computes two more products of the same size: the gradient of its weights, which a
frozen part does not need, and the gradient of its input, needed only if a trained part lies before it. Attention scores
and the delta rule have no weights: either both their operands need gradients or neither does. MFU is this count divided
by the time and by the peak of all devices. The peaks are the dense bf16 figures of the data sheets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vlmdata.model.architecture import Architecture, LanguageArchitecture, VisionArchitecture
from vlmdata.packing.cost import CostModel

if TYPE_CHECKING:
    import torch

#: Dense bf16 FLOP/s, by a substring of the device name.
_PEAKS = {"H200": 989e12, "H100": 989e12, "H800": 989e12, "B200": 2250e12, "A100": 312e12, "A800": 312e12}


@dataclass(frozen=True)
class StepFlops:
    """Coefficients of the FLOP formula, forward and backward passes together.

    Attributes:
        per_token: FLOP per token.
        per_token_squared: FLOP per squared token of a sample.
        per_patch: FLOP per vision patch.
        per_patch_squared: FLOP per squared patch of an image, or of a temporal patch of a video.
        per_target: FLOP per target.
        per_second_frame: FLOP per patch of a video in addition, to embed its second frame. At most 0.3 % of
            ``per_patch``, so the loader's cost model leaves it out.
    """

    per_token: int
    per_token_squared: int
    per_patch: int
    per_patch_squared: int
    per_target: int
    per_second_frame: int = 0

    def of(self, lengths: npt.NDArray[np.int64], patches: npt.NDArray[np.int64], of_videos: int = 0) -> float:
        """FLOP of samples with true lengths (n,) and attention spans of the tower with patch counts (N,).

        A span is an image, or a temporal patch of a video; ``of_videos`` is the number of patches in the latter.
        ``per_target`` is not counted.
        """
        tokens, spans = lengths.astype(np.float64), patches.astype(np.float64)
        text = self.per_token * tokens.sum() + self.per_token_squared * (tokens**2).sum()
        tower = self.per_patch * spans.sum() + self.per_patch_squared * (spans**2).sum()
        return float(text + tower + self.per_second_frame * of_videos)

    def of_vision(self, patches: npt.NDArray[np.int64], of_videos: int = 0) -> float:
        """FLOP of the vision tower; the arguments are those of :meth:`of`."""
        return self.of(np.zeros(0, np.int64), patches, of_videos)

    def without_vision(self) -> StepFlops:
        """Returns the formula of the language model alone."""
        return replace(self, per_patch=0, per_patch_squared=0, per_second_frame=0)

    def cost_model(self) -> CostModel:
        """Returns the formula as the loader's cost model, which balances packs over ranks."""
        return CostModel(
            self.per_token, self.per_token_squared, self.per_target, self.per_patch, self.per_patch_squared
        )


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of a device; None if unknown."""
    if device.type != "cuda":
        return None
    import torch

    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAKS.items() if part in name), None)


def step_flops(
    model: Architecture,
    frozen: tuple[str, ...],
    adapted: tuple[str, ...] = (),
    *,
    full_layers: int,
    gate: bool,
    feed_forward_layers: int,
    outputs: int = 1,
    own_projections: int = 0,
    own_mixing: int = 0,
) -> StepFlops:
    """Returns the FLOP coefficients of a model.

    Args:
        model: The architecture.
        frozen: Parts that are not trained: any of "vision", "merger", "language".
        adapted: Parts with adapters, whose own FLOP are not counted here (:mod:`vlmdata.model.lora.flops`).
        full_layers: Layers with full attention: causal, 2 heads d s^2 per sample of s tokens (half of 4 heads d s^2).
        gate: Whether they have an output gate.
        feed_forward_layers: Layers with a feed-forward part, all with dense layers or all with experts.
        outputs: Number of times that a target passes the output layer.
        own_projections: Forward FLOP per token in products with weights of other layers.
        own_mixing: Forward FLOP per token in products without weights of other layers.
    """
    language, vision, heads = model.language, model.vision, model.language.num_attention_heads * model.language.head_dim
    of_vision, of_merger, of_language = (part not in frozen for part in ("vision", "merger", "language"))
    # What lies between the loss and a trained weight or adapter needs gradients of inputs.
    to_tower = of_vision or "vision" in adapted
    to_merger = of_merger or to_tower or "merger" in adapted
    any_trained = of_language or to_merger or "language" in adapted
    # Passes of the language model's products with weights (forward, gradient of weights, gradient of input), and of
    # those without: attention scores and the delta rule.
    passes, mixing = 1 + of_language + any_trained, 3 if any_trained else 1
    projections = own_projections + full_layers * _attention_per_token(language, gate)
    weights = projections + feed_forward_layers * _feed_forward_per_token(language)
    return StepFlops(
        per_token=passes * weights + mixing * own_mixing,
        per_token_squared=mixing * full_layers * 2 * heads,
        per_patch=_vision_per_patch(vision, of_vision, of_merger, to_tower, to_merger),
        # Attention scores of all blocks.
        per_patch_squared=(3 if to_tower else 1) * vision.depth * 4 * vision.hidden_size,
        per_target=passes * outputs * 2 * language.hidden_size * language.vocab_size,
        per_second_frame=(1 + of_vision) * _embedding_per_frame(vision),  # pixels need no gradient
    )


def _vision_per_patch(
    vision: VisionArchitecture, of_vision: bool, of_merger: bool, to_tower: bool, to_merger: bool
) -> int:
    """FLOP per patch in embedding, blocks and mergers, forward and backward, without attention scores.

    The last four say whether the weights of the encoder and the mergers need gradients, and whether their inputs do.
    """
    width, merged = vision.hidden_size, vision.hidden_size * vision.merge_unit
    blocks = vision.depth * (2 * 4 * width * width + 2 * 2 * width * vision.intermediate_size)
    merger = (1 + len(vision.deepstack_layers)) * 2 * width * (merged + vision.out_hidden_size)
    return (
        (1 + of_vision) * _embedding_per_frame(vision)  # pixels need no gradient
        + (1 + of_vision + to_tower) * blocks
        + (1 + of_merger + to_merger) * merger  # whose norm comes before its products
    )


def _embedding_per_frame(vision: VisionArchitecture) -> int:
    """Forward FLOP to embed one frame of a patch."""
    return 2 * vision.patch_values // vision.temporal_patch_size * vision.hidden_size


def _attention_per_token(language: LanguageArchitecture, gate: bool) -> int:
    """Forward FLOP per token in the projections of a full-attention layer, with or without an output gate."""
    queries = language.num_attention_heads * language.head_dim
    keys = language.num_key_value_heads * language.head_dim
    return 2 * language.hidden_size * ((2 + gate) * queries + 2 * keys)


def _feed_forward_per_token(language: LanguageArchitecture) -> int:
    """Forward FLOP per token in a feed-forward layer, or in its experts and their router."""
    width, moe = language.hidden_size, language.moe
    if moe is None:
        return 6 * width * language.intermediate_size
    shared = moe.shared_expert_intermediate_size
    experts = moe.num_experts_per_tok * moe.intermediate_size + shared
    return 6 * width * experts + 2 * width * (moe.num_experts + bool(shared))  # router, and the shared expert's gate
