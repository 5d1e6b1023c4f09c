"""One shard with its images in another codec: a pure function of the old shard, its index rows and the codec."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Buffer, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from vlmdata.errors import DatasetFormatError, UsageError
from vlmdata.families.processor import TENSORS
from vlmdata.format.index import DatasetIndex
from vlmdata.format.index_row import IndexRow, index_table, used_features
from vlmdata.format.manifest import Manifest, ShardInfo
from vlmdata.format.schema import MEMBER_BY_NAME, Member, shard_name, supported_features
from vlmdata.format.shard import EncodedItem, ShardWriter
from vlmdata.media.codecs import IMAGE, RAW, REGISTRY, VIDEO, Item, ItemShape, Unsuitable, decode_item
from vlmdata.preprocess.config import TrainTurns
from vlmdata.preprocess.shards.job import ShardRecord, progress_name
from vlmdata.preprocess.shards.samples import encode_item, option_of
from vlmdata.storage import Store
from vlmdata.storage.shards import DatasetShards, ShardStore

Patches = npt.NDArray[np.uint8]
_Items = dict[tuple[int, ItemShape], EncodedItem]
"""Encoded items by offset in the old shard and shape. The same stored file can have several grids."""
_COPIED_BYTES = 1 << 22


@dataclass(frozen=True, eq=False)
class RecodeWork:
    """Data that a worker needs to recode any shard. Small and cheap to pickle."""

    manifest: Manifest  # manifest of the old dataset
    index: Path  # its index, a local file
    shards: DatasetShards  # access to its shards
    pixels: str | None  # name of the new codec; None keeps the shards as they are, for the index of the current format
    video_pixels: str | None  # name of the codec of videos; None as above
    store: Store  # destination of new shards and their records

    @property
    def shares_images(self) -> bool:
        """Whether samples of a row share their images, so that plain patches are items, too."""
        options = self.manifest.config.get("options")
        return isinstance(options, Mapping) and options.get("train_turns") == TrainTurns.EACH


def recode_shard(number: int, work: RecodeWork) -> ShardRecord:
    """Makes one shard and its records, as ``vlmdata preprocess`` would with this codec.

    The tar is renamed first, the record ``.json`` last: a shard whose ``.json`` exists is complete.

    Returns:
        The shard's record, as written, without unused keys and rejection reasons; the dataset has these.

    Raises:
        DatasetFormatError: If the old shard is damaged, or decodes to different pixels.
        OSError: If the disk is full or not writable; leaves no partial file.
    """
    old, store = work.manifest.shards[number], work.store
    index = DatasetIndex.read(work.index, shard=number)
    rows = [index.row(i) for i in range(len(index))]
    if work.pixels is None:
        info = replace(old, name=shard_name(number))
        _copy_shard(number, work)
    else:
        assert work.video_pixels is not None
        reader = SampleReader(number, work.manifest, work.shards)
        images = REGISTRY.find(work.pixels).name
        codecs = {IMAGE: images, TENSORS: images, VIDEO: REGISTRY.find(work.video_pixels).name}
        try:
            with store.writing(shard_name(number)) as file, ShardWriter(file) as writer:
                items = _Items()
                for i, row in enumerate(rows):
                    rows[i], items = _recode_sample(row, reader, work, codecs, writer, items)
                size, digest = writer.close()
        finally:
            reader.close()
        info = replace(old, name=shard_name(number), bytes=size, sha256=digest, unselected=0)
    table = index_table(rows, supported_features())
    record = ShardRecord(info, DatasetIndex(table).totals([info], 0), {}, tuple(sorted(used_features(rows))))
    with store.writing(progress_name(number, "parquet")) as file:
        pq.write_table(table, file)
    store.put(progress_name(number, "json"), record.to_json())
    return record


def _copy_shard(number: int, work: RecodeWork) -> None:
    """Copies a shard, and checks its hash before it gets its name."""
    old, store = work.manifest.shards[number], ShardStore([work.shards], "pixels")
    digest, piece = hashlib.sha256(), np.empty(min(_COPIED_BYTES, old.bytes), np.uint8)
    try:
        with work.store.writing(shard_name(number)) as file:
            for begin in range(0, old.bytes, _COPIED_BYTES):
                part = memoryview(piece)[: old.bytes - begin]
                store.read(0, number, begin, part, None, f"bytes from {begin}")
                digest.update(part)
                file.write(part)
            if digest.hexdigest() != old.sha256:
                raise DatasetFormatError(
                    f"{store.path(0, number)}: its sha256 is {digest.hexdigest()}, the manifest says {old.sha256}. Run "
                    "`vlmdata verify` on the dataset to see how to repair it."
                )
    finally:
        store.close()


def _recode_sample(
    row: IndexRow,
    reader: SampleReader,
    work: RecodeWork,
    codecs: Mapping[str, str],
    writer: ShardWriter,
    known: _Items,
) -> tuple[IndexRow, _Items]:
    """Copies a sample. Returns the new index row, and the sample's items.

    ``codecs`` has the codec of each kind. ``known`` are the items of the sample before it: turns of a conversation
    share theirs.
    """
    sample = reader.read(row)
    metadata = sample.metadata
    metadata.pop("items", None)
    pieces: dict[str, list[npt.NDArray[Any]]] = {name: [array] for name, array in sample.tokens.items()}
    items: _Items = {}
    images = all(item.shape.kind == IMAGE for item in row.items)
    if (codecs[IMAGE] == RAW and images and not work.shares_images) or not row.items:
        empty = np.zeros((0, work.manifest.model_family.patch_bytes), np.uint8)
        pieces["patches"] = list(reader.patches(row, sample)) or [empty]
    else:
        family = work.manifest.model_family
        for number, item in enumerate(row.items):
            if (stored := known.get((item.offset, item.shape))) is None:
                what, patches = f"key {row.key}, {item.shape.kind} {number}", reader.item(row, sample, number)
                name = codecs[item.shape.kind]
                payload = _encoded(name, Item(patches, item.shape, family), what)
                stored = EncodedItem(payload, item.shape, name, item.pixel_checksum)
            items[item.offset, item.shape] = stored
    # In a joined dataset the index counts rows on, and the shard keeps its own keys.
    in_order = [items[item.offset, item.shape] for item in row.items] if items else []
    return replace(row, placement=writer.add(metadata["key"], metadata, pieces, in_order)), items


def _encoded(pixels: str, item: Item, what: str) -> Buffer:
    try:
        return encode_item(pixels, item, what)
    except Unsuitable as error:  # the ledger is that of the old dataset
        raise UsageError(
            f"{option_of(item)} {pixels}: the codec does not store {what}: {error}. Choose another {option_of(item)}, "
            "or preprocess the source again, which rejects such samples."
        ) from error


@dataclass(frozen=True, eq=False)
class StoredSample:
    """A sample as it is stored."""

    metadata: dict[str, Any]  # its JSON
    tokens: dict[str, npt.NDArray[Any]]  # all arrays except the patches, by member name
    start: int  # offset of its first byte in the shard
    content: memoryview  # all its bytes


class SampleReader:
    """Reads the samples of one shard and checks every byte."""

    def __init__(self, number: int, manifest: Manifest, shards: DatasetShards):
        self._number = number
        self._store = ShardStore([shards], "pixels")
        self._family = manifest.model_family

    def close(self) -> None:
        """Closes the shard."""
        self._store.close()

    def read(self, row: IndexRow) -> StoredSample:
        """Reads a sample, except images stored elsewhere in the shard.

        Raises:
            DatasetFormatError: If its bytes have changed since they were written.
        """
        place = row.placement
        content = memoryview(np.empty(place.size, np.uint8))
        self._store.read(0, self._number, place.offset, content, place.checksum, _named(row))
        text = place.json_offset - place.offset
        metadata = json.loads(bytes(content[text : text + place.json_size]))
        tokens = {
            name: self._array(MEMBER_BY_NAME[name], row, content[found.offset - place.offset :])
            for name, found in place.arrays.items()
        }
        return StoredSample(metadata, tokens, place.offset, content)

    def patches(self, row: IndexRow, sample: StoredSample) -> Iterator[Patches]:
        """Yields the patches of each item, as :meth:`item` returns them."""
        return (self.item(row, sample, number) for number in range(len(row.items)))

    def stored(self, row: IndexRow, sample: StoredSample, number: int) -> memoryview:
        """Returns the stored bytes of one item.

        Raises:
            DatasetFormatError: If they have changed since they were written.
        """
        item = row.items[number]
        start = item.offset - sample.start
        stored = sample.content[max(start, 0) : start + item.bytes]
        if start < 0 or stored.nbytes != item.bytes:  # shared with another sample, and stored there
            stored = memoryview(np.empty(item.bytes, np.uint8))
            what = f"{_named(row)} {item.shape.kind} {number}"
            self._store.read(0, self._number, item.offset, stored, item.checksum, what)
        return stored

    def item(self, row: IndexRow, sample: StoredSample, number: int) -> Patches:
        """Returns the patches of one item, uint8 (R, bytes per patch).

        Raises:
            DatasetFormatError: If it does not decode, or decodes to different pixels.
        """
        item = row.items[number]
        what = f"{_named(row)} {item.shape.kind} {number}"
        stored = self.stored(row, sample, number)
        size = (item.shape.rows, self._family.patch_bytes)
        if item.codec == RAW:
            patches = np.frombuffer(stored, np.uint8).reshape(size)
        else:
            patches = np.empty(size, np.uint8)
            path = self._store.path(0, self._number)
            decode_item(item.codec, stored, item.shape, self._family, patches, f"{path}: {what}")
        self._store.require_pixels(0, self._number, patches, item.pixel_checksum, what)
        return patches

    def _array(self, member: Member, row: IndexRow, data: memoryview) -> npt.NDArray[Any]:
        axes = len(self._family.position_axes)
        shapes = {
            "position_ids": (axes, row.padded_length),
            "image_grid_thw": (len(row.grids(IMAGE)), 3),
            "video_grid_thw": (len(row.grids(VIDEO)), 3),
        }
        shape = shapes.get(member.name, (row.padded_length,))
        return np.frombuffer(data, member.dtype, int(np.prod(shape))).reshape(shape)


def _named(row: IndexRow) -> str:
    return f"row {row.source_row} key {row.key}"


def named_shard(info: ShardInfo) -> str:
    """Describes a shard and its rows in messages."""
    return f"{info.name} (rows {info.row_start} to {info.row_stop - 1})"
