"""Random access to a dataset directory: samples are views of memory-mapped shards."""

from __future__ import annotations

import hashlib
import json
import mmap
import operator
import os
import threading
from collections.abc import Buffer, Callable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from vlmdata.errors import ChangedDataError, DatasetFormatError
from vlmdata.format.index import DatasetIndex
from vlmdata.format.index_bounds import bounds_problem
from vlmdata.format.manifest import Manifest, ShardInfo
from vlmdata.format.schema import INDEX_NAME, MEMBER_BY_NAME, OPTIONAL_MEMBERS, Sample
from vlmdata.media.codecs import IMAGE, VIDEO, ItemShape, decode_item
from vlmdata.media.versions import require_pixels
from vlmdata.wording import counted

OpenShard = Callable[[ShardInfo], int]


class VlmDataset:
    """A finished dataset directory.

    ``dataset[i]`` and iteration return :class:`Sample`, after comparing its stored bytes with the checksums of the
    index; negative indices count from the end. Only the pages of accessed samples are read. Instances may be shared
    between threads and pickled to worker processes.

    Args:
        directory: Folder of the dataset. For a URL, a folder with all files except the shards.
        name: Location that the user gave, if not the folder.
        open_shard: Opens a shard that is not in the folder. The caller closes the file descriptor.
        open_sound: As ``open_shard``, for a shard of which damaged bytes were read.

    Attributes:
        directory: The folder.
        name: Location that the user gave: a folder or URL.
        manifest: Manifest of the dataset.
        family: Family of the samples.
        index: Index columns.
    """

    def __init__(
        self,
        directory: str | PathLike[str],
        *,
        name: str | None = None,
        open_shard: OpenShard | None = None,
        open_sound: OpenShard | None = None,
    ):
        self.directory = Path(directory)
        self.name = name or str(self.directory)
        self._open_shard, self._open_sound = open_shard, open_sound
        self.manifest = Manifest.read(self.directory)
        self.family = self.manifest.model_family
        self.index = DatasetIndex.read(self.directory / INDEX_NAME)
        if len(self.index) != self.manifest.totals.samples:
            raise DatasetFormatError(
                f"{self.name}: the index has {counted(len(self.index), 'row')}, but the manifest has "
                f"{counted(self.manifest.totals.samples, 'sample')}. Run `vlmdata verify` on it."
            )
        if (held := sum(shard.samples for shard in self.manifest.shards)) != len(self.index):
            raise DatasetFormatError(
                f"{self.name}: the shards of the manifest have {counted(held, 'sample')}, but the index has "
                f"{counted(len(self.index), 'row')}. Run `vlmdata verify` on it."
            )
        self._require_unchanged_index()
        for member in OPTIONAL_MEMBERS:
            if member.feature in self.manifest.features and member.name not in self.index.optional_members:
                raise DatasetFormatError(
                    f"{self.name}: the manifest lists the feature {member.feature}, but the index lacks "
                    f"{member.name}_offset. Run `vlmdata verify` on it."
                )
        if problem := bounds_problem(self.index, self.manifest, self.family):
            raise DatasetFormatError(
                f"{self.name}/{INDEX_NAME}: {problem}. Run `vlmdata verify` on the dataset to see how to repair it."
            )
        self._maps: dict[int, mmap.mmap] = {}
        self._renewed: set[int] = set()
        self._lock = threading.Lock()

    def _require_unchanged_index(self) -> None:
        """Raises an error if the index is not the file that the manifest was written for.

        Checksums of samples would not show it: they are in the index themselves. A changed length would cut a sample.
        """
        with open(self.directory / INDEX_NAME, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != (expected := self.manifest.index_sha256):
            raise DatasetFormatError(
                f"{self.name}/{INDEX_NAME}: its sha256 is {found[:16]}…, the manifest says {expected[:16]}…; the index "
                "or the manifest changed after preprocessing. Run `vlmdata verify` on the dataset to see how to repair "
                "it."
            )

    def __len__(self) -> int:
        return len(self.index)

    def __repr__(self) -> str:
        totals = self.manifest.totals
        return (
            f"VlmDataset({self.name!r}, samples={totals.samples}, tokens={totals.tokens}, "
            f"items={totals.items}, shards={len(self.manifest.shards)})"
        )

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> Sample:
        """Returns a sample.

        Raises:
            IndexError: If there is no such sample.
            ChangedDataError: If its stored bytes do not have the checksums of the index.
            DatasetFormatError: If the shard is missing or has another size, or an item does not decode.
        """
        return self._sample(self._resolve(i), pixels=True)

    def without_pixels(self, i: int) -> Sample:
        """As ``dataset[i]``, but reads and decodes no item: its ``patches`` are all 0 and take no memory."""
        return self._sample(self._resolve(i), pixels=False)

    def as_stored(self, i: int, *, pixels: bool = True) -> Sample:
        """As ``dataset[i]``, but returns changed bytes, too, to show what is wrong with a sample.

        Args:
            i: Position of the sample.
            pixels: Whether to read and decode items; otherwise ``patches`` are all 0 and take no memory.
        """
        i = self._resolve(i)
        return self._read(i, self._map(int(self.index.shard[i])), pixels=pixels, checked=False)

    def _sample(self, i: int, *, pixels: bool) -> Sample:
        shard = int(self.index.shard[i])
        data = self._map(shard)
        try:
            return self._read(i, data, pixels=pixels)
        except ChangedDataError:
            if (renewed := self._renew(shard, data)) is None:
                raise
            return self._read(i, renewed, pixels=pixels)

    def _read(self, i: int, data: mmap.mmap, *, pixels: bool, checked: bool = True) -> Sample:
        """Returns a sample of a mapped shard, by default after comparing it with its checksums."""
        index = self.index
        padded, items = int(index.padded_lengths[i]), index.shapes(i)
        patches_shape = (sum(item.rows for item in items), self.family.patch_bytes)
        kinds = [item.kind for item in items]

        def view(name: str, shape: tuple[int, ...]) -> Any:
            dtype = MEMBER_BY_NAME[name].dtype
            offset = int(index.data_offsets[name][i]) if name in index.data_offsets else -1
            if offset < 0:
                return None
            array = np.frombuffer(data, dtype=dtype, count=int(np.prod(shape)), offset=offset)
            if checked and name in index.member_checksums:  # items have their own
                self._require_unchanged(i, name, array, int(index.member_checksums[name][i]))
            return array.reshape(shape)

        if not pixels:
            patches = np.broadcast_to(np.uint8(0), patches_shape)
        else:
            if checked:
                self._require_unchanged_items(i, data)
            raw = view("patches", patches_shape)
            patches = self._decoded(i, data, items) if raw is None else raw
        return Sample(
            key=index.key(i),
            length=int(index.lengths[i]),
            input_ids=view("input_ids", (padded,)),
            loss_mask=view("loss_mask", (padded,)),
            position_ids=view("position_ids", (len(self.family.position_axes), padded)),
            image_grid_thw=view("image_grid_thw", (kinds.count(IMAGE), 3)),
            patches=patches,
            loss_weights=view("loss_weights", (padded,)),
            items=items,
            video_grid_thw=view("video_grid_thw", (kinds.count(VIDEO), 3)),
        )

    def _require_unchanged_items(self, i: int, data: mmap.mmap) -> None:
        """Compares the stored bytes of a sample's items with their checksums."""
        for number, at in enumerate(self._items(i)):
            what = f"patches of {self.index.item_kinds[at]} {number}"
            self._require_unchanged(i, what, self._stored(at, data), int(self.index.item_checksums[at]))

    def _items(self, i: int) -> range:
        """The numbers of a sample's items in the columns of items."""
        return range(int(self.index.grid_offsets[i]), int(self.index.grid_offsets[i + 1]))

    def _stored(self, item: int, data: mmap.mmap) -> memoryview:
        offset = int(self.index.item_offsets[item])
        return memoryview(data)[offset : offset + int(self.index.item_bytes[item])]

    def _require_unchanged(self, i: int, field: str, data: Buffer, checksum: int) -> None:
        if xxhash.xxh3_64_intdigest(data) != checksum:
            index = self.index
            path = f"{self.name}/{self.manifest.shards[int(index.shard[i])].name}"
            raise changed_data(f"{path}: row {index.source_row[i]} key {index.key(i)} {field}", data, checksum)

    def _decoded(self, i: int, data: mmap.mmap, items: Sequence[ItemShape]) -> npt.NDArray[np.uint8]:
        """Decodes and checks the patches of a sample with encoded items, (R, bytes per patch)."""
        index = self.index
        patches = np.empty((sum(item.rows for item in items), self.family.patch_bytes), np.uint8)
        begin = 0
        for number, (at, shape) in enumerate(zip(self._items(i), items, strict=True)):
            rows = patches[begin : begin + shape.rows]
            what = f"{self.name}: key {index.key(i)} {shape.kind} {number}"
            decode_item(index.item_codecs[at], self._stored(at, data), shape, self.family, rows, what)
            require_pixels(rows, int(index.pixel_checksums[at]), self.manifest.pixel_libraries, what)
            begin += shape.rows
        patches.flags.writeable = False
        return patches

    def metadata(self, i: int) -> dict[str, Any]:
        """Reads the metadata JSON of sample ``i``: source row, original image sizes, normalisations."""
        i = self._resolve(i)
        start, size = int(self.index.json_offset[i]), int(self.index.json_size[i])
        fields: dict[str, Any] = json.loads(self._map(int(self.index.shard[i]))[start : start + size])
        return fields

    def sample(self, key: str) -> Sample:
        """Returns the sample with this key. Raises KeyError if there is none."""
        return self[self.index.position_of(key)]

    def shard_path(self, shard: int) -> Path:
        """Returns the path of a shard file. For a dataset at a URL, the file does not exist."""
        return self.directory / self.manifest.shards[shard].name

    def _resolve(self, i: int) -> int:
        i = operator.index(i)  # int() would accept the key "000000003" and 1.5 as positions
        if not -len(self) <= i < len(self):
            raise IndexError(f"sample {i} of a dataset of {len(self)}")
        return i % len(self)

    def _map(self, shard: int) -> mmap.mmap:
        found = self._maps.get(shard)
        if found is not None:
            return found
        with self._lock:
            if shard not in self._maps:
                self._maps[shard] = self._open(shard, self._open_shard)
            return self._maps[shard]

    def _renew(self, shard: int, damaged: mmap.mmap) -> mmap.mmap | None:
        """Maps a sound copy of a shard, once per shard. Returns None if there is none."""
        if self._open_sound is None:
            return None
        with self._lock:
            if shard not in self._renewed:
                self._renewed.add(shard)
                self._maps[shard] = self._open(shard, self._open_sound)
            return None if self._maps[shard] is damaged else self._maps[shard]

    def _open(self, shard: int, open_shard: OpenShard | None) -> mmap.mmap:
        info = self.manifest.shards[shard]
        path = f"{self.name}/{info.name}"
        try:
            file = os.open(self.shard_path(shard), os.O_RDONLY) if open_shard is None else open_shard(info)
            try:
                mapped = mmap.mmap(file, 0, access=mmap.ACCESS_READ)
            finally:
                os.close(file)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise DatasetFormatError(
                f"{path}: cannot map the shard: {error}. Run `vlmdata verify` on the dataset to see how to repair it."
            ) from error
        if len(mapped) != info.bytes:
            # Views past the end of a short file would raise SIGBUS instead of an exception.
            raise DatasetFormatError(
                f"{path}: {len(mapped)} bytes, but the manifest says {info.bytes}; the shard was truncated or "
                "replaced. Run `vlmdata verify` on the dataset to see how to repair it."
            )
        return mapped

    def __getstate__(self) -> dict[str, Any]:
        opening = {"open_shard": self._open_shard, "open_sound": self._open_sound}
        return {"directory": self.directory, "name": self.name, **opening}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def changed_data(what: str, data: Buffer, checksum: int) -> ChangedDataError:
    """Returns the error for bytes that changed after preprocessing."""
    return ChangedDataError(
        f"{what}: the data changed after preprocessing: xxh3 is {xxhash.xxh3_64_intdigest(data):016x}, expected "
        f"{checksum:016x}. Run `vlmdata verify` on the dataset to see how to repair it."
    )
