"""Rebuilds images from stored patches, as files for a browser."""

from __future__ import annotations

import base64
from typing import Literal

import numpy as np
import numpy.typing as npt

from vlmdata.errors import DatasetFormatError, NotFoundError
from vlmdata.families import Family
from vlmdata.format.schema import Sample
from vlmdata.wording import counted

#: Longest side of an image in the one-file page, in pixels; the served page shows every pixel.
PAGE_SIDE = 1024
#: Longest side of an image in the list of samples, in pixels.
THUMBNAIL_SIDE = 96


def rebuild_image(sample: Sample, number: int, family: Family) -> npt.NDArray[np.uint8]:
    """Rebuilds an image as the model sees it; for a video, its first frame.

    Args:
        sample: The sample.
        number: Number of the image in the sample.
        family: The dataset's family.

    Returns:
        uint8 (H, W, 3).

    Raises:
        NotFoundError: If the sample has no such image.
        DatasetFormatError: If its grid does not match the stored patches.
    """
    grids = sample.image_grid_thw.astype(np.int64)
    if not 0 <= number < len(grids):
        raise NotFoundError(
            f"no image {number}: sample {sample.key} has {counted(len(grids), 'image')}, numbered from 0"
        )
    start = int(grids[:number].prod(axis=1).sum())
    _, height, width = grids[number].tolist()
    merge = family.merge_size
    if (grids < 1).any() or height % merge or width % merge or start + height * width > len(sample.patches):
        raise DatasetFormatError(
            f"sample {sample.key}: image {number} has the grid {grids[number].tolist()}, which does not match the "
            f"{len(sample.patches)} stored patches. Run `vlmdata verify` on the dataset."
        )
    return family.unpatchify(sample.patches[start : start + height * width], height, width).transpose(1, 2, 0)


def data_uri(data: bytes, format: Literal["png", "webp"]) -> str:
    """Returns an image file as a ``data:`` URL."""
    return f"data:image/{format};base64,{base64.b64encode(data).decode()}"
