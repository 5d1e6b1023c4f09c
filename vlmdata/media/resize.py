"""Resizes images as the reference does.

The reference is torchvision's antialiased bicubic on uint8; Pillow's differs by up to 2 grey levels. torch's kernel
gives the same bytes with plain, AVX2 and AVX-512 code, so shards do not depend on the machine (docs/decisions/0002).
"""

from __future__ import annotations

import warnings

import numpy as np
import numpy.typing as npt


def resize_image(pixels: npt.NDArray[np.uint8], height: int, width: int) -> npt.NDArray[np.uint8]:
    """Resizes with torchvision's antialiased bicubic on uint8.

    Args:
        pixels: uint8 (H, W, 3), C-contiguous; only read.
        height: New height.
        width: New width.

    Returns:
        uint8 (3, height, width), C-contiguous.
    """
    import torch
    from torchvision.transforms.v2 import functional as transforms

    # A view: (H, W, 3) memory as (3, H, W) is torch's channels-last format, which the kernel reads without a copy.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # it is not written to
        image = torch.from_numpy(pixels).permute(2, 0, 1)
    if (height, width) != pixels.shape[:2]:
        image = transforms.resize(
            image, [height, width], interpolation=transforms.InterpolationMode.BICUBIC, antialias=True
        )
    resized: npt.NDArray[np.uint8] = image.contiguous().numpy()
    return resized
