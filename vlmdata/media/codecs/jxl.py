"""Codec ``jxl``: the resized picture as a lossless JPEG XL file, which image viewers can open (docs/decisions/0006).

Uses libjxl's lossless effort 1. Higher efforts save 3 to 20 % and take 4 to 25 times as long to encode.
"""

from __future__ import annotations

from collections.abc import Buffer, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from vlmdata.families import Family
from vlmdata.families.base import CHANNELS
from vlmdata.media.codecs.base import Item, ItemShape, cut_picture, missing_package, picture_size

_EFFORT = 1


class JpegXl:
    """Stores a picture as a JPEG XL codestream without container: one channel if it is grey, else RGB."""

    name = "jxl"
    summary = "lossless JPEG XL, 2 to 9 times smaller than raw, slower to decode (install `vlmdata[jxl]`)"
    needs_file = False

    def libraries(self) -> Mapping[str, str]:
        """Returns the versions of imagecodecs and of its libjxl."""
        library = _imagecodecs()
        return {"imagecodecs": library.__version__, "libjxl": library.jpegxl_version().removeprefix("libjxl ")}

    def encode(self, item: Item) -> Buffer:
        """Compresses the picture."""
        planes = item.picture()
        grey = all(np.array_equal(planes[0], other) for other in planes[1:])
        picture = planes[0] if grey else np.ascontiguousarray(planes.transpose(1, 2, 0))
        encoded: bytes = _imagecodecs().jpegxl_encode(picture, lossless=True, effort=_EFFORT, numthreads=1)
        return encoded

    def decode(self, stored: Buffer, shape: ItemShape, family: Family, out: npt.NDArray[np.uint8]) -> None:
        """Decompresses the picture and cuts it into ``out``.

        Raises:
            ValueError: If it is not JPEG XL, or the picture has another size. The size is checked before decoding.
            imagecodecs.JpegxlError: If it is damaged.
        """
        height, width = picture_size(shape, family)
        picture = _decoded(stored, (height, width), (height, width, CHANNELS))
        planes = picture[None] if picture.ndim == 2 else picture.transpose(2, 0, 1)
        cut_picture(planes, shape, family, out)


def _decoded(stored: Buffer, grey: tuple[int, int], colour: tuple[int, int, int]) -> npt.NDArray[np.uint8]:
    """Decodes a picture of one of two shapes. libjxl compares the shape with the header before it decodes."""
    decode = _imagecodecs().jpegxl_decode
    try:
        picture = np.empty(grey, np.uint8)
        decode(stored, numthreads=1, out=picture)
    except ValueError:
        picture = np.empty(colour, np.uint8)
        decode(stored, numthreads=1, out=picture)
    return picture


def _imagecodecs() -> Any:
    try:
        import imagecodecs
    except ImportError as error:
        raise missing_package("jxl", "imagecodecs", "jxl") from error
    return imagecodecs


CODEC = JpegXl()
