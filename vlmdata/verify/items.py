"""The audit of stored items: do they lie where the index says, and does each decode?"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt
import xxhash

from vlmdata.errors import DatasetFormatError
from vlmdata.families import Family
from vlmdata.format.index_row import IndexRow
from vlmdata.format.schema import IMAGE, ITEMS_MEMBER
from vlmdata.format.shard import ItemPlace
from vlmdata.media.codecs import RAW, decode_item


def decode_items(
    data: mmap.mmap, found: tuple[int, int] | None, row: IndexRow, family: Family
) -> npt.NDArray[np.uint8] | str:
    """Decodes the items of a sample that a codec encoded.

    Args:
        data: The shard.
        found: First byte and bytes of the member ``items.bin``, as the tar has it.
        row: What the index says of the sample.
        family: The dataset's family.

    Returns:
        The patches, uint8 (P, bytes per patch); or what is wrong, as a sentence.
    """
    if found is None:
        return f"{ITEMS_MEMBER}: not in the tar"
    start, size = found
    problem = _places_problem(row, start, start + size)
    if problem:
        return problem
    patches = np.empty((row.num_patches, family.patch_bytes), np.uint8)
    begin = 0
    checksums = row.placement.data_checksums[-1]
    for number, (item, grid, expected) in enumerate(zip(row.items, row.image_grid_thw, checksums, strict=True)):
        stored = data[item.offset : item.offset + item.bytes]
        if (checksum := xxhash.xxh3_64_intdigest(stored)) != expected:
            return f"image {number}: xxh3 {checksum:016x}, the index says {expected:016x}"
        end = begin + grid[0] * grid[1] * grid[2]
        try:
            decode_item(item.codec, stored, grid, family, patches[begin:end], f"image {number}")
        except DatasetFormatError as error:
            return str(error)
        begin = end
    return patches


def raw_items_problem(row: IndexRow, patch_bytes: int) -> str:
    """What is wrong with the index's items of a sample with ``patches.npy``: its images, one after another.

    Empty if nothing is, or if the sample has ``items.bin``.
    """
    offset = row.placement.data_offsets[-1]
    if offset < 0:
        return ""
    for number, (item, (t, h, w)) in enumerate(zip(row.items, row.image_grid_thw, strict=True)):
        expected = ItemPlace(offset, t * h * w * patch_bytes, IMAGE, RAW)
        if item != expected:
            return f"image {number} is {item}, its grid and patches.npy say {expected}"
        offset += expected.bytes
    return ""


def _places_problem(row: IndexRow, start: int, stop: int) -> str:
    at = start
    for number, item in enumerate(row.items):
        if item.kind != IMAGE:
            return f"item {number} is of kind {item.kind!r}, which this vlmdata does not know"
        if item.offset != at or item.bytes < 0:
            return f"image {number} begins at byte {at} of the shard, the index says {item.offset}"
        at += item.bytes
    return "" if at == stop else f"{ITEMS_MEMBER} ends at byte {stop} of the shard, its items in the index at {at}"
