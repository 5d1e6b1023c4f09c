"""The patch layout of Qwen-VL vision encoders, stored as uint8 without the temporal copy.

Source: ``Qwen2VLImageProcessor.patchify`` of transformers. Rows run over ``(gh/2, gw/2, 2, 2)``: the four patches
that the merger joins into one token are neighbours. Columns are ``(C, 16, 16)``; transformers' ``pixel_values``
have ``(C, T=2, 16, 16)`` with both temporal halves equal for an image.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vlmdata.format.schema import CHANNELS, MERGE_SIZE, PATCH_BYTES, PATCH_SIZE, TEMPORAL_PATCH_SIZE

if TYPE_CHECKING:
    import torch

# A patch row of 16 pixels moves as one 16-byte element: four times faster than moving bytes.
_PIXEL_ROW = np.dtype(np.complex128)
assert _PIXEL_ROW.itemsize == PATCH_SIZE


def patchify(image: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Cuts an image into patches.

    Args:
        image: uint8 (3, H, W), C-contiguous, H and W multiples of 32.

    Returns:
        uint8 (H/16 * W/16, 768).
    """
    channels, height, width = image.shape
    assert channels == CHANNELS
    assert height % (PATCH_SIZE * MERGE_SIZE) == 0
    assert width % (PATCH_SIZE * MERGE_SIZE) == 0
    rows = np.ascontiguousarray(image).view(_PIXEL_ROW)  # (C, H, W/16)
    blocks = rows.reshape(
        CHANNELS,
        height // (PATCH_SIZE * MERGE_SIZE),
        MERGE_SIZE,
        PATCH_SIZE,
        width // (PATCH_SIZE * MERGE_SIZE),
        MERGE_SIZE,
    )
    ordered = np.ascontiguousarray(blocks.transpose(1, 4, 2, 5, 0, 3))
    return ordered.view(np.uint8).reshape(-1, PATCH_BYTES)


def unpatchify(patches: npt.NDArray[np.uint8], grid_h: int, grid_w: int) -> npt.NDArray[np.uint8]:
    """Puts an image together again: the inverse of :func:`patchify`.

    Args:
        patches: uint8 (grid_h * grid_w, 768).
        grid_h: Patches along the height, even.
        grid_w: Patches along the width, even.

    Returns:
        uint8 (3, 16 * grid_h, 16 * grid_w).
    """
    blocks = np.asarray(patches).reshape(
        grid_h // MERGE_SIZE, grid_w // MERGE_SIZE, MERGE_SIZE, MERGE_SIZE, CHANNELS, PATCH_SIZE, PATCH_SIZE
    )
    image = blocks.transpose(4, 0, 2, 5, 1, 3, 6)
    return np.ascontiguousarray(image).reshape(CHANNELS, grid_h * PATCH_SIZE, grid_w * PATCH_SIZE)


def pixel_values(patches: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Expands stored patches into the ``pixel_values`` that transformers' processor would give.

    Exact in float32 (bit for bit; multiplying by the reciprocal is not). In bfloat16 every order of operations
    gives the same 256 values.

    Args:
        patches: uint8 (P, 768) on any device.
        dtype: Result dtype; float32 by default.

    Returns:
        (P, 1536), columns (C, T=2, 16, 16), normalised to [-1, 1] with mean = std = 0.5, on the patches' device.
    """
    import torch

    dtype = torch.float32 if dtype is None else dtype
    # A divisor on the device: CUDA turns division by a Python number into multiplication by its reciprocal, which
    # is off by one bit for some of the 256 values.
    half = torch.full((), 127.5, device=patches.device)
    values = patches.view(-1, CHANNELS, 1, PATCH_SIZE * PATCH_SIZE).to(torch.float32).sub_(half).div_(half)
    # Rounded to the target type before the temporal copy: half the work.
    copies = values.to(dtype).expand(-1, -1, TEMPORAL_PATCH_SIZE, -1)
    return copies.reshape(patches.shape[0], PATCH_BYTES * TEMPORAL_PATCH_SIZE)
