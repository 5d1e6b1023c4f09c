"""Random access to a dataset directory: samples are views of memory-mapped shards."""

from __future__ import annotations

import json
import mmap
import operator
import os
import threading
from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vlmdata.errors import DatasetFormatError
from vlmdata.format.index import DatasetIndex
from vlmdata.format.manifest import Manifest, ShardInfo
from vlmdata.format.schema import INDEX_NAME, MEMBER_BY_NAME, OPTIONAL_MEMBERS, Sample
from vlmdata.locations import is_url, place_of
from vlmdata.media.codecs import decode_item
from vlmdata.wording import counted

OpenShard = Callable[[ShardInfo], int]


class VlmDataset:
    """A finished dataset directory.

    ``dataset[i]`` and iteration give :class:`Sample`; negative indices count from the end. Only the pages that are
    touched are read. Instances may be shared between threads and pickled to worker processes.

    Args:
        directory: The dataset's folder; for a dataset at a URL, the one with a copy of all but its shards.
        name: The dataset as the user named it, if that is not the folder.
        open_shard: Opens a shard, if these are not in the folder; the caller closes the file descriptor.

    Attributes:
        directory: The folder.
        name: The dataset as the user named it: a folder or URL.
        manifest: Its manifest.
        family: The model family its samples are made for.
        index: Its index columns.
    """

    def __init__(self, directory: str | PathLike[str], *, name: str | None = None, open_shard: OpenShard | None = None):
        self.directory = Path(directory)
        self.name = name or str(self.directory)
        self._open_shard = open_shard
        self.manifest = Manifest.read(self.directory)
        self.family = self.manifest.model_family
        self.index = DatasetIndex.read(self.directory / INDEX_NAME, self.family.patch_bytes)
        if len(self.index) != self.manifest.totals.samples:
            raise DatasetFormatError(
                f"{self.name}: the index has {counted(len(self.index), 'row')}, the manifest "
                f"{counted(self.manifest.totals.samples, 'sample')}. Run `vlmdata verify` on it."
            )
        for member in OPTIONAL_MEMBERS:
            if member.feature in self.manifest.features and member.name not in self.index.optional_members:
                raise DatasetFormatError(
                    f"{self.name}: the manifest lists the feature {member.feature}, but the index lacks "
                    f"{member.name}_offset. Run `vlmdata verify` on it."
                )
        self._maps: dict[int, mmap.mmap] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.index)

    def __repr__(self) -> str:
        totals = self.manifest.totals
        return (
            f"VlmDataset({self.name!r}, samples={totals.samples}, tokens={totals.tokens}, "
            f"images={totals.images}, shards={len(self.manifest.shards)})"
        )

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> Sample:
        i = self._resolve(i)
        index = self.index
        data = self._map(int(index.shard[i]))
        padded = int(index.padded_lengths[i])
        images = int(index.image_counts[i])

        def view(name: str, shape: tuple[int, ...]) -> Any:
            dtype = MEMBER_BY_NAME[name].dtype
            offset = int(index.data_offsets[name][i]) if name in index.data_offsets else -1
            if offset < 0:
                return None
            count = int(np.prod(shape))
            return np.frombuffer(data, dtype=dtype, count=count, offset=offset).reshape(shape)

        return Sample(
            key=index.key(i),
            length=int(index.lengths[i]),
            input_ids=view("input_ids", (padded,)),
            loss_mask=view("loss_mask", (padded,)),
            position_ids=view("position_ids", (3, padded)),
            image_grid_thw=view("image_grid_thw", (images, 3)),
            patches=view("patches", (int(index.num_patches[i]), self.family.patch_bytes))
            if int(index.data_offsets["patches"][i]) >= 0
            else self._decoded(i, data),
            loss_weights=view("loss_weights", (padded,)),
        )

    def _decoded(self, i: int, data: mmap.mmap) -> npt.NDArray[np.uint8]:
        """The patches of a sample whose items a codec encoded, (P, bytes per patch)."""
        index = self.index
        patches = np.empty((int(index.num_patches[i]), self.family.patch_bytes), np.uint8)
        begin, stored = 0, memoryview(data)
        for number in range(int(index.grid_offsets[i]), int(index.grid_offsets[i + 1])):
            t, h, w = index.grids[number].tolist()
            end, offset = begin + t * h * w, int(index.item_offsets[number])
            payload = stored[offset : offset + int(index.item_bytes[number])]
            what = f"{self.name}: key {index.key(i)} image {number - int(index.grid_offsets[i])}"
            decode_item(index.item_codecs[number], payload, (t, h, w), self.family, patches[begin:end], what)
            begin = end
        patches.flags.writeable = False
        return patches

    def metadata(self, i: int) -> dict[str, Any]:
        """The metadata JSON of sample ``i``: source row, original image sizes, what was normalised."""
        i = self._resolve(i)
        start, size = int(self.index.json_offset[i]), int(self.index.json_size[i])
        fields: dict[str, Any] = json.loads(self._map(int(self.index.shard[i]))[start : start + size])
        return fields

    def sample(self, key: str) -> Sample:
        """The sample with this key; KeyError if there is none."""
        return self[self.index.position_of(key)]

    def shard_path(self, shard: int) -> Path:
        """Path of a shard file; of a dataset at a URL, none is there."""
        return self.directory / self.manifest.shards[shard].name

    def _resolve(self, i: int) -> int:
        i = operator.index(i)  # int() would take the key "000000003" and 1.5 for positions
        if not -len(self) <= i < len(self):
            raise IndexError(f"sample {i} of a dataset of {len(self)}")
        return i % len(self)

    def _map(self, shard: int) -> mmap.mmap:
        found = self._maps.get(shard)
        if found is not None:
            return found
        with self._lock:
            if shard not in self._maps:
                self._maps[shard] = self._open(shard)
            return self._maps[shard]

    def _open(self, shard: int) -> mmap.mmap:
        info = self.manifest.shards[shard]
        path = f"{self.name}/{info.name}"
        try:
            file = os.open(self.shard_path(shard), os.O_RDONLY) if self._open_shard is None else self._open_shard(info)
            try:
                mapped = mmap.mmap(file, 0, access=mmap.ACCESS_READ)
            finally:
                os.close(file)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise DatasetFormatError(
                f"{path}: cannot map the shard: {error}. Run `vlmdata verify` on the dataset; it says how to mend it."
            ) from error
        if len(mapped) != info.bytes:
            # Views past the end of a short file would be a SIGBUS rather than an exception.
            raise DatasetFormatError(
                f"{path}: {len(mapped)} bytes, but the manifest says {info.bytes}; the shard was cut or "
                "replaced. Run `vlmdata verify` on the dataset; it says how to mend it."
            )
        return mapped

    def __getstate__(self) -> dict[str, Any]:
        return {"directory": self.directory, "name": self.name, "open_shard": self._open_shard}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def open_dataset(location: str | PathLike[str]) -> VlmDataset:
    """Opens a dataset for random access.

    Args:
        location: The folder that ``vlmdata preprocess --out`` wrote, or an fsspec URL of it (``s3://…``). Shards of a
            URL are fetched to the cache (``$VLMDATA_CACHE``) when they are first touched.

    Returns:
        The dataset; ``dataset[i]`` is a :class:`Sample`, ``dataset.index`` its columns.

    Raises:
        DatasetFormatError: If it is not a finished vlmdata dataset or needs a newer reader.
    """
    place = place_of(location)
    if is_url(place):
        from vlmdata.loader.open import open_remote  # fsspec, the cache and its locks: for URLs only

        return open_remote(place)
    return VlmDataset(place)
