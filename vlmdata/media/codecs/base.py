"""The codec protocol: encodes an item to the bytes in a shard, and decodes its patches."""

from __future__ import annotations

import math
from collections.abc import Buffer, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vlmdata.errors import UsageError
from vlmdata.families import Family
from vlmdata.families.chat import IMAGE as IMAGE
from vlmdata.families.chat import VIDEO as VIDEO

Grid = tuple[int, int, int]
"""Patches of an item along t, h, w."""
#: A codec that stores files decodes none of more pixels, whatever the header declares.
MOST_FILE_PIXELS = 2**28


@dataclass(frozen=True, slots=True)
class ItemShape:
    """What a sample stores for the vision tower, apart from the pixels.

    Attributes:
        kind: ``image`` or ``video``.
        grid: Patches along t, h, w.
        copies: Temporal copies of each patch that are stored: 1 if its frame is stored once and repeated when it is
            expanded (an image); the family's ``temporal_patch_size`` if the frames of a patch differ (a video).
    """

    kind: str
    grid: Grid
    copies: int = 1

    @property
    def patches(self) -> int:
        """Number of patches."""
        return math.prod(self.grid)

    @property
    def rows(self) -> int:
        """Rows of stored pixels: one per patch and copy, each of the family's ``patch_bytes``."""
        return self.patches * self.copies


@dataclass(frozen=True, eq=False)
class Item:
    """Input of a codec.

    Attributes:
        patches: uint8 (R, bytes per patch), C-contiguous; only read. R are the ``rows`` of the shape. The copies of a
            patch are adjacent.
        shape: Kind, grid and copies.
        family: Family of the patches.
        file: The image file of the patches; None if not available.
    """

    patches: npt.NDArray[np.uint8]
    shape: ItemShape
    family: Family
    file: bytes | None = None

    def picture(self) -> npt.NDArray[np.uint8]:
        """Joins the patches to one picture, uint8 (3, H, W): the frames of the item, one below the other."""
        t, h, w = self.shape.grid
        rows, copies = self.patches, self.shape.copies
        if copies > 1:
            rows = rows.reshape(t, h * w, copies, -1).swapaxes(1, 2).reshape(len(rows), -1)
        return self.family.unpatchify(rows, t * copies * h, w)


def picture_size(shape: ItemShape, family: Family) -> tuple[int, int]:
    """Returns (height, width) of :meth:`Item.picture` in pixels."""
    t, h, w = shape.grid
    return t * shape.copies * h * family.patch_size, w * family.patch_size


def cut_picture(picture: npt.NDArray[np.uint8], shape: ItemShape, family: Family, out: npt.NDArray[np.uint8]) -> None:
    """Cuts a picture into the patches of an item: the inverse of :meth:`Item.picture`.

    Args:
        picture: uint8 (3 or 1, H, W); one channel stands for all three.
        shape: The item's shape.
        family: Its family.
        out: uint8 (R, bytes per patch), C-contiguous; every byte is written.
    """
    if shape.copies == 1:
        family.patchify(picture, out)
        return
    (t, h, w), frames = shape.grid, np.empty_like(out)
    family.patchify(picture, frames)
    out.reshape(t, h * w, shape.copies, -1)[...] = frames.reshape(t, shape.copies, h * w, -1).swapaxes(1, 2)


class Unsuitable(Exception):
    """Raised by :meth:`ItemCodec.encode` for an item that the codec does not store. Its sample is rejected.

    The text says why, with the value found and the value wanted.
    """


class ItemCodec(Protocol):
    """Encodes and decodes single items without loss.

    Pure: equal items give equal bytes on every machine with the same :meth:`libraries`.

    Attributes:
        name: Its name in options and datasets, the same as in the registry.
        summary: Content and purpose, as a phrase for help texts.
        needs_file: Whether it encodes :attr:`Item.file` and not the patches.
    """

    name: str
    summary: str
    needs_file: bool

    def libraries(self) -> Mapping[str, str]:
        """Returns the versions of libraries that can change the stored bytes, by name.

        Raises:
            UsageError: If a package that the codec needs is not installed.
        """

    def encode(self, item: Item) -> Buffer:
        """Returns the bytes to store.

        Raises:
            Unsuitable: If the codec does not store this item. Any other exception ends the run.
        """

    def decode(self, stored: Buffer, shape: ItemShape, family: Family, out: npt.NDArray[np.uint8]) -> None:
        """Fills ``out`` with the patches. Any exception except UsageError means that the bytes cannot be decoded.

        Args:
            stored: Result of :meth:`encode`, with a valid checksum unless the check is off.
            shape: As passed to :meth:`encode`.
            family: As passed to :meth:`encode`.
            out: uint8 (R, bytes per patch), C-contiguous; every byte is written.
        """


def fault_of_codec(found: object) -> str:
    """Says why an object is no codec; empty if it is one."""
    if isinstance(found, type):
        return "it is a class, not an instance of it"
    lacking = [
        name for name in ("decode", "encode", "libraries", "name", "needs_file", "summary") if not hasattr(found, name)
    ]
    return f"it is no codec: it has no {' and no '.join(lacking)}" if lacking else ""


def missing_package(codec: str, package: str, extra: str = "") -> UsageError:
    """Returns the error for a codec whose package is not installed.

    Args:
        codec: Name of the codec.
        package: The package.
        extra: The extra of vlmdata with the package; "" if vlmdata itself requires it.
    """
    install = f"'vlmdata[{extra}]'" if extra else package
    return UsageError(f"codec {codec} needs the package {package}: pip install {install}")
