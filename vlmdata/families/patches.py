"""The patch layout of Qwen-VL vision encoders, stored as uint8 without the temporal copy.

Source: ``Qwen2VLImageProcessor.patchify`` of transformers. Rows run over ``(gh / merge, gw / merge, merge, merge)``:
the patches that the merger joins to one token are adjacent. Columns are ``(C, patch, patch)``; ``pixel_values`` of
transformers have ``(C, T, patch, patch)``, with all temporal copies equal for an image.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def patchify(
    image: npt.NDArray[np.uint8], patch_size: int, merge_size: int, out: npt.NDArray[np.uint8] | None = None
) -> npt.NDArray[np.uint8]:
    """Cuts an image into patches.

    Args:
        image: uint8 (C, H, W), H and W multiples of ``patch_size * merge_size``; copied first if it is not
            C-contiguous.
        patch_size: Side of a patch in pixels.
        merge_size: Patches per side that stay together.
        out: Where the patches go: uint8 (H * W / patch_size², C * patch_size²), C-contiguous. With it, an image of one
            channel fills all channels of its patches. None is a new array.

    Returns:
        uint8 (H * W / patch_size², C * patch_size²).
    """
    channels, height, width = image.shape
    block = patch_size * merge_size
    assert height % block == 0
    assert width % block == 0
    if out is None:
        out = np.empty((height * width // patch_size**2, channels * patch_size**2), np.uint8)
    # Move a pixel row of a patch as one element: four times as fast as moving bytes.
    element = np.dtype(f"V{patch_size}")
    rows = np.ascontiguousarray(image).view(element)  # (C, H, W / patch)
    blocks = rows.reshape(channels, height // block, merge_size, patch_size, width // block, merge_size)
    places = out.view(element).reshape(height // block, width // block, merge_size, merge_size, -1, patch_size)
    places[...] = blocks.transpose(1, 4, 2, 5, 0, 3)
    return out


def unpatchify(
    patches: npt.NDArray[np.uint8], grid_h: int, grid_w: int, patch_size: int, merge_size: int
) -> npt.NDArray[np.uint8]:
    """Joins patches to an image: the inverse of :func:`patchify`.

    Args:
        patches: uint8 (grid_h * grid_w, C * patch_size²).
        grid_h: Patches along the height, a multiple of ``merge_size``.
        grid_w: Patches along the width, a multiple of ``merge_size``.
        patch_size: Side of a patch in pixels.
        merge_size: Patches per side that stay together.

    Returns:
        uint8 (C, patch_size * grid_h, patch_size * grid_w).
    """
    channels = patches.shape[1] // patch_size**2
    blocks = np.asarray(patches).reshape(
        grid_h // merge_size, grid_w // merge_size, merge_size, merge_size, channels, patch_size, patch_size
    )
    image = blocks.transpose(4, 0, 2, 5, 1, 3, 6)
    return np.ascontiguousarray(image).reshape(channels, grid_h * patch_size, grid_w * patch_size)
