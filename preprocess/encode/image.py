"""From the bytes of an image file to the patches that are stored."""

from __future__ import annotations

from typing import Any

from preprocess.config import ImageConfig
from preprocess.conversation import ImagePart
from preprocess.encode.sample import EncodedImage
from preprocess.images.bounds import target_size
from preprocess.images.decode import DecodedImage, decode_image
from preprocess.images.resize import resize_image
from vlmdata.format.schema import PATCH_SIZE
from vlmdata.patches import patchify


def encode_image(part: ImagePart, config: ImageConfig, what: str) -> EncodedImage:
    """Decodes, normalises, resizes and cuts an image into patches.

    Raises:
        RowRejected: With the reason.
    """
    decoded = decode_image(part.data, config.max_source_pixels, what)
    source_height, source_width = decoded.pixels.shape[:2]
    height, width = target_size(source_height, source_width, part, config, what)
    patches = patchify(resize_image(decoded.pixels, height, width))
    return EncodedImage(patches, (1, height // PATCH_SIZE, width // PATCH_SIZE), _origin(decoded))


def _origin(decoded: DecodedImage) -> dict[str, Any]:
    width, height = decoded.file_size
    return {
        "format": decoded.file_format,
        "mode": decoded.mode,
        "width": width,
        "height": height,
        "normalised": list(decoded.steps),
    }
