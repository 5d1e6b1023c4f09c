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
    patches: torch.Tensor, mean: Sequence[float], std: Sequence[float], out: torch.Tensor, copies: int = 1
) -> torch.Tensor:
    """Normalises patches, and repeats those that are stored once for each frame.

    Args:
        patches: uint8 (P * copies, C * patch²) on any device; the copies of a patch are adjacent.
        mean: Mean per channel, for values from 0 to 1.
        std: Standard deviation per channel, for values from 0 to 1.
        out: Where the values go: (P, C, T, patch²), of the wanted dtype, contiguous, on the patches' device.
        copies: Temporal copies of each patch that are stored: 1 or T.

    Returns:
        ``out``.
    """
    channels, frames = out.shape[1:3]
    # Use tensors on the device: CUDA converts division by a Python number to a product with its reciprocal.
    centre, scale = ((torch.tensor(each, device=out.device) * 255.0).view(1, channels, 1, 1) for each in (mean, std))
    stored = patches.view(len(out), copies, channels, out.shape[3]).transpose(1, 2)
    block = len(out) if out.device.type != "cpu" else _BLOCK * torch.get_num_threads()
    values = torch.empty(min(block, len(out)), channels, copies, out.shape[3], device=out.device)
    for begin in range(0, len(out), max(block, 1)):
        some = stored[begin : begin + block]
        here = values[: len(some)].copy_(some).sub_(centre).div_(scale)
        out[begin : begin + block].copy_(here.expand(-1, -1, frames, -1))
    return out
