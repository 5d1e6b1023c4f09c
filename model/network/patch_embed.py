"""Patch embedding, directly from stored uint8 patches.

Mirrors transformers' ``Qwen3_5VisionPatchEmbed``, whose 3D convolution with equal kernel and stride is a linear map of
a patch's 1,536 values ``(C, T=2, 16, 16)``.

Both frames of an image are equal, so the map of the 768 stored values is the sum of the kernel's two halves. A patch of
a video has two frames, which are stored one after the other: the kernel's halves are put in that order.

The normalisation ``(u - mean) / std`` of the data family is folded in too. The values enter as ``u - 127.5``, which is
exact in bfloat16 (8 significant bits). The division goes into the weight, and what the mean is off 127.5 into the bias:
nothing for Qwen3.5 and Qwen3-VL. A patch of an image needs neither its second copy nor its float form.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlmdata.families import Family
from vlmdata.model.architecture import VisionArchitecture

#: Middle of the pixel values from 0 to 255.
_MIDDLE = 127.5


class PatchEmbed(nn.Module):
    """``Qwen3_5VisionPatchEmbed``, with the convolution's weight flattened to (hidden, 1536).

    Args:
        architecture: Sizes of the tower.
        family: Family of the data, with the mean and standard deviation of each channel.
        dtype: Data type of the parameters.
        device: Their device.
    """

    def __init__(
        self, architecture: VisionArchitecture, family: Family, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self._scales = tuple(255.0 * each for each in family.image_std)
        self._offsets = tuple(255.0 * each - _MIDDLE for each in family.image_mean)
        self.frames = architecture.temporal_patch_size
        self.channels = architecture.in_channels
        shape = (architecture.hidden_size, architecture.patch_values)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(architecture.hidden_size, dtype=dtype, device=device))
        nn.init.trunc_normal_(self.weight, std=architecture.initializer_range)

    def forward(self, patches: Tensor, frames: int = 1) -> Tensor:
        """Embeds patches.

        Args:
            patches: uint8 (P * frames, 768) as stored by vlmdata, the frames of a patch adjacent; or floats (P, 1536)
                as in transformers' ``pixel_values`` and ``pixel_values_videos``.
            frames: Frames of a patch that are stored: 1 for images, all for videos.

        Returns:
            (P, hidden).

        Raises:
            ValueError: If the rows have neither form.
        """
        values = self.weight.shape[1]
        if patches.dtype == torch.uint8 and patches.shape[1] * self.frames == values:
            return self._folded(patches) if frames == 1 else self._folded_frames(patches)
        if patches.is_floating_point() and patches.shape[1] == values:
            return F.linear(patches.to(self.weight.dtype), self.weight, self.bias)
        raise ValueError(
            f"patches must be uint8 (P, {values // self.frames}) or floating point (P, {values}), "
            f"got {patches.dtype} {tuple(patches.shape)}"
        )

    def _folded(self, patches: Tensor) -> Tensor:
        """Maps one frame of each patch, which is that of both halves of the kernel; (P, 768) to (P, hidden)."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        weight = self.weight.unflatten(1, (self.channels, self.frames, -1)).to(wide).sum(2)
        weight = (weight / _by_channel(self._scales, weight)).to(self.weight.dtype)
        bias = self.bias
        if any(self._offsets):
            moved = (weight.to(wide) * _by_channel(self._offsets, weight)).sum((1, 2))
            bias = (bias.to(wide) - moved).to(bias.dtype)
        return F.linear(patches.to(self.weight.dtype) - _MIDDLE, weight.flatten(1), bias)

    def _folded_frames(self, patches: Tensor) -> Tensor:
        """Maps all frames of each patch, one after another; (P * frames, 768) to (P, hidden)."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        # Stored frames come before channels: (hidden, frames, channels, values).
        halves = self.weight.unflatten(1, (self.channels, self.frames, -1)).to(wide).transpose(1, 2)
        weight = (halves / _by_channel(self._scales, halves)).to(self.weight.dtype)
        bias = self.bias
        if any(self._offsets):
            moved = (weight.to(wide) * _by_channel(self._offsets, weight)).sum((1, 2, 3))
            bias = (bias.to(wide) - moved).to(bias.dtype)
        values = patches.view(-1, self.weight.shape[1]).to(self.weight.dtype) - _MIDDLE
        return F.linear(values, weight.flatten(1), bias)


def _by_channel(values: tuple[float, ...], like: Tensor) -> Tensor | float:
    """Returns a factor for (…, channels, values); one number if all channels have the same."""
    if len(set(values)) == 1:
        return values[0]
    wide = torch.promote_types(like.dtype, torch.float32)
    return torch.tensor(values, dtype=wide, device=like.device)[:, None]
