"""A request for one batch, small enough to send to a worker: what to read of a pack, and where it goes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlmdata.context_parallel import Slice, chunk_ranges
from vlmdata.loader.config import BatchPart, Pixels
from vlmdata.loader.request.index_rows import IndexedPack, IntArray
from vlmdata.loader.state import Position
from vlmdata.packing.image_owners import image_owners

_ALIGN = 64
#: numpy has no bfloat16: its bits are integers of the same size.
_DTYPES: Mapping[Pixels, str] = {"uint8": "|u1", "bfloat16": "<i2", "float32": "<f4"}


@dataclass(frozen=True)
class PlacedArray:
    """An array of a batch at an offset in its buffer, in bytes."""

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class BatchArrays:
    """The arrays of a batch, one after another in its buffer, each aligned to 64 bytes; ``bytes`` of all."""

    placed: tuple[PlacedArray, ...]
    bytes: int

    @property
    def has_patches(self) -> bool:
        """Whether one of them holds pixels."""
        return any(each.name == "patches" for each in self.placed)

    def views(self, buffer: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[np.generic]]:
        """Returns the arrays by name, as views of a buffer of at least ``bytes``."""
        return {
            each.name: buffer[each.offset : each.offset + each.bytes].view(each.dtype).reshape(each.shape)
            for each in self.placed
        }


@dataclass(frozen=True, eq=False)
class PackRequest:
    """A batch to make."""

    pack: IndexedPack
    position: Position
    following: Position  # of the next batch
    context_parallel: Slice | None  # the slice of the pack held here; None means all of it
    ranges: IntArray  # (r, 2), token ranges of the pack held here, ascending
    held: IntArray  # (M,), images read here, ascending
    pixels: Pixels  # dtype of the patches in the batch
    arrays: BatchArrays  # to fill

    @classmethod
    def of(
        cls,
        pack: IndexedPack,
        position: Position,
        following: Position,
        parts: Collection[BatchPart],
        pixels: Pixels,
        context_parallel: Slice | None,
        images: IntArray | None = None,
    ) -> PackRequest:
        """Returns the request for some parts of a pack or of a slice of it.

        ``images`` are those to read, ascending, and no positions, as for a tower of its own; None means the images that
        the slice encodes.
        """
        bounds, grids = pack.cu_seqlens_padded, pack.images.grids
        if context_parallel is None:
            ranges, held = bounds[[[0, -1]]], np.arange(len(grids))
        else:
            rank, size = context_parallel.rank, context_parallel.size
            ranges = chunk_ranges(bounds, size, rank).reshape(-1, 2)
            held = np.flatnonzero(image_owners(grids, size) == rank)
        held = held if images is None else images
        rows = pack.images.rows if pixels == "uint8" else grids.prod(axis=1)
        tokens, patches = int((ranges[:, 1] - ranges[:, 0]).sum()), int(rows[held].sum())
        arrays = _arrays(pack, parts, pixels, tokens, patches, positions=images is None)
        return cls(pack, position, following, context_parallel, ranges, held, pixels, arrays)

    def whole(self, parts: Collection[BatchPart]) -> PackRequest:
        """Returns the request for some parts of the whole pack."""
        return PackRequest.of(self.pack, self.position, self.following, parts, self.pixels, None)


def _arrays(
    pack: IndexedPack, parts: Collection[BatchPart], pixels: Pixels, tokens: int, patches: int, positions: bool
) -> BatchArrays:
    """Places the arrays of some parts of a pack, of which so many tokens and patches are held here."""
    wanted: list[tuple[str, str, tuple[int, ...]]] = [
        ("position_ids", "<i8", (len(pack.family.position_axes), 1, pack.total_tokens if positions else 0)),
        ("padding_mask", "|b1", (1, tokens)),
    ]
    if "tokens" in parts:
        wanted.append(("input_ids", "<i8", (1, tokens)))
    if "labels" in parts:
        wanted += [("labels", "<i8", (1, tokens)), ("loss_mask", "<f4", (1, tokens))]
        if pack.is_weighted:
            wanted.append(("loss_weights", "<f4", (1, tokens)))
    if "pixels" in parts:
        frames = 1 if pixels == "uint8" else pack.family.temporal_patch_size
        wanted.append(("patches", _DTYPES[pixels], (patches, frames * pack.family.patch_bytes)))
    placed, offset = [], 0
    for name, dtype, shape in wanted:
        array = PlacedArray(name, np.dtype(dtype), shape, offset)
        placed.append(array)
        offset += -(-array.bytes // _ALIGN) * _ALIGN
    return BatchArrays(tuple(placed), offset)
