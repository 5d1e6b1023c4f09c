"""A digest of the weights that adapters belong to, which does not depend on layout or file format."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

#: Integer type of as many bits.
_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def counts(canonical: str) -> bool:
    """Whether a weight is part of the digest. Those of multi-token prediction are not: many files lack them."""
    return not canonical.startswith("language.predictor.")


def share(canonical: str, values: Tensor) -> int:
    """Returns what some values of a weight add to the digest: the sum of their bits, times a number of its name.

    The digest is the sum over all frozen values, modulo 2^64.
    """
    if not values.numel():
        return 0
    bits = int(values.reshape(-1).view(_BITS[values.dtype]).sum(dtype=torch.int64))
    return (zlib.crc32(canonical.encode()) | 1) * bits


def formatted(total: int) -> str:
    """Returns a digest as 16 hex digits."""
    return f"{total % 2**64:016x}"
