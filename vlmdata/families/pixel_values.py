"""Expands stored patches to the ``pixel_values`` of transformers' processor.

Bitwise exact in float32: the mean is subtracted and the difference divided, as in transformers (a product with the
reciprocal is not exact). Narrower dtypes round these float32 values; in one thread they are looked up.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import lru_cache

import torch

#: Patches that a CPU core expands at once: enough that calls of torch do not count, and few enough for its cache.
_BLOCK = 512
#: Patches from which on looking them up is faster.
_FEW = 256
#: Pairs of pixels, each a uint16.
_PAIRS = 65_536
_memory = threading.local()


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
    stored = patches.view(len(out), copies, out.shape[1], out.shape[3]).transpose(1, 2)
    if _can_look_up(patches, out):
        pairs = stored.view(torch.uint16)
        _look_up(pairs, _values_of_pairs(tuple(mean), tuple(std), out.dtype), out.view(torch.int32))
    else:
        _calculate(stored, mean, std, out)
    return out


def _calculate(stored: torch.Tensor, mean: Sequence[float], std: Sequence[float], out: torch.Tensor) -> None:
    """Fills (P, C, T, patch²) from uint8 (P, C, copies, patch²)."""
    # Tensors on the device: CUDA converts division by a Python number to a product with its reciprocal.
    centre, scale = (each.to(out.device) for each in _of_pixels(tuple(mean), tuple(std)))
    on_cpu, threads = out.device.type == "cpu", torch.get_num_threads()
    block = _BLOCK * threads if on_cpu else len(out)
    size = (min(block, len(out)), *stored.shape[1:])
    values = _kept("values", size, torch.float32) if on_cpu and threads == 1 else torch.empty(size, device=out.device)
    for begin in range(0, len(out), max(block, 1)):
        some, to = stored[begin : begin + block], out[begin : begin + block]
        here = values[: len(some)].copy_(some).sub_(centre)
        if out.dtype == torch.float32:
            torch.div(here.expand_as(to), scale, out=to)
        else:
            to.copy_(here.div_(scale).expand_as(to))


def _can_look_up(patches: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether the pixels of each channel are pairs, and looking them up is faster.

    It uses one thread. In float32 it is slower, because the values of all pairs fill the cache.
    """
    if len(out) < _FEW or out.dtype.itemsize != 2 or out.device.type != "cpu" or torch.get_num_threads() > 1:
        return False
    places = (patches.data_ptr() % 2, patches.storage_offset() % 2, out.data_ptr() % 4, out.storage_offset() % 2)
    return out.shape[3] % 2 == 0 and patches.is_contiguous() and not any(places)


def _look_up(pairs: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    """Fills int32 (P, C, T, pairs) from uint16 (P, C, copies, pairs)."""
    places, found = (
        _kept(name, (min(_BLOCK, len(out)), *pairs.shape[1:]), torch.int32) for name in ("places", "found")
    )
    channel = torch.arange(0, len(table), _PAIRS, dtype=torch.int32, device="cpu").view(1, -1, 1, 1)
    for begin in range(0, len(out), _BLOCK):
        some, to = pairs[begin : begin + _BLOCK], out[begin : begin + _BLOCK]
        here = places[: len(some)].copy_(some)
        if channel.numel() > 1:
            here += channel
        if here.shape == to.shape:
            torch.index_select(table, 0, here.view(-1), out=to.view(-1))
        else:
            values = torch.index_select(table, 0, here.view(-1), out=found[: len(some)].view(-1))
            to.copy_(values.view(here.shape).expand_as(to))


def _kept(name: str, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns memory of this thread, the same in each call: new memory costs a page fault per 4 KiB."""
    elements = math.prod(size)
    held: torch.Tensor | None = getattr(_memory, name, None)
    if held is None or len(held) < elements:
        with torch.inference_mode(False):  # such a tensor could only be changed in that mode
            held = torch.empty(elements, dtype=dtype, device="cpu")
        setattr(_memory, name, held)
    return held[:elements].view(size)


@lru_cache(maxsize=8)
def _of_pixels(mean: tuple[float, ...], std: tuple[float, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns mean and deviation of pixels from 0 to 255, (1, C, 1, 1)."""
    centre, scale = (torch.tensor(each, dtype=torch.float32, device="cpu") * 255.0 for each in (mean, std))
    return centre.view(1, -1, 1, 1), scale.view(1, -1, 1, 1)


@lru_cache(maxsize=8)
def _values_of_pairs(mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns the two values of each pair of pixels as an int32, channel after channel; once if channels are equal."""
    if len(set(zip(mean, std, strict=True))) == 1:
        mean, std = mean[:1], std[:1]
    pixels = torch.arange(_PAIRS, dtype=torch.int32, device="cpu").to(torch.uint16).view(torch.uint8)
    values = torch.empty(1, len(mean), 1, len(pixels), dtype=dtype, device="cpu")
    _calculate(pixels.expand(values.shape), mean, std, values)
    return values.view(torch.int32).view(-1)
