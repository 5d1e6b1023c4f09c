"""Unmodified patches. Readers copy raw items without this codec, directly from the shard to their place."""

from __future__ import annotations

from collections.abc import Buffer, Mapping

import numpy as np
import numpy.typing as npt

from vlmdata.families import Family
from vlmdata.media.codecs.base import Item, ItemShape


class Raw:
    """The identity codec."""

    name = "raw"
    summary = "patches as they are, fastest to read and largest"
    needs_file = False

    def libraries(self) -> Mapping[str, str]:
        """Returns no libraries."""
        return {}

    def encode(self, item: Item) -> Buffer:
        """Returns the patches' own memory."""
        return memoryview(item.patches).cast("B")

    def decode(self, stored: Buffer, shape: ItemShape, family: Family, out: npt.NDArray[np.uint8]) -> None:
        """Copies the bytes.

        Raises:
            ValueError: If their number differs from that of the patches.
        """
        out[:] = np.frombuffer(stored, np.uint8).reshape(out.shape)


CODEC = Raw()
