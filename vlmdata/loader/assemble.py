"""Filling one contiguous buffer with a batch. Numpy and system calls only: this is what workers run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vlmdata.batch import IGNORE_INDEX
from vlmdata.loader.request import TOKEN_MEMBERS, IntArray, PackRequest, Part, SampleReads
from vlmdata.loader.shards import ShardStore
from vlmdata.media.codecs import RAW, decode_item

_ALIGN = 64
_BYTES_PER_TOKEN = {"input_ids": 4, "loss_mask": 1, "loss_weights": 4, "position_ids": 12}
#: Bytes between two arrays that are read along rather than skipped with a read of their own: a page of the cache.
_READ_THROUGH = 4096


@dataclass(frozen=True)
class Field:
    """An array within a batch's buffer."""

    name: str
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """Where a batch's arrays lie in its buffer; both sides of a worker's pipe compute it from the request."""

    fields: tuple[Field, ...]
    bytes: int

    def views(self, buffer: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[np.generic]]:
        """The arrays as views of a buffer of at least ``bytes``."""
        return {
            field.name: buffer[field.offset : field.offset + field.bytes].view(field.dtype).reshape(field.shape)
            for field in self.fields
        }


def layout_of(request: PackRequest) -> Layout:
    """The layout of a request's batch."""
    local, total = request.local_tokens, request.total_tokens
    wanted: list[tuple[str, str, tuple[int, ...]]] = [
        ("position_ids", "<i8", (3, 1, total)),
        ("padding_mask", "|b1", (1, local)),
    ]
    if Part.TOKENS in request.parts:
        wanted.append(("input_ids", "<i8", (1, local)))
    if Part.LABELS in request.parts:
        wanted += [("labels", "<i8", (1, local)), ("loss_mask", "<f4", (1, local))]
    if request.weighted:
        wanted.append(("loss_weights", "<f4", (1, local)))
    if Part.PIXELS in request.parts:
        wanted.append(("patches", "|u1", (request.local_patches, request.family.patch_bytes)))
    fields, offset = [], 0
    for name, dtype, shape in wanted:
        field = Field(name, np.dtype(dtype), shape, offset)
        fields.append(field)
        offset += -(-field.bytes // _ALIGN) * _ALIGN
    return Layout(tuple(fields), offset)


def assemble(request: PackRequest, store: ShardStore, buffer: npt.NDArray[np.uint8]) -> int:
    """Reads a batch into a buffer, every byte of whose arrays is written.

    Args:
        request: What to read.
        store: Where from.
        buffer: uint8, at least ``layout_of(request).bytes`` long.

    Returns:
        Bytes read from shards.

    Raises:
        DatasetFormatError: If a shard does not hold what was written to it.
    """
    before = store.bytes_read
    views = layout_of(request).views(buffer)
    _fill_tokens(request, store, views)
    if "patches" in views:
        _fill_patches(request, store, views["patches"])
    return store.bytes_read - before


def _fill_tokens(request: PackRequest, store: ShardStore, views: dict[str, npt.NDArray[np.generic]]) -> None:
    total = request.total_tokens
    sliced = request.local_tokens != total
    positions = views["position_ids"].reshape(3, total)
    positions.fill(0)
    fills: dict[str, tuple[object, str]] = {"padding_mask": (True, "|b1")}
    if request.parts & (Part.TOKENS | Part.LABELS):
        fills["input_ids"] = (request.pad_id, "<i8")
    if Part.LABELS in request.parts:
        fills |= {"labels": (IGNORE_INDEX, "<i8"), "loss_mask": (0, "<f4")}
    if request.weighted:
        fills["loss_weights"] = (0, "<f4")
    whole: dict[str, npt.NDArray[Any]] = {}
    for name, (fill, dtype) in fills.items():
        in_place = name in views and not sliced
        whole[name] = views[name].reshape(total) if in_place else np.empty(total, dtype)
        whole[name].fill(fill)
    _fill_samples(request, store, positions, whole)
    if sliced:  # tokens are few bytes: they are read whole and cut; pixels are never read in vain
        for name in whole.keys() & views.keys():
            np.concatenate([whole[name][a:b] for a, b in request.ranges.tolist()], out=views[name][0])


def _fill_samples(
    request: PackRequest, store: ShardStore, positions: npt.NDArray[Any], whole: dict[str, npt.NDArray[Any]]
) -> None:
    """Fills the columns (T,) of a whole pack, and the positions (3, T), where samples are."""
    samples = request.samples
    wanted = {"position_ids", *whole.keys() & {"input_ids", "loss_mask", "loss_weights"}}
    stored = _read_members(samples, [name for name in TOKEN_MEMBERS if name in wanted], store)
    targets = np.zeros(request.total_tokens, np.uint8) if "loss_mask" in wanted else None
    weights = np.zeros(request.total_tokens, np.float32) if "loss_weights" in wanted else None
    spans = zip(samples.begins.tolist(), samples.lengths.tolist(), samples.padded.tolist(), strict=True)
    for i, (begin, length, padded) in enumerate(spans):
        span = slice(begin, begin + length)
        whole["padding_mask"][span] = False
        positions[:, span] = stored["position_ids"][i].view("<i4").reshape(3, padded)[:, :length]
        if "input_ids" in wanted:
            whole["input_ids"][span] = stored["input_ids"][i].view("<i4")[:length]
        if targets is not None:
            targets[span] = stored["loss_mask"][i][:length]
        if weights is not None:
            own = stored["loss_weights"][i]
            weights[span] = own.view("<f4")[:length] if len(own) else stored["loss_mask"][i][:length]
    if targets is not None:
        # Token i predicts token i + 1; the last token of a sample predicts nothing.
        targets[samples.begins] = 0
        np.copyto(whole["labels"][:-1], whole["input_ids"][1:], where=targets[1:] != 0)
        whole["loss_mask"][:-1] = targets[1:]
    if weights is not None:
        weights[samples.begins] = 0
        whole["loss_weights"][:-1] = weights[1:]


def _read_members(
    samples: SampleReads, members: Sequence[str], store: ShardStore
) -> dict[str, list[npt.NDArray[np.uint8]]]:
    """Reads some stored arrays of all samples, those close to one another in one go.

    Args:
        samples: The samples.
        members: What to read, in the order in which it is stored.
        store: Where from.

    Returns:
        For each member, the bytes of each sample's array; none of a member that the sample lacks.
    """
    which = [TOKEN_MEMBERS.index(member) for member in members]
    # Flat, sample by sample and member by member: that is file order within a shard.
    starts = samples.offsets[which].T.ravel()
    sizes = np.outer(samples.padded, [_BYTES_PER_TOKEN[member] for member in members]).ravel()
    dataset, shard = np.repeat(samples.dataset, len(members)), np.repeat(samples.shard, len(members))
    checksums = samples.checksums[which].T.ravel()
    place: npt.NDArray[np.intp] = np.arange(len(starts))
    found: list[npt.NDArray[np.uint8]] = [np.zeros(0, np.uint8)] * len(place)
    if "loss_weights" in members:
        place = np.flatnonzero(starts >= 0)
        starts, sizes, checksums = starts[place], sizes[place], checksums[place]
        dataset, shard = dataset[place], shard[place]

    def what(number: int) -> str:
        i, j = divmod(int(place[number]), len(members))
        return f"row {samples.row[i]} key {samples.keys[i]} {members[j]}"

    first, run_sizes = _runs(starts, starts + sizes, dataset, shard)
    room = -(-run_sizes // _ALIGN) * _ALIGN
    at = np.cumsum(room) - room
    scratch = np.empty(int(room.sum()), np.uint8)
    memory = memoryview(scratch)
    reads = (first, dataset[first], shard[first], starts[first], at, at + run_sizes)
    for number, of, file, begin, a, b in zip(*(column.tolist() for column in reads), strict=True):
        store.read(of, file, begin, memory[a:b], None, what(number))
    inside = starts + np.repeat(at - starts[first], np.diff(first, append=len(starts)))
    spans = zip(place.tolist(), inside.tolist(), (inside + sizes).tolist(), checksums.tolist(), strict=True)
    for number, (into, a, b, checksum) in enumerate(spans):
        array = found[into] = scratch[a:b]
        if not store.is_sound(array, checksum):
            raise store.changed(int(dataset[number]), int(shard[number]), array, checksum, what(number))
    return {member: found[j :: len(members)] for j, member in enumerate(members)}


def _runs(starts: IntArray, stops: IntArray, dataset: IntArray, shard: IntArray) -> tuple[IntArray, IntArray]:
    """Groups byte ranges that follow closely on one another in a file; (r,) the first of each run, and its bytes."""
    apart = starts[1:] - stops[:-1]
    joined = (apart >= 0) & (apart <= _READ_THROUGH) & (dataset[1:] == dataset[:-1]) & (shard[1:] == shard[:-1])
    first = np.flatnonzero(np.concatenate([np.ones(min(len(starts), 1), np.bool_), ~joined]))
    last = first + np.diff(first, append=len(starts)) - 1
    return first, stops[last] - starts[first]


def _fill_patches(request: PackRequest, store: ShardStore, patches: npt.NDArray[np.generic]) -> None:
    """Reads the images held here, one after another: raw ones straight into their place, others by their codec."""
    if not patches.size:
        return
    rows = patches.view(np.uint8)
    into, at, patch_bytes = memoryview(rows.reshape(-1)), 0, rows.shape[1]
    samples, images, held = request.samples, request.images, request.held
    owner = images.sample[held]
    columns = (
        samples.dataset[owner],
        samples.shard[owner],
        images.offsets[held],
        images.grids[held].prod(axis=1) * patch_bytes,
        images.checksums[held],
        samples.row[owner],
        owner,
        held - np.searchsorted(images.sample, owner),
        held,
    )
    for dataset, shard, offset, size, checksum, row, sample, number, image in zip(
        *(c.tolist() for c in columns), strict=True
    ):
        what = f"row {row} key {samples.keys[sample]} patches of image {number}"
        name = images.codecs[image]
        if name == RAW:
            store.read(dataset, shard, offset, into[at : at + size], checksum, what)
        else:
            stored = np.empty(int(images.bytes[image]), np.uint8)
            store.read(dataset, shard, offset, memoryview(stored), checksum, what)
            place = rows[at // patch_bytes : (at + size) // patch_bytes]
            t, h, w = images.grids[image].tolist()
            decode_item(name, stored, (t, h, w), request.family, place, f"{store.path(dataset, shard)}: {what}")
        at += size
