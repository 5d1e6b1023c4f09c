"""Codec ``source``: the original image file. Readers decode, normalise and resize it as preprocessing did.

The decoded pixels depend on the libraries' versions. The pixel checksum in the index shows whether they are the same.
"""

from __future__ import annotations

from collections.abc import Buffer, Mapping
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt

from vlmdata.families import Family
from vlmdata.media.codecs.base import IMAGE, MOST_FILE_PIXELS, Item, ItemShape, Unsuitable, missing_package


class SourceFile:
    """Stores the bytes of the image file."""

    name = "source"
    summary = "the original image file, decoded and resized at each read"
    needs_file = True

    def libraries(self) -> Mapping[str, str]:
        """Returns no libraries: none changes the stored bytes.

        Raises:
            UsageError: If a package that decodes or resizes is not installed.
        """
        for module, package in (("PIL", "pillow"), ("torchvision", "torchvision")):
            if find_spec(module) is None:
                raise missing_package("source", package)
        return {}

    def encode(self, item: Item) -> Buffer:
        """Returns the file.

        Raises:
            Unsuitable: If the item is not a whole image.
        """
        if item.shape.kind != IMAGE:
            raise Unsuitable(f"an item of kind {item.shape.kind}, but it stores only files of images")
        if item.file is None:
            raise Unsuitable("a part of an image, but it stores only files of whole images")
        return item.file

    def decode(self, stored: Buffer, shape: ItemShape, family: Family, out: npt.NDArray[np.uint8]) -> None:
        """Decodes the file, resizes it to the grid, and cuts it into ``out``.

        Raises:
            MediaError: If it cannot be decoded, or has more than :data:`MOST_FILE_PIXELS`.
        """
        from vlmdata.media.decode import decode_image  # slow to import: Pillow, and torch with the next
        from vlmdata.media.resize import resize_to_patches

        _, h, w = shape.grid
        decoded = decode_image(bytes(stored), MOST_FILE_PIXELS)
        resize_to_patches(decoded.memory, h * family.patch_size, w * family.patch_size, family, out)


CODEC = SourceFile()
