"""Planes of an image, transformed for better compression, with Zstandard level 1 (docs/decisions/0006).

An image with three equal channels stores only one. Otherwise green and blue are stored as differences to the previous
channel. If worthwhile, each row of pixels is stored as its difference to the row above, in bands of one row of tokens:
the rows of a band are restored together, which numpy does at memory speed. All differences are modulo 256.
"""

from __future__ import annotations

from collections.abc import Buffer, Mapping

import numpy as np
import numpy.typing as npt

from vlmdata.families import Family
from vlmdata.families.base import CHANNELS
from vlmdata.media.codecs.base import Item, ItemShape, cut_picture, picture_size

_LEVEL = 1
#: Bits of the first stored byte.
_GREY, _PREDICTED = 1, 2
#: Prediction takes time to undo, so it must save at least this share of the bytes.
_LEAST_SAVING = 0.1
#: One of this many bands is compressed both ways to decide.
_TRIAL_STRIDE = 8

Planes = npt.NDArray[np.uint8]
"""(C, H, W)"""
Bands = npt.NDArray[np.uint8]
"""(C, bands, rows per band, W)"""


class Zstd:
    """Format: one byte of flags, then a Zstandard frame of planes (channels, H, W)."""

    name = "zstd"
    summary = "lossless and fast to decode, 2 to 8 times smaller than raw"
    needs_file = False

    def libraries(self) -> Mapping[str, str]:
        """Returns the version of Arrow, which includes its own Zstandard."""
        import pyarrow as pa

        return {"pyarrow": pa.__version__}

    def encode(self, item: Item) -> Buffer:
        """Compresses the planes."""
        planes = _differences_of_channels(item.picture())
        flags = _GREY if len(planes) == 1 else 0
        bands = _bands(planes, item.family.factor)
        if _pays(bands[:, ::_TRIAL_STRIDE]):
            bands, flags = _predicted(bands), flags | _PREDICTED
        return bytes([flags]) + _compress(bands)

    def decode(self, stored: Buffer, shape: ItemShape, family: Family, out: npt.NDArray[np.uint8]) -> None:
        """Decompresses the planes, undoes the differences, and splits the image into patches in ``out``.

        Raises:
            ValueError: If the flags are not those of this codec.
            OSError: If the frame is damaged or does not contain exactly this image; no more than that is allocated.
        """
        import pyarrow as pa

        view = memoryview(stored).cast("B")
        flags = view[0]
        if flags & ~(_GREY | _PREDICTED):
            raise ValueError(f"its flags are {flags:#x}, which this version of vlmdata does not know")
        size = (1 if flags & _GREY else CHANNELS, *picture_size(shape, family))
        frame = pa.decompress(view[1:], decompressed_size=int(np.prod(size)), codec="zstd")
        planes = np.frombuffer(frame, np.uint8).reshape(size)
        if flags & _PREDICTED:
            _undo_prediction(planes, family.factor)
        for channel in range(1, len(planes)):
            planes[channel] += planes[channel - 1]
        cut_picture(planes, shape, family, out)


def _differences_of_channels(picture: Planes) -> Planes:
    """Returns the planes to store of an image (C, H, W), which is overwritten."""
    if all(np.array_equal(picture[0], other) for other in picture[1:]):
        return picture[:1]
    for channel in range(len(picture) - 1, 0, -1):
        picture[channel] -= picture[channel - 1]
    return picture


def _bands(planes: Planes, band: int) -> npt.NDArray[np.uint8]:
    """Returns a view (C, bands, rows per band, W)."""
    channels, height, width = planes.shape
    return planes.reshape(channels, height // band, band, width)


def _predicted(bands: Bands) -> Bands:
    predicted = bands.copy()
    predicted[:, :, 1:] -= bands[:, :, :-1]
    return predicted


def _undo_prediction(planes: Planes, band: int) -> None:
    rows = _bands(planes, band)
    for row in range(1, band):
        rows[:, :, row] += rows[:, :, row - 1]


def _pays(sample: Bands) -> bool:
    plain, predicted = len(_compress(sample)), len(_compress(_predicted(sample)))
    return predicted <= (1 - _LEAST_SAVING) * plain


def _compress(planes: Planes | Bands) -> bytes:
    import pyarrow as pa

    compressed: bytes = pa.Codec("zstd", compression_level=_LEVEL).compress(
        np.ascontiguousarray(planes).reshape(-1), asbytes=True
    )
    return compressed


CODEC = Zstd()
