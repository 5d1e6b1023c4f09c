"""One shard with its images in another codec: a pure function of the old shard, its index rows and the codec."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from preprocess.config import TrainTurns
from preprocess.shards.items import encode_item
from preprocess.shards.job import ShardRecord, progress_name, totals_of
from preprocess.shards.key_counts import KeyCounts
from vlmdata.format.index import DatasetIndex
from vlmdata.format.index_row import WHOLE_MEMBERS, IndexRow, index_table, used_features
from vlmdata.format.manifest import Manifest, ShardInfo
from vlmdata.format.schema import MEMBERS, OPTIONAL_MEMBERS, Member, supported_features
from vlmdata.format.shard import EncodedItem, ShardWriter
from vlmdata.media.codecs import RAW, Grid, Item, decode_item
from vlmdata.storage import Store
from vlmdata.storage.shards import DatasetShards, ShardStore

Patches = npt.NDArray[np.uint8]
_Items = dict[tuple[int, Grid], EncodedItem]
"""Encoded items by offset in the old shard and grid. The same stored file can have several grids."""


@dataclass(frozen=True, eq=False)
class RecodeWork:
    """Data that a worker needs to recode any shard. Small and cheap to pickle.

    Attributes:
        manifest: Manifest of the old dataset.
        index: Its index, a local file.
        shards: Access to its shards.
        pixels: Name of the new codec.
        store: Destination of new shards and their records.
    """

    manifest: Manifest
    index: Path
    shards: DatasetShards
    pixels: str
    store: Store

    @property
    def shares_images(self) -> bool:
        """Whether samples of a row share their images, so that plain patches are items, too."""
        options = self.manifest.config.get("options")
        return isinstance(options, Mapping) and options.get("train_turns") == TrainTurns.EACH


def recode_shard(number: int, work: RecodeWork) -> ShardRecord:
    """Makes one shard and its records, as ``vlmdata preprocess`` would with this codec.

    The tar is renamed first, the record ``.json`` last: a shard whose ``.json`` exists is complete.

    Args:
        number: Number of the shard.
        work: Old dataset, codec and destination.

    Returns:
        The shard's record, as written, without unused keys and rejection reasons; the dataset has these.

    Raises:
        DatasetFormatError: If the old shard is damaged, or decodes to different pixels.
        OSError: If the disk is full or not writable; leaves no partial file.
    """
    old, store = work.manifest.shards[number], work.store
    index = DatasetIndex.read(work.index, work.manifest.model_family.patch_bytes, shard=number)
    reader = _SampleReader(number, work)
    try:
        with store.writing(old.name) as file, ShardWriter(file) as writer:
            rows, items = [], _Items()
            for i in range(len(index)):
                row, items = _recode_sample(index.row(i), reader, work, writer, items)
                rows.append(row)
            size, digest = writer.close()
    finally:
        reader.close()
    info = replace(old, bytes=size, sha256=digest)
    record = ShardRecord(info, totals_of(info, rows), {}, KeyCounts(), tuple(sorted(used_features(rows))))
    with store.writing(progress_name(number, "parquet")) as file:
        pq.write_table(index_table(rows, supported_features()), file)
    store.put(progress_name(number, "json"), record.to_json())
    return record


def _recode_sample(
    row: IndexRow, reader: _SampleReader, work: RecodeWork, writer: ShardWriter, known: _Items
) -> tuple[IndexRow, _Items]:
    """Copies a sample.

    Args:
        row: Its index row.
        reader: Reads it.
        work: The new codec.
        writer: Writes the new shard.
        known: The items of the sample before it. Turns of a conversation share theirs.

    Returns:
        The new index row, and the sample's items.
    """
    sample = reader.read(row)
    metadata = sample.metadata
    metadata.pop("items", None)
    pieces: dict[str, list[npt.NDArray[Any]]] = {name: [array] for name, array in sample.tokens.items()}
    items: _Items = {}
    if (work.pixels == RAW and not work.shares_images) or not row.items:
        empty = np.zeros((0, work.manifest.model_family.patch_bytes), np.uint8)
        pieces["patches"] = list(reader.patches(row, sample)) or [empty]
    else:
        family = work.manifest.model_family
        for number, (grid, item) in enumerate(zip(row.image_grid_thw, row.items, strict=True)):
            if (stored := known.get((item.offset, grid))) is None:
                what = f"key {row.key}, image {number}"
                payload = encode_item(work.pixels, Item(reader.image(row, sample, number), grid, family), what)
                stored = EncodedItem(payload, work.pixels, item.pixel_checksum, item.kind)
            items[item.offset, grid] = stored
    # In a joined dataset the index counts rows on, and the shard keeps its own keys.
    places = zip((item.offset for item in row.items), row.image_grid_thw, strict=True)
    in_order = [items[place] for place in places] if items else []
    return replace(row, placement=writer.add(metadata["key"], metadata, pieces, in_order)), items


@dataclass(frozen=True, eq=False)
class _StoredSample:
    """A sample as it is stored.

    Attributes:
        metadata: Its JSON.
        tokens: All arrays except the patches, by member name.
        start: Offset of its first byte in the shard.
        content: All its bytes.
    """

    metadata: dict[str, Any]
    tokens: dict[str, npt.NDArray[Any]]
    start: int
    content: memoryview


class _SampleReader:
    """Reads the samples of one shard and checks every byte."""

    def __init__(self, number: int, work: RecodeWork):
        self._number, self._work = number, work
        self._store = ShardStore([work.shards], "pixels")
        self._family = work.manifest.model_family

    def close(self) -> None:
        """Closes the shard."""
        self._store.close()

    def read(self, row: IndexRow) -> _StoredSample:
        """Reads a sample, except images stored elsewhere in the shard.

        Raises:
            DatasetFormatError: If its bytes have changed since they were written.
        """
        place = row.placement
        content = memoryview(np.empty(place.size, np.uint8))
        self._store.read(0, self._number, place.offset, content, place.checksum, _named(row))
        text = place.json_offset - place.offset
        metadata = json.loads(bytes(content[text : text + place.json_size]))
        offsets = {m.name: o for m, o in zip(MEMBERS, place.data_offsets, strict=True) if m in WHOLE_MEMBERS}
        offsets |= {name: found.offset for name, found in place.optional.items()}
        tokens = {
            member.name: self._array(member, row, content[offsets[member.name] - place.offset :])
            for member in (*WHOLE_MEMBERS, *OPTIONAL_MEMBERS)
            if member.name in offsets
        }
        return _StoredSample(metadata, tokens, place.offset, content)

    def patches(self, row: IndexRow, sample: _StoredSample) -> Iterator[Patches]:
        """Yields the patches of each image, as :meth:`image` returns them."""
        return (self.image(row, sample, number) for number in range(len(row.items)))

    def image(self, row: IndexRow, sample: _StoredSample, number: int) -> Patches:
        """Returns the patches of one image, uint8 (P, bytes per patch).

        Raises:
            DatasetFormatError: If it does not decode, or decodes to different pixels.
        """
        item, grid = row.items[number], row.image_grid_thw[number]
        what = f"{_named(row)} image {number}"
        start = item.offset - sample.start
        stored = sample.content[max(start, 0) : start + item.bytes]
        if start < 0 or stored.nbytes != item.bytes:  # shared with another sample, and stored there
            stored = memoryview(np.empty(item.bytes, np.uint8))
            self._store.read(0, self._number, item.offset, stored, row.placement.data_checksums[-1][number], what)
        return self._decoded(stored, item.codec, grid, item.pixel_checksum, what)

    def _decoded(self, stored: memoryview, name: str, grid: Grid, checksum: int, what: str) -> Patches:
        shape = (grid[0] * grid[1] * grid[2], self._family.patch_bytes)
        if name == RAW:
            patches = np.frombuffer(stored, np.uint8).reshape(shape)
        else:
            patches = np.empty(shape, np.uint8)
            decode_item(name, stored, grid, self._family, patches, f"{self._store.path(0, self._number)}: {what}")
        self._store.require_pixels(0, self._number, patches, checksum, what)
        return patches

    def _array(self, member: Member, row: IndexRow, data: memoryview) -> npt.NDArray[Any]:
        shapes = {"position_ids": (3, row.padded_length), "image_grid_thw": (len(row.image_grid_thw), 3)}
        shape = shapes.get(member.name, (row.padded_length,))
        return np.frombuffer(data, member.dtype, int(np.prod(shape))).reshape(shape)


def _named(row: IndexRow) -> str:
    return f"row {row.source_row} key {row.key}"


def named_shard(info: ShardInfo) -> str:
    """Describes a shard and its rows in messages."""
    return f"{info.name} (rows {info.row_start} to {info.row_stop - 1})"
