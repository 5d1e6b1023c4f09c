"""Rebuilds index rows from a shard. All index data of a sample follows from the sample's bytes."""

from __future__ import annotations

import hashlib
import json
import mmap
import tarfile
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy.typing as npt
import xxhash

from vlmdata.families import Family
from vlmdata.families.blocks import Blocks
from vlmdata.format.index_row import IndexRow
from vlmdata.format.manifest import ShardInfo
from vlmdata.format.schema import ITEMS_MEMBER, MEMBER_BY_NAME, METADATA_MEMBER
from vlmdata.format.shard import ABSENT, BLOCK, ArrayPlace, ItemName, ItemPlace, Placement, read_npy
from vlmdata.format.source_columns import SOURCE
from vlmdata.media.codecs import IMAGE, VIDEO, Grid, ItemShape

_Found = dict[str, tuple[int, npt.NDArray[Any]]]
"""Array and offset of its data in bytes, by member name."""
#: The member with the grids of a kind of items.
_GRIDS = {IMAGE: "image_grid_thw", VIDEO: "video_grid_thw"}


def index_rows_of(
    directory: Path, number: int, info: ShardInfo, tokens: Mapping[str, tuple[int, ...]], family: Family
) -> list[IndexRow] | None:
    """Reads the index rows of a shard's samples from the shard.

    Args:
        directory: The dataset.
        number: Number of the shard.
        info: The shard in the manifest.
        tokens: Ids of placeholders: :attr:`TokenizerInfo.placeholders`.
        family: Family of the samples.

    Returns:
        The rows in sample order; None if the file does not match the manifest's size and sha256.

    Raises:
        OSError: If the file cannot be read.
    """
    path = directory / info.name
    if not path.is_file() or path.stat().st_size != info.bytes:
        return None
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if hashlib.sha256(data).hexdigest() != info.sha256:
            return None
        with tarfile.open(fileobj=file, mode="r:") as archive:
            by_key = groupby(archive.getmembers(), lambda member: member.name.partition(".")[0])
            placed: dict[ItemName, ItemPlace] = {}
            return [_row(data, key, list(members), number, tokens, family, placed) for key, members in by_key]


def _row(
    data: mmap.mmap,
    key: str,
    members: list[tarfile.TarInfo],
    shard: int,
    tokens: Mapping[str, tuple[int, ...]],
    family: Family,
    placed: dict[ItemName, ItemPlace],
) -> IndexRow:
    """Reads a sample's row; ``placed`` has the items of the samples before it, and gets its own."""
    text = members[0]
    assert text.name == f"{key}.{METADATA_MEMBER}", text.name
    metadata = json.loads(data[text.offset_data : text.offset_data + text.size])
    arrays: _Found = dict(_read(data, member) for member in members[1:] if member.name != f"{key}.{ITEMS_MEMBER}")
    start, last = text.offset, members[-1]
    stop = last.offset_data + last.size + -last.size % BLOCK
    grids = {kind: list(map(tuple, arrays[name][1].tolist())) for kind, name in _GRIDS.items() if name in arrays}
    if "patches" in arrays:
        items = _raw_items(data, *arrays["patches"], grids[IMAGE])
    else:
        items = _encoded_items(data, key, last.offset_data, grids, metadata["items"], placed)
    placement = Placement(
        offset=start,
        size=stop - start,
        checksum=_checksum(data[start:stop]),
        json_offset=text.offset_data,
        json_size=text.size,
        arrays={
            name: ArrayPlace(offset, _checksum(array)) for name, (offset, array) in arrays.items() if name != "patches"
        },
        patches_offset=arrays["patches"][0] if "patches" in arrays else ABSENT.offset,
        items=items,
    )
    ids = arrays["input_ids"][1]
    blocks = Blocks.of(family, [(item.shape.kind, item.shape.grid) for item in items], tokens)
    starts = blocks.locate(ids[: metadata["length"]])[blocks.firsts]
    return IndexRow(
        key=key,
        source_row=metadata["source_row"],
        shard=shard,
        placement=placement,
        length=metadata["length"],
        padded_length=len(ids),
        num_targets=int(arrays["loss_mask"][1].sum()),
        target_turns=metadata["target_turns"],
        truncated=metadata["truncated"],
        item_starts=tuple(starts.tolist()),
        source=metadata.get(SOURCE, {}),
    )


def _read(data: mmap.mmap, member: tarfile.TarInfo) -> tuple[str, tuple[int, npt.NDArray[Any]]]:
    stop = member.offset_data + member.size
    array = read_npy(data[member.offset_data : stop])
    name = member.name.partition(".")[2].removesuffix(".npy")
    assert array.dtype == MEMBER_BY_NAME[name].dtype, member.name
    return name, (stop - array.nbytes, array)


def _raw_items(data: mmap.mmap, offset: int, patches: npt.NDArray[Any], grids: Sequence[Grid]) -> tuple[ItemPlace, ...]:
    """Returns the consecutive images in ``patches.npy``."""
    found = []
    for grid in grids:
        shape = ItemShape(IMAGE, grid)
        size = shape.rows * patches.shape[1]
        checksum = _checksum(data[offset : offset + size])
        found.append(ItemPlace(shape, offset, size, checksum, checksum))
        offset += size
    return tuple(found)


def _encoded_items(
    data: mmap.mmap,
    key: str,
    at: int,
    grids: Mapping[str, Sequence[Grid]],
    described: list[dict[str, Any]],
    placed: dict[ItemName, ItemPlace],
) -> tuple[ItemPlace, ...]:
    """The items in ``items.bin``, as the metadata describes them, and those that share the bytes of earlier ones."""
    found, left = [], {kind: iter(each) for kind, each in grids.items()}
    for number, item in enumerate(described):
        shared, size = item.get("same_as"), item["bytes"]
        offset = at if shared is None else placed[ItemName(shared["key"], shared["image"])].offset
        shape = ItemShape(item["kind"], next(left[item["kind"]]), item.get("copies", 1))
        checksum = _checksum(data[offset : offset + size])
        place = ItemPlace(shape, offset, size, checksum, int(item["pixel_checksum"], 16), item["codec"])
        placed[ItemName(key, number)] = place
        found.append(place)
        at += size if shared is None else 0
    return tuple(found)


def _checksum(piece: Any) -> int:
    return int(xxhash.xxh3_64_intdigest(piece))
