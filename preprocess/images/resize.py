"""Dynamic resolution: the size an image is brought to, and the resize itself.

Sources: ``smart_resize`` and ``Qwen2VLImageProcessor`` (torchvision back end) of transformers. torchvision's
antialiased bicubic on uint8 is the reference; Pillow's differs by up to 2 grey levels. torch's kernel gives the same
bytes with plain, AVX2 and AVX-512 code, so shards do not depend on the machine (docs/decisions/0002).
"""

from __future__ import annotations

import math
import warnings

import numpy as np
import numpy.typing as npt

from preprocess.reject import RowRejected
from vlmdata.format.ledger import Reason
from vlmdata.format.schema import IMAGE_FACTOR

MAX_ASPECT_RATIO = 200


def smart_resize(height: int, width: int, min_pixels: int, max_pixels: int, *, least_side: int = 0) -> tuple[int, int]:
    """The (height, width) an image is resized to.

    Both are multiples of 32, their product lies within [min_pixels, max_pixels] where that is possible, and the
    aspect ratio changes as little as possible. Halves round to even, as Python's ``round`` does.

    Args:
        height: Source height in pixels, positive.
        width: Source width in pixels, positive.
        min_pixels: Least product.
        max_pixels: Greatest product.
        least_side: Sides that round to less count as this, when the product is compared with the bounds. 0 is
            transformers' rule, 32 is qwen_vl_utils'; they differ for sides under 16 pixels.

    Raises:
        RowRejected: ASPECT_RATIO over 200.
    """
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise RowRejected(
            Reason.ASPECT_RATIO, f"{width}x{height} pixels: aspect ratio {ratio:.1f}, over {MAX_ASPECT_RATIO}"
        )
    new_height = max(least_side, round(height / IMAGE_FACTOR) * IMAGE_FACTOR)
    new_width = max(least_side, round(width / IMAGE_FACTOR) * IMAGE_FACTOR)
    if new_height * new_width > max_pixels:
        scale = math.sqrt((height * width) / max_pixels)
        new_height = max(IMAGE_FACTOR, math.floor(height / scale / IMAGE_FACTOR) * IMAGE_FACTOR)
        new_width = max(IMAGE_FACTOR, math.floor(width / scale / IMAGE_FACTOR) * IMAGE_FACTOR)
    elif new_height * new_width < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * scale / IMAGE_FACTOR) * IMAGE_FACTOR
        new_width = math.ceil(width * scale / IMAGE_FACTOR) * IMAGE_FACTOR
    return new_height, new_width


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

    # A view: (H, W, 3) memory seen as (3, H, W) is torch's channels-last, which the kernel reads without a copy.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nor is it written to
        image = torch.from_numpy(pixels).permute(2, 0, 1)
    if (height, width) != pixels.shape[:2]:
        image = transforms.resize(
            image, [height, width], interpolation=transforms.InterpolationMode.BICUBIC, antialias=True
        )
    resized: npt.NDArray[np.uint8] = image.contiguous().numpy()
    return resized
