"""Makes the stored patches of a video from its frames, one frame at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vlmdata.families import Family
from vlmdata.media.codecs import VIDEO, ItemShape
from vlmdata.media.resize import resize_to_patches


class VideoPatches:
    """Resizes frames, and holds the patches of those so far.

    Args:
        frames: Number of frames, at least 1. If they do not fill the last temporal patch, the last one is repeated.
        size: (height, width) in pixels after resizing, multiples of the family's factor.
        family: The family of the patches.
    """

    def __init__(self, frames: int, size: tuple[int, int], family: Family) -> None:
        copies, (height, width) = family.temporal_patch_size, size
        grid = (-(-frames // copies), height // family.patch_size, width // family.patch_size)
        self.shape = ItemShape(VIDEO, grid, copies)
        self._frames, self._size, self._family = frames, size, family
        # Time, patch of the frame, frame of the patch, pixel.
        self._patches = np.empty((grid[0], grid[1] * grid[2], copies, family.patch_bytes), np.uint8)

    def put(self, number: int, pixels: npt.NDArray[np.uint8]) -> None:
        """Takes frame ``number`` of the chosen ones: uint8 (H, W, 3), C-contiguous."""
        patches = resize_to_patches(pixels, *self._size, self._family)
        last = number == self._frames - 1
        for place in range(number, self.shape.grid[0] * self.shape.copies if last else number + 1):
            time, copy = divmod(place, self.shape.copies)
            self._patches[time, :, copy] = patches

    @property
    def rows(self) -> npt.NDArray[np.uint8]:
        """The patches as stored: uint8 (rows of the shape, bytes per patch); copies of a patch are adjacent."""
        return self._patches.reshape(self.shape.rows, -1)
