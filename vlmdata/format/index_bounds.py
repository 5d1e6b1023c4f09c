"""Checks that what an index says lies within the shards, before a reader allocates memory for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from vlmdata.families import Family
from vlmdata.format.index import DatasetIndex
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import MEMBER_BY_NAME
from vlmdata.media.codecs import IMAGE, VIDEO

#: The largest number of patches of an item along one axis; no item of a supported codec has a side of so many.
_LONGEST_AXIS = 1 << 20
#: The largest number of temporal copies of a patch that are stored; families have 1 or 2.
_MOST_COPIES = 16

_Wrong = npt.NDArray[np.bool_]


def bounds_problem(index: DatasetIndex, manifest: Manifest, family: Family) -> str:
    """Describes the first number of an index that leads out of its shard; empty if all are within.

    Tokens are bounded by the bytes of the sample's shard, and patches by tokens. So no batch takes more memory than the
    files of a dataset account for.
    """
    if not len(index):
        return ""
    if problem := _first(index, "shard", (index.shard < 0) | (index.shard >= len(manifest.shards))):
        return problem
    for name, wrong in _of_samples(index, manifest, family):
        if problem := _first(index, name, wrong()):
            return problem
    for name, wrong in _of_items(index, manifest, family):
        found = wrong()
        if found.any():
            item = int(np.flatnonzero(found)[0])
            sample = int(np.searchsorted(index.grid_offsets, item, "right")) - 1
            return f"key {index.key(sample)}: {name} of item {item - int(index.grid_offsets[sample])} is out of range"
    patches = index.grids.astype(np.int64).prod(axis=1)
    tokens = _by_sample(index, family.token_counts(index.grids))
    sizes = np.array([shard.bytes for shard in manifest.shards], np.int64)[index.shard]
    wrong_by_name = {
        "num_patches": _by_sample(index, patches) != index.num_patches,
        "item_grids": tokens > index.lengths,
    }
    # These hold a number for each axis of each item, or all pixels; samples without any have the offset -1, or any.
    of_kinds = {f"{kind}_grid_thw": 12 * (index.item_kinds == kind) for kind in (IMAGE, VIDEO)}
    for name, bytes_ in (of_kinds | {"patches": patches * index.item_copies * family.patch_bytes}).items():
        if name in index.data_offsets:
            offsets = index.data_offsets[name]
            wrong_by_name[f"{name}_offset"] = (offsets != -1) & _outside(offsets, _by_sample(index, bytes_), sizes)
    return next(filter(None, (_first(index, name, wrong) for name, wrong in wrong_by_name.items())), "")


def _by_sample(index: DatasetIndex, values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Sums values of items by sample, int64 (n,)."""
    sums = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    return np.diff(sums[index.grid_offsets])


def _of_samples(index: DatasetIndex, manifest: Manifest, family: Family) -> Iterator[tuple[str, Callable[[], _Wrong]]]:
    """Yields what of each sample is wrong, by the name of the column. Computed late: it relies on those before."""
    sizes = np.array([shard.bytes for shard in manifest.shards], np.int64)[index.shard]
    length, padded = index.lengths, index.padded_lengths.astype(np.int64)
    yield "length", lambda: (length < 0) | (length > padded)
    yield "padded_length", lambda: padded > sizes  # a byte a token, at least
    yield "num_targets", lambda: (index.num_targets < 0) | (index.num_targets > length)
    for start, size in (("offset", "size"), ("json_offset", "json_size")):
        yield start, lambda start=start, size=size: _outside(index.column(start), index.column(size), sizes)  # type: ignore[misc]
    entries = {"position_ids": len(family.position_axes)}
    for name, offsets in index.data_offsets.items():
        if name == "patches" or name.endswith("grid_thw"):
            continue  # those of items
        taken = padded * (MEMBER_BY_NAME[name].dtype.itemsize * entries.get(name, 1))
        # An optional member that a sample lacks has the offset -1.
        yield (
            f"{name}_offset",
            lambda offsets=offsets, size=taken, name=name: (  # type: ignore[misc]
                _outside(offsets, size, sizes) & ((offsets != -1) | (name not in index.optional_members))
            ),
        )


def _of_items(index: DatasetIndex, manifest: Manifest, family: Family) -> Iterator[tuple[str, Callable[[], _Wrong]]]:
    counts = index.item_counts
    sizes = np.repeat(np.array([shard.bytes for shard in manifest.shards], np.int64)[index.shard], counts)
    lengths = np.repeat(index.lengths, counts)
    yield "item_grids", lambda: ((index.grids < 1) | (index.grids > _LONGEST_AXIS)).any(axis=1)
    yield "item_copies", lambda: (index.item_copies < 1) | (index.item_copies > _MOST_COPIES)
    yield "item_starts", lambda: (index.item_starts < 0) | (index.item_starts >= lengths)
    yield "item_offsets", lambda: _outside(index.item_offsets, index.item_bytes, sizes)


def _outside(offsets: npt.NDArray[np.int64], sizes: npt.NDArray[np.integer], whole: npt.NDArray[np.int64]) -> _Wrong:
    """Whether bytes ``[offset, offset + size)`` are not all in files of ``whole`` bytes. Sums could overflow."""
    return (offsets < 0) | (sizes < 0) | (offsets > whole - sizes.astype(np.int64))


def _first(index: DatasetIndex, name: str, wrong: _Wrong) -> str:
    """Names the first sample whose number is wrong."""
    if not wrong.any():
        return ""
    sample = int(np.flatnonzero(wrong)[0])
    return f"key {index.key(sample)}: {name} is {index.table[name][sample].as_py()}, which is out of range"
