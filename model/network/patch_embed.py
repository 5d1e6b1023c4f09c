"""Patch embedding, directly from stored uint8 patches.

Mirrors transformers' ``Qwen3_5VisionPatchEmbed``, whose 3D convolution with equal kernel and stride is a linear map of
a patch's 1,536 values ``(C, T=2, 16, 16)``.

Both frames of an image are equal, so the map of the 768 stored values is the sum of the kernel's two halves. The
normalisation ``(u - 127.5) / 127.5`` is folded in too: the subtraction is exact in bfloat16 (``u - 127.5`` has 8
significant bits), and the division goes into the weight. A patch needs neither its second copy nor its float form.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.architecture import VisionArchitecture
from vlmdata.families.qwen3_5 import FAMILY

#: Mean and scale of pixel values from 0 to 255. The family's mean and standard deviation are equal.
PIXEL_MEAN = PIXEL_SCALE = 255.0 * FAMILY.image_mean[0]


class PatchEmbed(nn.Module):
    """``Qwen3_5VisionPatchEmbed``, with the convolution's weight flattened to (hidden, 1536)."""

    def __init__(self, architecture: VisionArchitecture, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.frames = architecture.temporal_patch_size
        self.channels = architecture.in_channels
        shape = (architecture.hidden_size, architecture.patch_values)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(architecture.hidden_size, dtype=dtype, device=device))
        nn.init.trunc_normal_(self.weight, std=architecture.initializer_range)

    def forward(self, patches: Tensor) -> Tensor:
        """Embeds patches.

        Args:
            patches: uint8 (P, 768) as stored by vlmdata, or floats (P, 1536) as in transformers' ``pixel_values``.

        Returns:
            (P, hidden).

        Raises:
            ValueError: If the rows have neither form.
        """
        values = self.weight.shape[1]
        if patches.dtype == torch.uint8 and patches.shape[1] * self.frames == values:
            return self._folded(patches)
        if patches.is_floating_point() and patches.shape[1] == values:
            return F.linear(patches.to(self.weight.dtype), self.weight, self.bias)
        raise ValueError(
            f"patches must be uint8 (P, {values // self.frames}) or floating point (P, {values}), "
            f"got {patches.dtype} {tuple(patches.shape)}"
        )

    def _folded(self, patches: Tensor) -> Tensor:
        halves = self.weight.unflatten(1, (self.channels, self.frames, -1))
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        weight = halves.to(wide).sum(2).flatten(1) / PIXEL_SCALE
        centred = patches.to(self.weight.dtype) - PIXEL_MEAN
        return F.linear(centred, weight.to(self.weight.dtype), self.bias)
