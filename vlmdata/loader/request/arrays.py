"""The layout of a batch's arrays in its buffer."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlmdata.families import Family
from vlmdata.loader.config import BatchPart, Pixels

_ALIGN = 64
#: numpy has no bfloat16: its bits are integers of the same size.
_DTYPES: Mapping[Pixels, str] = {"uint8": "|u1", "bfloat16": "<i2", "float32": "<f4"}


@dataclass(frozen=True)
class BufferField:
    """An array in a buffer.

    Attributes:
        name: Field of the batch.
        dtype: Dtype of the array.
        shape: Shape of the array.
        offset: Offset of the array, in bytes.
    """

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class BufferLayout:
    """The arrays of a batch, one after another, each aligned to 64 bytes.

    Attributes:
        fields: The arrays.
        bytes: Bytes from the buffer's start to the end of the last array and its alignment.
    """

    fields: tuple[BufferField, ...]
    bytes: int

    @classmethod
    def of(
        cls,
        parts: Collection[BatchPart],
        *,
        total_tokens: int,
        local_tokens: int,
        patches: int,
        family: Family,
        pixels: Pixels,
        weighted: bool,
        positions: bool = True,
    ) -> BufferLayout:
        """Lays out the arrays of the parts that a rank loads.

        Args:
            parts: The parts.
            total_tokens: Tokens of the whole pack.
            local_tokens: Tokens held here.
            patches: Patches held here.
            family: The family, which has the size of a patch.
            pixels: Dtype of the patches.
            weighted: Whether the batch has loss weights that differ from its loss mask.
            positions: Whether the batch has the positions of its tokens.
        """
        wanted: list[tuple[str, str, tuple[int, ...]]] = [
            ("position_ids", "<i8", (3, 1, total_tokens if positions else 0)),
            ("padding_mask", "|b1", (1, local_tokens)),
        ]
        if "tokens" in parts:
            wanted.append(("input_ids", "<i8", (1, local_tokens)))
        if "labels" in parts:
            wanted += [("labels", "<i8", (1, local_tokens)), ("loss_mask", "<f4", (1, local_tokens))]
            if weighted:
                wanted.append(("loss_weights", "<f4", (1, local_tokens)))
        if "pixels" in parts:
            frames = 1 if pixels == "uint8" else family.temporal_patch_size
            wanted.append(("patches", _DTYPES[pixels], (patches, frames * family.patch_bytes)))
        fields, offset = [], 0
        for name, dtype, shape in wanted:
            field = BufferField(name, np.dtype(dtype), shape, offset)
            fields.append(field)
            offset += -(-field.bytes // _ALIGN) * _ALIGN
        return cls(tuple(fields), offset)

    def views(self, buffer: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[np.generic]]:
        """Returns the arrays by name, as views of a buffer of at least ``bytes``."""
        return {
            field.name: buffer[field.offset : field.offset + field.bytes].view(field.dtype).reshape(field.shape)
            for field in self.fields
        }
