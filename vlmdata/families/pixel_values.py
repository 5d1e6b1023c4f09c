"""Expands stored patches to the ``pixel_values`` of transformers' processor.

Bitwise exact in float32: the mean is subtracted and the difference divided, as in transformers (a product with the
reciprocal is not exact). Narrower dtypes round these float32 values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: Patches that a CPU core expands at once: their float32 values stay in its cache. Look-up tables were not faster.
_BLOCK = 256


def expand_patches(
    patches: torch.Tensor, mean: Sequence[float], std: Sequence[float], out: torch.Tensor
) -> torch.Tensor:
    """Normalises patches and repeats them for each frame.

    Args:
        patches: uint8 (P, C * patch²) on any device.
        mean: Mean per channel, for values from 0 to 1.
        std: Standard deviation per channel, for values from 0 to 1.
        out: Where the values go: (P, C, T, patch²), of the wanted dtype, contiguous, on the patches' device.

    Returns:
        ``out``.
    """
    channels, frames = out.shape[1:3]
    # Use tensors on the device: CUDA converts division by a Python number to a product with its reciprocal.
    centre, scale = ((torch.tensor(each, device=out.device) * 255.0).view(1, channels, 1, 1) for each in (mean, std))
    block = len(patches) if out.device.type != "cpu" else _BLOCK * torch.get_num_threads()
    values = torch.empty(min(block, len(patches)), channels, 1, out.shape[3], device=out.device)
    for begin in range(0, len(patches), max(block, 1)):
        some = patches[begin : begin + block]
        here = values[: len(some)].copy_(some.reshape(len(some), channels, 1, -1)).sub_(centre).div_(scale)
        out[begin : begin + block].copy_(here.expand(-1, -1, frames, -1))
    return out
