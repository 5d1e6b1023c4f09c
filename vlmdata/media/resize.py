"""Resizes images as the reference does.

The reference is torchvision's antialiased resize of uint8, with the filter of the family; Pillow's differs by up to 2
grey levels. torch's kernel gives the same bytes with plain, AVX2 and AVX-512 code, so shards do not depend on the
machine (docs/decisions/0002). It treats channels separately, so a fourth one changes nothing; Pillow's memory has four,
and is read as it is.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vlmdata.families import Family
from vlmdata.families.base import CHANNELS

if TYPE_CHECKING:
    import torch


def resize_image(
    pixels: npt.NDArray[np.uint8], height: int, width: int, resample: str = "bicubic"
) -> npt.NDArray[np.uint8]:
    """Resizes with an antialiased filter of torchvision on uint8.

    Args:
        pixels: uint8 (H, W, 3), C-contiguous; only read.
        height: New height.
        width: New width.
        resample: The filter: bicubic or bilinear.

    Returns:
        uint8 (3, height, width), C-contiguous.
    """
    resized: npt.NDArray[np.uint8] = _resized(pixels, height, width, resample).contiguous().numpy()
    return resized


def resize_to_patches(
    memory: npt.NDArray[np.uint8],
    height: int,
    width: int,
    family: Family,
    out: npt.NDArray[np.uint8] | None = None,
    part: tuple[int, int, int, int] | None = None,
) -> npt.NDArray[np.uint8]:
    """Resizes as :func:`resize_image` does, and cuts the result into patches, but without a copy in between.

    Args:
        memory: uint8 (H, W, 3 or 4), C-contiguous: RGB and possibly a fourth byte without meaning; only read.
        height: New height, a multiple of the family's factor if there is no ``part``.
        width: New width, a multiple of the family's factor if there is no ``part``.
        family: The family of the patches.
        out: As for :meth:`~vlmdata.families.Family.patchify`.
        part: (top, left, height, width) of the resized image to cut, multiples of the family's factor; None cuts all.

    Returns:
        uint8 (P, bytes per patch).
    """
    image = _resized(memory, height, width, family.resample)
    if part is not None:
        top, left, height, width = part
        image = image[:, top : top + height, left : left + width]
    if memory.shape[2] == CHANNELS:
        return family.patchify(image.contiguous().numpy(), out)
    if out is None:
        out = np.empty((height * width // family.patch_size**2, family.patch_bytes), np.uint8)
    # A pixel is one number, red its lowest byte; conversion to uint8 keeps the lowest. One row of tokens at a time,
    # which stays in cache.
    pixels = np.ascontiguousarray(image.permute(1, 2, 0).numpy()).view("<u4")[..., 0]
    band = family.factor
    shifted = np.empty((band, width), np.uint32)
    planes = np.empty((CHANNELS, band, width), np.uint8)
    for rows, patches in zip(pixels.reshape(-1, band, width), np.split(out, height // band), strict=True):
        planes[0] = rows
        for channel in range(1, CHANNELS):
            np.right_shift(rows, 8 * channel, out=shifted)
            planes[channel] = shifted
        family.patchify(planes, patches)
    return out


def _resized(memory: npt.NDArray[np.uint8], height: int, width: int, resample: str) -> torch.Tensor:
    """Returns the resized image: uint8 (C, height, width), usually in channels-last memory."""
    import torch

    # A view: (1, H, W, C) memory as (1, C, H, W) is torch's channels-last format, which the kernel reads uncopied.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # it is not written to
        image = torch.from_numpy(memory)[None].permute(0, 3, 1, 2)
    if (height, width) != memory.shape[:2]:
        # What torchvision's resize comes to. To import it takes a second, most of it for torch's compiler.
        image = torch.nn.functional.interpolate(
            image, (height, width), mode=resample, align_corners=False, antialias=True
        )
    return image[0]
