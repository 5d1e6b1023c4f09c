"""What a codec is: how the patches of one item become the bytes that a shard stores, and patches again."""

from __future__ import annotations

from collections.abc import Buffer
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vlmdata.families import Family

Grid = tuple[int, int, int]
"""Patches of an item along t, h, w."""


class ItemCodec(Protocol):
    """Encodes and decodes single items, without loss. Pure: equal patches give equal bytes on every machine."""

    def encode(self, patches: npt.NDArray[np.uint8], grid: Grid, family: Family) -> Buffer:
        """The bytes to store.

        Args:
            patches: uint8 (P, bytes per patch), C-contiguous; only read.
            grid: Patches along t, h, w; P is their product.
            family: Whose patches they are.
        """

    def decode(self, stored: Buffer, grid: Grid, family: Family, out: npt.NDArray[np.uint8]) -> None:
        """Fills ``out`` with the patches. Any exception means that the bytes cannot be decoded.

        Args:
            stored: What :meth:`encode` returned, of sound checksum unless the user turned the check off.
            grid: As given to :meth:`encode`.
            family: As given to :meth:`encode`.
            out: uint8 (P, bytes per patch), C-contiguous; every byte is written.
        """
