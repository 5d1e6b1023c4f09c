"""The audit of one shard file: its hash, its tar structure against the index, and each of its samples."""

from __future__ import annotations

import hashlib
import io
import json
import mmap
import os
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from vlmdata.errors import DatasetFormatError
from vlmdata.families import Family
from vlmdata.format.dataset import OpenShard
from vlmdata.format.index_row import IndexRow
from vlmdata.format.manifest import DROPPED_REASONING, ROWS_WITH_DROPPED_REASONING, ShardInfo
from vlmdata.format.schema import (
    ALL_MEMBERS,
    ITEMS_MEMBER,
    MEMBERS,
    METADATA_MEMBER,
    OPTIONAL_MEMBERS,
    Member,
    Sample,
    parse_key,
)
from vlmdata.format.shard import read_npy
from vlmdata.media.codecs import IMAGE, VIDEO
from vlmdata.verify.fault import Fault
from vlmdata.verify.items import Owners, audit_items, described_items, owners_in, owners_of, raw_items_problem
from vlmdata.verify.sample import SampleRules, audit_sample, turn_weights_of
from vlmdata.verify.video import steps_of
from vlmdata.wording import counted


@dataclass(frozen=True)
class ShardAudit:
    """Result of a shard's audit."""

    samples: int  # number of audited samples
    faults: list[Fault] = field(default_factory=list)  # all faults
    #: Counts of the manifest's ``turns`` that samples have; empty if no sample was looked at.
    turns: Mapping[str, int] = field(default_factory=dict)


def audit_shard(
    open_shard: OpenShard, info: ShardInfo, rows: list[IndexRow], rules: SampleRules, *, pixels: bool = True
) -> ShardAudit:
    """Audits one shard."""
    dropped: Counter[int] = Counter()
    audit = _opened(open_shard, info, len(rows), partial(_audit, info, rows, rules, pixels, dropped))
    return replace(audit, turns={DROPPED_REASONING: dropped.total(), ROWS_WITH_DROPPED_REASONING: len(dropped)})


def hash_shard(open_shard: OpenShard, info: ShardInfo) -> ShardAudit:
    """Checks size and sha256 of one shard. Nothing more can be checked without an index."""
    return _opened(open_shard, info, 0, lambda file, data: _hash(data, info))


@dataclass(frozen=True)
class FolderShards:
    """Opens shards of a folder."""

    directory: Path  # the folder

    def __call__(self, info: ShardInfo) -> int:
        """Opens a shard; the caller closes the file descriptor."""
        return os.open(self.directory / info.name, os.O_RDONLY | os.O_CLOEXEC)


def _opened(
    open_shard: OpenShard, info: ShardInfo, samples: int, check: Callable[[BinaryIO, mmap.mmap], Iterator[Fault]]
) -> ShardAudit:
    try:
        with open(open_shard(info), "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return ShardAudit(samples, list(check(file, data)))
    except FileNotFoundError:
        return ShardAudit(0, [Fault(info.name, "missing", f"not found; it held {counted(info.samples, 'sample')}")])
    except (OSError, ValueError, DatasetFormatError) as error:  # ValueError: an empty file cannot be mapped
        return ShardAudit(0, [Fault(info.name, "unreadable", str(error))])


def _hash(data: mmap.mmap, info: ShardInfo) -> Iterator[Fault]:
    if len(data) != info.bytes:
        yield Fault(info.name, "size", f"{len(data)} bytes, the manifest says {info.bytes}")
    digest = hashlib.sha256(data).hexdigest()
    if digest != info.sha256:
        yield Fault(info.name, "sha256", f"{digest}, the manifest says {info.sha256}")


def _audit(
    info: ShardInfo,
    rows: list[IndexRow],
    rules: SampleRules,
    pixels: bool,
    dropped: Counter[int],
    file: BinaryIO,
    data: mmap.mmap,
) -> Iterator[Fault]:
    """Yields the faults of a shard, and counts in ``dropped`` the turns of each row that lack their reasoning."""
    yield from _hash(data, info)
    if len(rows) != info.samples:
        yield Fault(
            info.name,
            "index",
            f"{counted(len(rows), 'index row')}, but the manifest says {counted(info.samples, 'sample')}",
        )
    members, problem = _tar_members(file)
    keys = {row.key for row in rows}
    found = sum(_key_of(name) in keys for name in members) if info.unselected else len(members)
    expected_members = sum(2 + len(row.placement.arrays) for row in rows)  # and the JSON and the items
    if not problem and any(data[-1024:]):
        problem = "the archive does not end in two zero blocks; it was truncated"
    others = len({_key_of(name) for name in members} - keys)
    if not problem and info.unselected and others != info.unselected:
        problem = f"{counted(others, 'unselected sample')}, but the manifest says {info.unselected}"
    if not problem and found != expected_members:
        problem = f"{counted(found, 'member')}; {counted(len(rows), 'sample')} should have {expected_members}"
    if problem:
        yield Fault(info.name, "tar", problem)
    owners = owners_in(data, members) if info.unselected and not problem else owners_of(rows)
    for row in rows:
        # In a damaged archive, each sample is read separately, so that samples after the damage are not affected.
        for check, message in _audit_row(data, None if problem else members, row, rules, owners, pixels, dropped):
            yield Fault(info.name, check, message, row.source_row, row.key)


def _key_of(member: str) -> str:
    return member.partition(".")[0]


def _tar_members(file: BinaryIO) -> tuple[dict[str, tuple[int, int]], str]:
    """Returns (data offset, size) by member name, as read by tarfile, and the error that stopped it, if any."""
    members: dict[str, tuple[int, int]] = {}
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                if member.name in members:
                    return members, f"the member {member.name} occurs twice"
                members[member.name] = (member.offset_data, member.size)
    except (tarfile.TarError, EOFError, OSError) as error:
        return members, f"not a readable tar after {counted(len(members), 'member')}: {error}"
    return members, ""


def _audit_row(
    data: mmap.mmap,
    members: dict[str, tuple[int, int]] | None,
    row: IndexRow,
    rules: SampleRules,
    owners: Owners,
    pixels: bool,
    dropped: Counter[int],
) -> Iterator[tuple[str, str]]:
    place = row.placement
    if place.offset + place.size > len(data):
        yield "cut", f"its bytes [{place.offset}, {place.offset + place.size}) extend beyond the file's {len(data)}"
        return
    checksum = xxhash.xxh3_64_intdigest(memoryview(data)[place.offset : place.offset + place.size])
    if checksum != place.checksum:
        yield "checksum", f"xxh3 {checksum:016x}, the index says {place.checksum:016x}"
        return
    if members is None:
        own, _ = _tar_members(io.BytesIO(data[place.offset : place.offset + place.size]))
        members = {name: (place.offset + start, size) for name, (start, size) in own.items()}
    turn_weights: tuple[float, ...] = ()
    steps: tuple[float, ...] | None = None
    try:
        metadata = _checked_metadata(data, members, row, owners)
        turn_weights = turn_weights_of(metadata)
        steps = steps_of(metadata, row, rules.family, rules.fractions)
        if isinstance(count := metadata.get(DROPPED_REASONING), int) and count > 0:
            dropped[row.source_row] += count
    except ValueError as error:
        yield "metadata", str(error)
    arrays: dict[str, Any] = {}
    for member in OPTIONAL_MEMBERS:
        if member.name not in place.arrays and f"{row.key}.{member.suffix}" in members:
            yield "member", f"{member.suffix}: in the tar, but not in the index"
    if place.patches_offset < 0:
        found = members.get(f"{row.key}.{ITEMS_MEMBER}")
        if isinstance(patches := audit_items(data, found, row, rules, owners, pixels=pixels), str):
            yield "items", patches
            return
        arrays["patches"] = patches
    for member in MEMBERS:
        if member.name not in arrays and row.array(member).offset < 0:
            yield "member", f"{member.suffix}: not in the index"
            return
    for member, offset in _indexed(row):
        loaded = _load_member(data, members.get(f"{row.key}.{member.suffix}"), offset)
        if isinstance(loaded, str):
            yield "member", f"{member.suffix}: {loaded}"
            return
        arrays[member.name] = loaded
    problem = _shape_problem(arrays, row, rules.family)
    if problem:
        yield "shape", problem
        return
    problem = _checksum_problem(arrays, row) or raw_items_problem(row, rules.family.patch_bytes)
    if problem:
        yield "index", problem
    shapes = tuple(item.shape for item in row.items)
    yield from audit_sample(Sample(row.key, row.length, **arrays, items=shapes), row, rules, turn_weights, steps)


def _indexed(row: IndexRow) -> list[tuple[Member, int]]:
    """Returns a sample's arrays in the index, in storage order, with the offset of their data."""
    return [(member, offset) for member in ALL_MEMBERS if (offset := row.array(member).offset) >= 0]


def _load_member(data: mmap.mmap, found: tuple[int, int] | None, offset: int) -> Any:
    """Reads a member's array from the tar with numpy. Returns a description if that fails."""
    if found is None:
        return "not in the tar"
    start, size = found
    try:
        array = read_npy(data[start : start + size])
    except ValueError as error:
        return f"not a readable .npy: {error}"
    header = size - array.nbytes
    if start + header != offset:
        return f"its data starts at byte {start + header}, but the index says {offset}"
    return array


def _checksum_problem(arrays: dict[str, Any], row: IndexRow) -> str:
    """Compares the index's hashes of arrays and items with the data. Returns a description of a difference."""
    for member, _ in _indexed(row):
        array = arrays[member.name]
        if member.name == "patches":
            pieces = np.split(array, np.cumsum([item.shape.rows for item in row.items]))[:-1]
            expected = tuple(item.checksum for item in row.items)
        else:
            pieces, expected = [array], (row.array(member).checksum,)
        actual = tuple(xxhash.xxh3_64_intdigest(piece) for piece in pieces)
        if actual != expected:
            return f"{member.suffix}: the data has checksums {actual}, but the index says {expected}"
    return ""


def _checked_metadata(
    data: mmap.mmap, members: dict[str, tuple[int, int]], row: IndexRow, owners: Owners
) -> dict[str, Any]:
    """Returns a sample's metadata, checked against the index.

    Raises:
        ValueError: If the metadata is damaged or contradicts the index.
    """
    place = row.placement
    if members.get(f"{row.key}.{METADATA_MEMBER}") != (place.json_offset, place.json_size):
        raise ValueError("the JSON member is not where the index says")
    try:
        metadata = json.loads(data[place.json_offset : place.json_offset + place.json_size])
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(metadata, dict):
        raise ValueError(f"{metadata!r} is not a JSON object")
    indexed: dict[str, Any] = {
        "key": row.key,
        "source_row": row.source_row,
        "length": row.length,
        "padded_length": row.padded_length,
        "num_targets": row.num_targets,
        "target_turns": row.target_turns,
        "truncated": row.truncated,
        "image_grid_thw": [list(grid) for grid in row.grids(IMAGE)],
        "video_grid_thw": [list(grid) for grid in row.grids(VIDEO)] or None,
    }
    if row.placement.patches_offset < 0:
        indexed["items"] = described_items(row, owners)
    named = parse_key(row.key)
    indexed["sample"] = named[1] if named is not None and named[1] >= 0 else None
    wrong = [name for name, value in indexed.items() if metadata.get(name) != value]
    if wrong:
        raise ValueError(f"differs from the index in {', '.join(wrong)}")
    return metadata


def _shape_problem(arrays: dict[str, Any], row: IndexRow, family: Family) -> str:
    padded = row.padded_length
    shapes: dict[str, tuple[int, ...]] = {
        "input_ids": (padded,),
        "loss_mask": (padded,),
        "position_ids": (len(family.position_axes), padded),
        "image_grid_thw": (len(row.grids(IMAGE)), 3),
        "video_grid_thw": (len(row.grids(VIDEO)), 3),
        "patches": (sum(item.shape.rows for item in row.items), family.patch_bytes),
        "loss_weights": (padded,),
    }
    for member, _ in _indexed(row):
        array = arrays[member.name]
        if array.dtype != member.dtype or array.shape != shapes[member.name]:
            return f"{member.suffix} is {array.dtype} {array.shape}, but should be {member.dtype} {shapes[member.name]}"
    for name, kind in (("image_grid_thw", IMAGE), ("video_grid_thw", VIDEO)):
        if name in arrays and arrays[name].tolist() != [list(grid) for grid in row.grids(kind)]:
            return f"{name}.npy differs from the index"
    return ""
