"""What a family is: geometry and normalisation of its images, its placeholders, and its rules of size and position."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vlmdata.families.patches import patchify, unpatchify
from vlmdata.families.positions import mrope_position_ids

if TYPE_CHECKING:
    import torch

CHANNELS = 3


class AspectRatioError(ValueError):
    """An image is so long and thin that the family's processor refuses it."""


@dataclass(frozen=True)
class Family:
    """What a kind of model fixes about its data.

    Subclass it where a rule differs; every rule is a method.

    Attributes:
        name: Its name in manifests and options.
        model_types: ``model_type`` of the configs of transformers that belong to it.
        patch_size: Side of a vision patch in pixels.
        merge_size: Patches per side that merge into one token.
        temporal_patch_size: Frames that a patch spans.
        image_mean: Per channel, of values from 0 to 1.
        image_std: Per channel, of values from 0 to 1.
        min_pixels: Smallest image area that published checkpoints say, in pixels.
        max_pixels: Largest image area that published checkpoints say, in pixels.
        max_aspect_ratio: Longer side over shorter side of an image, at most.
        image_token: Text of the image placeholder.
        video_token: Text of the video placeholder.
        vision_start: Text of the token before an image's placeholders.
        vision_end: Text of the token after them.
    """

    name: str
    model_types: tuple[str, ...]
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]
    min_pixels: int
    max_pixels: int
    max_aspect_ratio: float = 200.0
    image_token: str = "<|image_pad|>"
    video_token: str = "<|video_pad|>"
    vision_start: str = "<|vision_start|>"
    vision_end: str = "<|vision_end|>"

    @property
    def factor(self) -> int:
        """Image sides are multiples of this many pixels."""
        return self.patch_size * self.merge_size

    @property
    def patch_bytes(self) -> int:
        """Bytes of a stored patch: uint8 (3, patch, patch), without the temporal copy."""
        return CHANNELS * self.patch_size**2

    @property
    def patches_per_token(self) -> int:
        """Vision patches that one placeholder token stands for."""
        return self.merge_size**2

    def image_size(
        self, height: int, width: int, min_pixels: int, max_pixels: int, *, least_side: int = 0
    ) -> tuple[int, int]:
        """The (height, width) that an image is resized to.

        Both are multiples of :attr:`factor`, their product lies within [min_pixels, max_pixels] if that is possible,
        and the aspect ratio changes as little as possible. Halves round to even, as Python's ``round`` does.
        Source: ``smart_resize`` of transformers' Qwen2-VL processor.

        Args:
            height: Source height in pixels, positive.
            width: Source width in pixels, positive.
            min_pixels: Smallest product.
            max_pixels: Largest product.
            least_side: Sides are at least this before the product is looked at (qwen_vl_utils: the factor).

        Raises:
            AspectRatioError: If the aspect ratio is over :attr:`max_aspect_ratio`.
        """
        ratio = max(height, width) / min(height, width)
        if ratio > self.max_aspect_ratio:
            raise AspectRatioError(f"{width}x{height} pixels: aspect ratio {ratio:.1f}, over {self.max_aspect_ratio:g}")
        factor = self.factor
        new_height = max(least_side, round(height / factor) * factor)
        new_width = max(least_side, round(width / factor) * factor)
        if new_height * new_width > max_pixels:
            scale = math.sqrt((height * width) / max_pixels)
            new_height = max(factor, math.floor(height / scale / factor) * factor)
            new_width = max(factor, math.floor(width / scale / factor) * factor)
        elif new_height * new_width < min_pixels:
            scale = math.sqrt(min_pixels / (height * width))
            new_height = math.ceil(height * scale / factor) * factor
            new_width = math.ceil(width * scale / factor) * factor
        return new_height, new_width

    def patchify(self, image: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Cuts an image into patches; see :func:`vlmdata.families.patches.patchify`."""
        return patchify(image, self.patch_size, self.merge_size)

    def unpatchify(self, patches: npt.NDArray[np.uint8], grid_h: int, grid_w: int) -> npt.NDArray[np.uint8]:
        """Joins patches to an image; see :func:`vlmdata.families.patches.unpatchify`."""
        return unpatchify(patches, grid_h, grid_w, self.patch_size, self.merge_size)

    def token_counts(self, grid_thw: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Placeholder tokens of each image.

        Args:
            grid_thw: (N, 3), patches along t, h, w.

        Returns:
            int64 (N,).
        """
        return np.asarray(grid_thw, dtype=np.int64).reshape(-1, 3).prod(axis=1) // self.patches_per_token

    def position_ids(
        self, length: int, image_starts: npt.NDArray[np.integer], image_grid_thw: npt.NDArray[np.integer]
    ) -> npt.NDArray[np.int32]:
        """Positions of a sequence with images; see :func:`vlmdata.families.positions.mrope_position_ids`."""
        return mrope_position_ids(length, image_starts, image_grid_thw, self.merge_size)

    def pixel_values(self, patches: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Expands stored patches into the ``pixel_values`` of transformers' processor.

        Exact in float32, bit for bit: the mean is subtracted and the difference divided, as transformers does (a
        product with the reciprocal is not exact). In bfloat16 each order of operations gives the same values for a mean
        and a deviation of 0.5.

        Args:
            patches: uint8 (P, patch_bytes) on any device.
            dtype: Result dtype; float32 by default.

        Returns:
            (P, temporal_patch_size * patch_bytes), columns (C, T, patch, patch), on the patches' device.
        """
        import torch

        dtype = torch.float32 if dtype is None else dtype
        # Tensors on the device: CUDA turns division by a Python number into a product with its reciprocal.
        mean, std = (
            (torch.tensor(each, device=patches.device) * 255.0).view(1, CHANNELS, 1, 1)
            for each in (self.image_mean, self.image_std)
        )
        values = patches.view(-1, CHANNELS, 1, self.patch_size**2).to(torch.float32).sub_(mean).div_(std)
        # Rounded to the target type before the temporal copy: half the work.
        copies = values.to(dtype).expand(-1, -1, self.temporal_patch_size, -1)
        return copies.reshape(patches.shape[0], self.patch_bytes * self.temporal_patch_size)
