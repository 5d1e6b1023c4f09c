"""Model FLOP of a batch: what the arithmetic of the model needs at least, padding and recomputation not counted.

A multiply-add is 2 FLOP. A family gives the coefficients (``model/families/NAME/flops.py``). Of what all have, per
sample with images of p patches, forward:

- per target: the output layer over the whole vocabulary; tokens that are no target need no logits;
- per patch: patch embedding from 768 stored values, vision blocks, and per four patches the merger;
- per squared patch: 4 hidden p^2 per vision block.

Backward is twice the forward pass. A frozen part needs no gradients of weights, and a frozen part that nothing
trained lies before needs none at all. MFU is this over time and the peak of all devices; the peaks are the dense bf16
figures of the data sheets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from model.architecture import VisionArchitecture
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


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of a device, or None where it is not known."""
    if device.type != "cuda":
        return None
    import torch

    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAKS.items() if part in name), None)


def blocks_per_patch(vision: VisionArchitecture) -> int:
    """Forward FLOP of a patch in the embedding and all blocks, but for attention scores."""
    width = vision.hidden_size
    block = 2 * 4 * width * width + 2 * 2 * width * vision.intermediate_size
    return 2 * vision.patch_values // vision.temporal_patch_size * width + vision.depth * block


def merger_per_patch(vision: VisionArchitecture) -> int:
    """Forward FLOP of a patch in the merger."""
    merged = vision.hidden_size * vision.merge_unit
    return 2 * vision.hidden_size * (merged + vision.out_hidden_size)
