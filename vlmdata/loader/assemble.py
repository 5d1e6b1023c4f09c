"""Filling one contiguous buffer with a batch. Numpy and system calls only: this is what workers run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlmdata.batch import IGNORE_INDEX
from vlmdata.format.schema import PATCH_BYTES
from vlmdata.loader.request import PackRequest, Part, SampleRead
from vlmdata.loader.shards import ShardStore

_ALIGN = 64


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
        return int(np.prod(self.shape)) * self.dtype.itemsize


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
    if Part.PIXELS in request.parts:
        wanted.append(("patches", "|u1", (request.local_patches, PATCH_BYTES)))
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
    fills: dict[str, object] = {
        "padding_mask": True,
        "input_ids": request.pad_id,
        "labels": IGNORE_INDEX,
        "loss_mask": 0,
    }
    whole = {}
    for name, fill in fills.items():
        if name in views:
            whole[name] = np.empty(total, views[name].dtype) if sliced else views[name].reshape(total)
            whole[name].fill(fill)
    for sample in request.samples:
        _fill_sample(sample, store, request.parts, positions, whole)
    if sliced:  # tokens are few bytes: they are read whole and cut; pixels are never read in vain
        for name, values in whole.items():
            np.concatenate([values[a:b] for a, b in request.ranges.tolist()], out=views[name][0])


def _fill_sample(
    sample: SampleRead,
    store: ShardStore,
    parts: Part,
    positions: npt.NDArray[np.generic],
    whole: dict[str, npt.NDArray[np.generic]],
) -> None:
    span = slice(sample.begin, sample.begin + sample.length)
    stored = _token_array(sample, store, 2, "position_ids", np.dtype("<i4"), (3, sample.padded))
    positions[:, span] = stored[:, : sample.length]
    whole["padding_mask"][span] = False
    if not parts & (Part.TOKENS | Part.LABELS):
        return
    ids = _token_array(sample, store, 0, "input_ids", np.dtype("<i4"), (sample.padded,))[: sample.length]
    if Part.TOKENS in parts:
        whole["input_ids"][span] = ids
    if Part.LABELS in parts:
        mask = _token_array(sample, store, 1, "loss_mask", np.dtype("|u1"), (sample.padded,))
        # Token i predicts token i + 1; the last token of a sample predicts nothing.
        targets = mask[1 : sample.length]
        shifted = slice(sample.begin, sample.begin + sample.length - 1)
        whole["labels"][shifted] = np.where(targets, ids[1:], IGNORE_INDEX)
        whole["loss_mask"][shifted] = targets


def _token_array(
    sample: SampleRead, store: ShardStore, which: int, name: str, dtype: np.dtype[np.generic], shape: tuple[int, ...]
) -> npt.NDArray[np.generic]:
    array = np.empty(shape, dtype)
    store.read(
        sample.dataset,
        sample.shard,
        sample.offsets[which],
        memoryview(array).cast("B"),
        sample.checksums[which],
        f"row {sample.row} key {sample.key} {name}",
    )
    return array


def _fill_patches(request: PackRequest, store: ShardStore, patches: npt.NDArray[np.generic]) -> None:
    """Reads the images held here, one after another, straight into their place."""
    if not patches.size:
        return
    into = memoryview(patches.reshape(-1)).cast("B")
    held, image, at = set(request.images.tolist()), 0, 0
    for sample in request.samples:
        offset = sample.offsets[3]
        for number, (t, h, w) in enumerate(sample.grids):
            size = t * h * w * PATCH_BYTES
            if image in held:
                what = f"row {sample.row} key {sample.key} patches of image {number}"
                checksum = sample.image_checksums[number]
                store.read(sample.dataset, sample.shard, offset, into[at : at + size], checksum, what)
                at += size
            offset += size
            image += 1
