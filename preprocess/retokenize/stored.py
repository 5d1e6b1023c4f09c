"""What a finished shard has of each source row: its samples, their images and videos as stored, and its rejections."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from vlmdata.format.index import DatasetIndex
from vlmdata.format.index_row import IndexRow
from vlmdata.format.ledger import Rejection, read_ledger
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import IMAGE_FILES, IMAGE_FILES_NAME, INDEX_NAME, KEPT, LEDGER_NAME, ROWS_NAME
from vlmdata.format.shard import EncodedItem
from vlmdata.format.source_columns import SOURCE
from vlmdata.media.codecs import IMAGE, RAW, VIDEO
from vlmdata.preprocess.conversation import ImagePart, MediaPart, VideoPart
from vlmdata.preprocess.encode.sample import SampleItem, Views
from vlmdata.preprocess.encode.stored import StoredImage, StoredVideo
from vlmdata.preprocess.recipes.image_files import RecordedFile
from vlmdata.preprocess.recode.shard import SampleReader, StoredSample
from vlmdata.storage.shards import DatasetShards


@dataclass(frozen=True, eq=False)
class OldShards:
    """Access to the shards of a finished dataset. Small and cheap to pickle."""

    name: str  # location of the dataset, as the user gave it
    manifest: Manifest
    directory: Path  # a local folder with all files except the shards
    shards: DatasetShards

    @cached_property
    def rejections(self) -> Mapping[int, Sequence[Rejection]]:
        """The lines of the ledger by row."""
        found: dict[int, list[Rejection]] = defaultdict(list)
        for line in read_ledger(self.directory / LEDGER_NAME):
            found[line.row].append(line)
        return found

    def files(self, shard: int) -> dict[str, RecordedFile]:
        """Returns the image and video files that rows of a shard name, by path."""
        if IMAGE_FILES not in self.manifest.source:
            return {}
        rows = pq.read_table(self.directory / IMAGE_FILES_NAME, filters=[("shard", "=", shard)]).to_pylist()
        return {row["path"]: RecordedFile(row["path"], row["bytes"], row["xxh3_128"]) for row in rows}

    def rows(self, numbers: Collection[int]) -> dict[int, dict[str, Any]]:
        """Returns what is recorded of some rows by number: content, files what was read, and number in the source."""
        if not numbers or not (self.directory / ROWS_NAME).exists():  # made by select, join or recode, or at a URL
            return {}
        table = pq.read_table(self.directory / ROWS_NAME, filters=[("row", "in", list(numbers))])
        found = {row["row"]: row for row in table.to_pylist()}
        told = ("content", "source_row", "read", "file", "file_row", "id")
        return {
            number: {
                **{name: row.get(name) for name in told},
                "columns": json.loads(row.get("columns") or "null"),
                "files": row["files"] or [],
            }
            for number, row in found.items()
        }

    def open(self, shard: int) -> OldShard:
        """Opens a shard."""
        return OldShard(self, shard)

    def __getstate__(self) -> dict[str, Any]:
        fields = ("name", "manifest", "directory", "shards")  # not the ledger, which may be large
        return {name: getattr(self, name) for name in fields}


@dataclass(frozen=True, eq=False)
class OldSample:
    """A sample of a finished dataset. Its images and videos are read when they are asked for."""

    metadata: Mapping[str, Any]
    item: Callable[[int], SampleItem]  # returns the image or video of a number
    count: int  # images and videos

    @property
    def kept(self) -> str | None:
        """The conversation or document of this sample and those after it; None if an earlier one has it."""
        return self.metadata.get(KEPT)

    @property
    def views(self) -> list[Views]:
        """Its images and videos, each with its pictures."""
        found: list[list[SampleItem]] = []
        for item in map(self.item, range(self.count)):
            if item.view:
                found[-1].append(item)
            else:
                found.append([item])
        return list(map(tuple, found))


class OldShard:
    """Reads the samples of one shard by their source row; every byte is checked."""

    def __init__(self, old: OldShards, number: int):
        self._family, self._fractions = old.manifest.model_family, old.manifest.counts_fractions
        self._reader = SampleReader(number, old.manifest, old.shards)
        index = DatasetIndex.read(old.directory / INDEX_NAME, shard=number)
        self._rows: dict[int, list[IndexRow]] = defaultdict(list)
        for i in range(len(index)):
            self._rows[int(index.source_row[i])].append(index.row(i))

    def samples(self, row: int) -> list[OldSample]:
        """Reads the samples of a source row, in order.

        Raises:
            DatasetFormatError: If their bytes have changed since they were written.
        """
        return [self._sample(each) for each in self._rows.get(row, ())]

    def source_values(self, row: int) -> Mapping[str, Any]:
        """Returns the values of source columns that the samples of a row have, as the source had them."""
        return dict(self._reader.read(self._rows[row][0]).metadata.get(SOURCE, {}))

    def close(self) -> None:
        """Closes the file."""
        self._reader.close()

    def _sample(self, row: IndexRow) -> OldSample:
        sample = self._reader.read(row)
        return OldSample(sample.metadata, partial(self._item, row, sample), len(row.items))

    def _item(self, row: IndexRow, sample: StoredSample, number: int) -> SampleItem:
        place, family, origin = row.items[number], self._family, sample.metadata["images"][number]
        stored = self._reader.stored(row, sample, number)
        shape, rows = place.shape, (place.shape.rows, family.patch_bytes)
        patches = (
            np.frombuffer(stored, np.uint8).reshape(rows)
            if place.codec == RAW
            else np.broadcast_to(np.uint8(0), rows)  # not decoded, and not read
        )
        step: float = 1
        if shape.kind == VIDEO:
            assert family.video is not None
            step = family.video.temporal_step(float(origin["seconds_per_patch"]), self._fractions)
        _, height, width = shape.grid
        return SampleItem(
            patches,
            shape.grid,
            (height * family.patch_size, width * family.patch_size),
            int(family.item_tokens(shape.kind, [shape.grid])[0]),
            origin,
            b"",
            origin.get("view", 0),
            kind=shape.kind,
            copies=shape.copies,
            step=step,
            stored=EncodedItem(stored, shape, place.codec, place.pixel_checksum),
        )


def stored_views(samples: Sequence[OldSample], is_document: bool) -> list[Views]:
    """Returns the images and videos of a conversation or document, in order, as far as its samples have them.

    Args:
        samples: Its samples: one, one for each learned turn, or the pieces of a document.
        is_document: Whether it is a document, whose pieces have different images.
    """
    if is_document:
        return [views for sample in samples for views in sample.views]
    return samples[-1].views if samples else []  # the turns before the last have a part of its images


def stored_part(part: MediaPart, views: Views, file_bytes: int) -> MediaPart:
    """Returns a part with its pixels from a dataset."""
    views = tuple(replace(view, stored_file_bytes=file_bytes) for view in views)
    fields = {name: getattr(part, name) for name in part.__dataclass_fields__ if name not in ("views", "item")}
    if isinstance(part, ImagePart):
        return StoredImage(**fields, views=views)
    assert isinstance(part, VideoPart)
    return StoredVideo(**fields, item=views[0])


def is_of_kind(part: MediaPart, views: Views) -> bool:
    """Whether stored pictures can be those of a part."""
    return views[0].kind == (IMAGE if isinstance(part, ImagePart) else VIDEO)
