"""The audit of stored items: checks that they are at the indexed offsets, and decodes each."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from vlmdata.errors import DatasetFormatError
from vlmdata.families import Family
from vlmdata.format.index_row import IndexRow
from vlmdata.format.schema import ITEMS_MEMBER, KIND_FEATURES, METADATA_MEMBER
from vlmdata.format.shard import ItemName, ItemPlace, item_metadata
from vlmdata.media.codecs import IMAGE, ItemShape, decode_item
from vlmdata.media.versions import require_pixels
from vlmdata.verify.sample import SampleRules
from vlmdata.wording import counted

Owners = Mapping[tuple[str, int, int], ItemName]
"""Codec, first byte and bytes of an item to the item of the shard that was written there."""


def owners_of(rows: Iterable[IndexRow]) -> Owners:
    """The items of a shard's samples that lie within their own sample. The bytes of the others are shared."""
    owners: dict[tuple[str, int, int], ItemName] = {}
    for row in rows:
        start, stop = row.placement.offset, row.placement.offset + row.placement.size
        for number, item in enumerate(row.items):
            if start <= item.offset < stop:
                owners.setdefault(_place(item), ItemName(row.key, number))
    return owners


def owners_in(data: mmap.mmap, members: Mapping[str, tuple[int, int]]) -> Owners:
    """As :func:`owners_of`, for a shard of which the index has a part of the samples: reads the metadata of all.

    Args:
        data: The shard.
        members: Offset and size in bytes by member name, in the order of the tar.
    """
    owners: dict[tuple[str, int, int], ItemName] = {}
    for name, (at, _) in members.items():
        key, _, member = name.partition(".")
        text = members.get(f"{key}.{METADATA_MEMBER}")
        if member != ITEMS_MEMBER or text is None:
            continue
        try:
            items = json.loads(data[text[0] : sum(text)])["items"]
            for number, item in enumerate(items):
                if "same_as" not in item:
                    owners.setdefault((item["codec"], at, item["bytes"]), ItemName(key, number))
                    at += item["bytes"]
        except (ValueError, KeyError, TypeError):  # samples of the index have an audit of their metadata
            continue
    return owners


def described_items(row: IndexRow, owners: Owners) -> list[dict[str, Any]]:
    """What the metadata of a sample must say of its encoded items."""
    found = []
    for number, item in enumerate(row.items):
        owner = owners.get(_place(item))
        found.append(item_metadata(item, None if owner == ItemName(row.key, number) else owner))
    return found


def _place(item: ItemPlace) -> tuple[str, int, int]:
    return item.codec, item.offset, item.bytes


def audit_items(
    data: mmap.mmap,
    found: tuple[int, int] | None,
    row: IndexRow,
    rules: SampleRules,
    owners: Owners,
    *,
    pixels: bool,
) -> npt.NDArray[np.uint8] | str:
    """Checks the items of a sample that a codec encoded: where they lie, their stored bytes, and what they decode to.

    Args:
        data: The shard.
        found: Offset and size in bytes of the member ``items.bin`` in the tar.
        row: The sample's index row.
        rules: Tells the dataset's family.
        owners: The items of the shard; see :func:`owners_of`.
        pixels: Whether to decode them and check the patches.

    Returns:
        The patches, uint8 (R, bytes per patch), all 0 if they are not decoded; or what is wrong, as a sentence.
    """
    if found is None:
        return f"{ITEMS_MEMBER}: not in the tar"
    start, size = found
    problem = _places_problem(row, start, start + size, owners, rules.family)
    if problem:
        return problem
    whole, begin = (sum(item.shape.rows for item in row.items), rules.family.patch_bytes), 0
    patches = np.empty(whole, np.uint8) if pixels else np.broadcast_to(np.uint8(0), whole)
    for number, item in enumerate(row.items):
        stored, what = data[item.offset : item.offset + item.bytes], f"{item.shape.kind} {number}"
        if (checksum := xxhash.xxh3_64_intdigest(stored)) != item.checksum:
            return f"{what}: xxh3 {checksum:016x}, but the index says {item.checksum:016x}"
        if not pixels:
            continue
        rows = patches[begin : begin + item.shape.rows]
        try:
            decode_item(item.codec, stored, item.shape, rules.family, rows, what)
            require_pixels(rows, item.pixel_checksum, rules.libraries, what)
        except DatasetFormatError as error:
            return str(error)
        begin += item.shape.rows
    return patches


def raw_items_problem(row: IndexRow, patch_bytes: int) -> str:
    """Describes the fault in the index's items of a sample with ``patches.npy``, which are its consecutive images.

    Empty if there is no fault, or if the sample has ``items.bin``.
    """
    offset = row.placement.patches_offset
    if offset < 0:
        return ""
    for number, item in enumerate(row.items):
        shape = ItemShape(IMAGE, item.shape.grid)
        expected = ItemPlace(shape, offset, shape.rows * patch_bytes, item.checksum, item.checksum)
        if item != expected:
            return f"image {number} is {item}, but its grid and patches.npy say {expected}"
        offset += expected.bytes
    return ""


def _places_problem(row: IndexRow, start: int, stop: int, owners: Owners, family: Family) -> str:
    at = start
    for number, item in enumerate(row.items):
        kind, copies = item.shape.kind, item.shape.copies
        if kind not in KIND_FEATURES:
            return f"item {number} is of kind {kind!r}, which this version of vlmdata does not know"
        if copies not in ((1,) if kind == IMAGE else (1, family.temporal_patch_size)):
            return f"{kind} {number} stores {counted(copies, 'temporal copy', 'temporal copies')} of each patch"
        owner = owners.get(_place(item))
        is_shared = owner not in (None, ItemName(row.key, number)) and item.offset < at
        if item.bytes < 0 or (item.offset != at and not is_shared):
            return (
                f"{kind} {number}: the index says {item.bytes} bytes from byte {item.offset} of the shard, which are "
                f"neither those at byte {at} nor an earlier item"
            )
        at += 0 if is_shared else item.bytes
    return "" if at == stop else f"{ITEMS_MEMBER} ends at byte {stop} of the shard, but the index says {at}"
