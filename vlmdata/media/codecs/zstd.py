"""Planes of an image or of a video's frames, transformed for better compression, with Zstandard level 1.

An item with three equal channels stores only one. Otherwise green and blue are stored as differences to the previous
channel. If worthwhile, each row of pixels is stored as its difference to the row above, in bands of one row of tokens:
the rows of a band are restored together, which numpy does at memory speed. A frame of a video is stored as its
difference to the frame before if that is smaller. All differences are modulo 256 (docs/decisions/0006 and 0090).
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
_GREY, _PREDICTED, _FRAMES = 1, 2, 4
#: Prediction takes time to undo, so it must save at least this share of the bytes.
_LEAST_SAVING = 0.1
#: One of this many bands is compressed both ways to decide.
_TRIAL_STRIDE = 8

Planes = npt.NDArray[np.uint8]
"""(C, H, W)"""
Bands = npt.NDArray[np.uint8]
"""(C, bands, rows per band, W)"""
Frames = npt.NDArray[np.uint8]
"""(C, N, H, W)"""
Changes = npt.NDArray[np.bool_]
"""(N,), which frames are stored as differences to the frame before; never the first."""


class Zstd:
    """Format: one byte of flags, then a Zstandard frame of planes (channels, H, W), frames one below the other.

    If some frames are differences to the frame before, bits that tell which precede the Zstandard frame, the first
    frame in the lowest bit.
    """

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
        stored, band = planes, item.family.factor
        if _pays(_bands(planes, band)[:, ::_TRIAL_STRIDE]):
            stored, flags = _predicted(_bands(planes, band)).reshape(planes.shape), flags | _PREDICTED
        changes = _take_changes(_frames(stored, item.shape), _frames(planes, item.shape), band)
        if not changes.any():
            return bytes([flags]) + _compress(stored)
        told = np.packbits(changes, bitorder="little").tobytes()
        return bytes([flags | _FRAMES]) + told + _compress(stored)

    def decode(self, stored: Buffer, shape: ItemShape, family: Family, out: npt.NDArray[np.uint8]) -> None:
        """Decompresses the planes, undoes the differences, and splits the image into patches in ``out``.

        Raises:
            ValueError: If the flags are not those of this codec, or do not fit the item.
            OSError: If the frame is damaged or does not contain exactly this item; no more than that is allocated.
        """
        import pyarrow as pa

        view = memoryview(stored).cast("B")
        flags = view[0]
        if flags & ~(_GREY | _PREDICTED | _FRAMES):
            raise ValueError(f"its flags are {flags:#x}, which this version of vlmdata does not know")
        changes, begin = _told_changes(view[1:], shape) if flags & _FRAMES else None, 1
        if changes is not None:
            begin += -(-len(changes) // 8)
        size = (1 if flags & _GREY else CHANNELS, *picture_size(shape, family))
        frame = pa.decompress(view[begin:], decompressed_size=int(np.prod(size)), codec="zstd")
        planes = np.frombuffer(frame, np.uint8).reshape(size)
        if changes is not None:
            _undo_changes(_frames(planes, shape), changes, family.factor if flags & _PREDICTED else 0)
        elif flags & _PREDICTED:
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


def _frames(planes: Planes, shape: ItemShape) -> Frames:
    """Returns a view of the frames of an item."""
    channels, height, width = planes.shape
    count = shape.grid[0] * shape.copies
    return planes.reshape(channels, count, height // count, width)


def _take_changes(stored: Frames, frames: Frames, band: int) -> Changes:
    """Replaces the frames in ``stored`` that are smaller as differences to the frame before. Returns which.

    ``frames`` has them as they are, and may be the same memory.
    """
    changes = np.zeros(frames.shape[1], np.bool_)
    for number in range(len(changes) - 1, 0, -1):  # the frame before is needed as it is
        change = frames[:, number] - frames[:, number - 1]
        here, there = (_bands(each, band)[:, ::_TRIAL_STRIDE] for each in (stored[:, number], change))
        if len(_compress(there)) < len(_compress(here)):
            stored[:, number], changes[number] = change, True
    return changes


def _told_changes(told: memoryview, shape: ItemShape) -> Changes:
    """Reads which frames are differences.

    Raises:
        ValueError: If the item has not these frames.
    """
    count = shape.grid[0] * shape.copies
    bits = np.unpackbits(np.frombuffer(told[: -(-count // 8)], np.uint8), bitorder="little").view(np.bool_)
    if len(bits) < count or bits[0] or bits[count:].any():
        raise ValueError(f"it tells changes of other frames than the {count} of the item")
    return bits[:count]


def _undo_changes(frames: Frames, changes: Changes, band: int) -> None:
    """Restores frames; whole ones have predicted rows if ``band`` is not 0."""
    for number, changed in enumerate(changes.tolist()):
        if changed:
            frames[:, number] += frames[:, number - 1]
        elif band:
            _undo_prediction(frames[:, number], band)


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
