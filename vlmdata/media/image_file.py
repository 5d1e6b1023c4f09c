"""Pixels as image files: PNG without loss, or small WebP."""

from __future__ import annotations

import io
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

_WEBP_QUALITY = 78


def picture_of(pixels: npt.NDArray[np.uint8]) -> Image.Image:
    """Returns pixels, uint8 (H, W, 3), as an image of Pillow."""
    return Image.fromarray(np.ascontiguousarray(pixels))


def image_file(pixels: npt.NDArray[np.uint8], format: Literal["png", "webp"], longest: int | None = None) -> bytes:
    """Writes pixels as an image file.

    Args:
        pixels: uint8 (H, W, 3).
        format: "png" or "webp".
        longest: Longest side in pixels; larger images are shrunk.
    """
    image = picture_of(pixels)
    if longest is not None and max(image.size) > longest:
        image.thumbnail((longest, longest), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    if format == "png":
        image.save(buffer, "PNG", compress_level=1)
    else:
        image.save(buffer, "WEBP", quality=_WEBP_QUALITY, method=2)
    return buffer.getvalue()
