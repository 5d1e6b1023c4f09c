"""Index rows from a shard alone: everything the index says of a sample follows from the sample's bytes."""

from __future__ import annotations

import hashlib
import io
import json
import mmap
import tarfile
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from vlmdata.families import Family
from vlmdata.families.positions import locate_images
from vlmdata.format.index_row import TOKEN_MEMBERS, IndexRow
from vlmdata.format.manifest import ShardInfo
from vlmdata.format.schema import ITEMS_MEMBER, MEMBER_BY_NAME, MEMBERS, METADATA_MEMBER, OPTIONAL_MEMBERS
from vlmdata.format.shard import ABSENT, BLOCK, ArrayPlace, ItemPlace, Placement

_Found = dict[str, tuple[int, npt.NDArray[Any]]]
"""Member name -> first byte of its array's data, and the array."""


def index_rows_of(
    directory: Path, number: int, info: ShardInfo, image_token: int, family: Family
) -> list[IndexRow] | None:
    """Reads the index rows of a shard's samples from the shard.

    Args:
        directory: The dataset.
        number: Number of the shard.
        info: Its entry in the manifest.
        image_token: Id of the image placeholder.
        family: The dataset's family.

    Returns:
        The rows in the order of the samples; None if the file is not the one the manifest names (by size or sha256).

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
            return [_row(data, key, list(members), number, image_token, family) for key, members in by_key]


def _row(
    data: mmap.mmap, key: str, members: list[tarfile.TarInfo], shard: int, image_token: int, family: Family
) -> IndexRow:
    text = members[0]
    assert text.name == f"{key}.{METADATA_MEMBER}", text.name
    metadata = json.loads(data[text.offset_data : text.offset_data + text.size])
    arrays: _Found = dict(_read(data, member) for member in members[1:] if member.name != f"{key}.{ITEMS_MEMBER}")
    start, last = text.offset, members[-1]
    stop = last.offset_data + last.size + -last.size % BLOCK
    grids = arrays["image_grid_thw"][1]
    if "patches" in arrays:
        items = _raw_items(*arrays["patches"], grids)
    else:
        items = _encoded_items(members[-1].offset_data, metadata["items"])
    placement = Placement(
        offset=start,
        size=stop - start,
        checksum=_checksum(data[start:stop]),
        json_offset=text.offset_data,
        json_size=text.size,
        data_offsets=tuple(arrays[m.name][0] if m.name in arrays else ABSENT.offset for m in MEMBERS),
        data_checksums=(
            *((_checksum(arrays[member.name][1]),) for member in TOKEN_MEMBERS),
            tuple(_checksum(data[item.offset : item.offset + item.bytes]) for item in items),
        ),
        optional={
            member.name: ArrayPlace(arrays[member.name][0], _checksum(arrays[member.name][1]))
            for member in OPTIONAL_MEMBERS
            if member.name in arrays
        },
        items=items,
    )
    ids = arrays["input_ids"][1]
    starts = locate_images(ids[: metadata["length"]], family.token_counts(grids), image_token)
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
        image_grid_thw=tuple((t, h, w) for t, h, w in grids.tolist()),
        image_starts=tuple(starts.tolist()),
    )


def _read(data: mmap.mmap, member: tarfile.TarInfo) -> tuple[str, tuple[int, npt.NDArray[Any]]]:
    stop = member.offset_data + member.size
    array = np.lib.format.read_array(io.BytesIO(data[member.offset_data : stop]), allow_pickle=False)
    name = member.name.partition(".")[2].removesuffix(".npy")
    assert array.dtype == MEMBER_BY_NAME[name].dtype, member.name
    return name, (stop - array.nbytes, array)


def _raw_items(begin: int, patches: npt.NDArray[Any], grids: npt.NDArray[np.integer]) -> tuple[ItemPlace, ...]:
    """The images in ``patches.npy``, one after another; of a sample without any, an empty piece."""
    sizes = (grids.astype(np.int64).prod(axis=1) * patches.shape[1]).tolist() or [0]
    starts = accumulate(sizes, initial=begin)
    return tuple(ItemPlace(start, size) for start, size in zip(starts, sizes, strict=False))


def _encoded_items(begin: int, described: list[dict[str, Any]]) -> tuple[ItemPlace, ...]:
    """The items in ``items.bin``, as the metadata describes them."""
    starts = accumulate((item["bytes"] for item in described), initial=begin)
    return tuple(
        ItemPlace(start, item["bytes"], item["kind"], item["codec"])
        for start, item in zip(starts, described, strict=False)
    )


def _checksum(piece: Any) -> int:
    return int(xxhash.xxh3_64_intdigest(piece))
