"""Patches as they are. Readers copy raw items without this codec, straight from the shard to their place."""

from __future__ import annotations

from collections.abc import Buffer

import numpy as np
import numpy.typing as npt

from vlmdata.families import Family
from vlmdata.media.codecs.base import Grid


class Raw:
    """The identity."""

    def encode(self, patches: npt.NDArray[np.uint8], grid: Grid, family: Family) -> Buffer:
        """The patches' own memory."""
        return memoryview(patches).cast("B")

    def decode(self, stored: Buffer, grid: Grid, family: Family, out: npt.NDArray[np.uint8]) -> None:
        """Copies the bytes.

        Raises:
            ValueError: If their number is not that of the patches.
        """
        out[:] = np.frombuffer(stored, np.uint8).reshape(out.shape)


CODEC = Raw()
