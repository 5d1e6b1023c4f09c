"""A codec for tests, as docs/extend/codec.md shows one: zlib over the planes of each channel."""

from __future__ import annotations

import zlib
from collections.abc import Buffer, Mapping

import numpy as np
import numpy.typing as npt

from vlmdata.families import Family
from vlmdata.media.codecs import Item, ItemShape


class ShuffledZlib:
    """Columns of the patches one after another, compressed."""

    name = "shuffled-zlib"
    summary = "for tests"
    needs_file = False

    def libraries(self) -> Mapping[str, str]:
        return {}

    def encode(self, item: Item) -> Buffer:
        assert item.patches.shape == (item.shape.rows, item.family.patch_bytes)
        return zlib.compress(np.ascontiguousarray(item.patches.T), level=1)

    def decode(self, stored: Buffer, shape: ItemShape, family: Family, out: npt.NDArray[np.uint8]) -> None:
        assert out.shape == (shape.rows, family.patch_bytes)
        out[:] = np.frombuffer(zlib.decompress(stored), np.uint8).reshape(out.T.shape).T


CODEC = ShuffledZlib()
