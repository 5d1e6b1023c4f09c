"""The codec protocol: encodes an item to the bytes in a shard, and decodes its patches."""

from __future__ import annotations

from collections.abc import Buffer, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vlmdata.errors import UsageError
from vlmdata.families import Family

Grid = tuple[int, int, int]
"""Patches of an item along t, h, w."""
#: A codec that stores files decodes none of more pixels, whatever the header declares.
MOST_FILE_PIXELS = 2**28


@dataclass(frozen=True, eq=False)
class Item:
    """Input of a codec.

    Attributes:
        patches: uint8 (P, bytes per patch), C-contiguous; only read.
        grid: Patches along t, h, w; P is their product.
        family: Family of the patches.
        file: The image file of the patches; None if not available.
    """

    patches: npt.NDArray[np.uint8]
    grid: Grid
    family: Family
    file: bytes | None = None


class ItemCodec(Protocol):
    """Encodes and decodes single items without loss.

    Pure: equal items give equal bytes on every machine with the same :meth:`libraries`.

    Attributes:
        summary: Content and purpose, as a phrase for help texts.
        needs_file: Whether it encodes :attr:`Item.file` and not the patches.
    """

    summary: str
    needs_file: bool

    def libraries(self) -> Mapping[str, str]:
        """Returns the versions of libraries that can change the stored bytes, by name.

        Raises:
            UsageError: If a package that the codec needs is not installed.
        """

    def encode(self, item: Item) -> Buffer:
        """Returns the bytes to store."""

    def decode(self, stored: Buffer, grid: Grid, family: Family, out: npt.NDArray[np.uint8]) -> None:
        """Fills ``out`` with the patches. Any exception except UsageError means that the bytes cannot be decoded.

        Args:
            stored: Result of :meth:`encode`, with a valid checksum unless the check is off.
            grid: As passed to :meth:`encode`.
            family: As passed to :meth:`encode`.
            out: uint8 (P, bytes per patch), C-contiguous; every byte is written.
        """


def missing_package(codec: str, package: str, extra: str = "") -> UsageError:
    """Returns the error for a codec whose package is not installed.

    Args:
        codec: Name of the codec.
        package: The package.
        extra: The extra of vlmdata with the package; "" if vlmdata itself requires it.
    """
    install = f"'vlmdata[{extra}]'" if extra else package
    return UsageError(f"codec {codec} needs the package {package}: pip install {install}")
