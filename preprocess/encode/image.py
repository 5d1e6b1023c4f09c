"""Encodes the bytes of an image file to stored patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from preprocess.config import ImageConfig, PreprocessConfig
from preprocess.conversation import ImagePart
from preprocess.encode.sample import EncodedImage
from preprocess.reject import RowRejected
from vlmdata.families import Family
from vlmdata.media.decode import DecodedImage, decode_image
from vlmdata.media.error import MediaError
from vlmdata.media.resize import resize_to_patches
from vlmdata.media.size import SizeRequest, target_size


def encode_image(part: ImagePart, config: ImageConfig, family: Family, what: str) -> EncodedImage:
    """Decodes, normalises, resizes and splits an image into patches.

    Raises:
        RowRejected: If the image cannot be used.
    """
    request = SizeRequest(part.min_pixels, part.max_pixels, part.resized_height, part.resized_width)
    try:
        decoded = decode_image(part.data, config.max_source_pixels, what)
        source_height, source_width = decoded.memory.shape[:2]
        height, width = target_size(source_height, source_width, request, config.bounds(family), family, what)
    except MediaError as error:
        raise RowRejected(error.reason, error.message) from error
    patches = resize_to_patches(decoded.memory, height, width, family)
    grid = (1, height // family.patch_size, width // family.patch_size)
    tokens = len(patches) // family.patches_per_token
    return EncodedImage(patches, grid, (height, width), tokens, _origin(decoded), part.data)


def encode_images(parts: Sequence[ImagePart], config: PreprocessConfig) -> tuple[EncodedImage, ...]:
    """Encodes the images of a sample.

    Raises:
        RowRejected: If an image cannot be used.
    """
    return tuple(encode_image(part, config.image, config.model_family, part.field) for part in parts)


def _origin(decoded: DecodedImage) -> dict[str, Any]:
    width, height = decoded.file_size
    return {
        "format": decoded.file_format,
        "mode": decoded.mode,
        "width": width,
        "height": height,
        "normalised": list(decoded.steps),
    }
