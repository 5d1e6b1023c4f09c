"""Rebuilds images from stored patches."""

from __future__ import annotations

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
    """Rebuilds an image of a sample as the model sees it, uint8 (H, W, 3); for a video, its first frame.

    Raises:
        NotFoundError: If the sample has no image of this number.
        DatasetFormatError: If its grid does not match the stored patches.
    """
    if not 0 <= number < len(sample.items):
        raise NotFoundError(
            f"no image {number}: sample {sample.key} has {counted(len(sample.items), 'image')}, numbered from 0"
        )
    shape, found = sample.items[number], sample.image_grid_thw.tolist()
    start = sum(item.rows for item in sample.items[:number])
    _, height, width = shape.grid
    stop, merge = start + height * width * shape.copies, family.merge_size
    fits = found == [list(item.grid) for item in sample.items] and min(map(min, found)) > 0
    if not fits or height % merge or width % merge or stop > len(sample.patches):
        raise DatasetFormatError(
            f"sample {sample.key}: {shape.kind} {number} has the grid {found[number]}, which does not match the "
            f"{len(sample.patches)} stored patches. Run `vlmdata verify` on the dataset."
        )
    return family.unpatchify(sample.patches[start : stop : shape.copies], height, width).transpose(1, 2, 0)
