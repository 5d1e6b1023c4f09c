"""Random access to a dataset directory: samples are views of memory-mapped shards."""

from __future__ import annotations

import json
import mmap
import operator
import threading
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from vlmdata.errors import DatasetFormatError
from vlmdata.format.index import DatasetIndex
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import INDEX_NAME, MEMBER_BY_NAME, OPTIONAL_MEMBERS, Sample
from vlmdata.wording import counted


class VlmDataset:
    """A finished dataset directory.

    ``dataset[i]`` and iteration give :class:`Sample`; negative indices count from the end. Only the pages that are
    touched are read. Instances may be shared between threads and pickled to worker processes.

    Attributes:
        directory: The dataset's folder.
        manifest: Its manifest.
        family: The model family its samples are made for.
        index: Its index columns.
    """

    def __init__(self, directory: str | PathLike[str]):
        self.directory = Path(directory)
        self.manifest = Manifest.read(self.directory)
        self.family = self.manifest.model_family
        self.index = DatasetIndex.read(self.directory / INDEX_NAME)
        if len(self.index) != self.manifest.totals.samples:
            raise DatasetFormatError(
                f"{self.directory}: the index has {counted(len(self.index), 'row')}, the manifest "
                f"{counted(self.manifest.totals.samples, 'sample')}. Run `vlmdata verify` on it."
            )
        for member in OPTIONAL_MEMBERS:
            if member.feature in self.manifest.features and member.name not in self.index.optional_members:
                raise DatasetFormatError(
                    f"{self.directory}: the manifest lists the feature {member.feature}, but the index lacks "
                    f"{member.name}_offset. Run `vlmdata verify` on it."
                )
        self._maps: dict[int, mmap.mmap] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.index)

    def __repr__(self) -> str:
        totals = self.manifest.totals
        return (
            f"VlmDataset({str(self.directory)!r}, samples={totals.samples}, tokens={totals.tokens}, "
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
        patches = int(index.num_patches[i])

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
            patches=view("patches", (patches, self.family.patch_bytes)),
            loss_weights=view("loss_weights", (padded,)),
        )

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
        """Path of a shard file."""
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
        path, info = self.shard_path(shard), self.manifest.shards[shard]
        try:
            with open(path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
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
        return {"directory": self.directory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["directory"])  # type: ignore[misc]


def open_dataset(directory: str | PathLike[str]) -> VlmDataset:
    """Opens a dataset directory for random access.

    Args:
        directory: What ``vlmdata preprocess --out`` wrote.

    Returns:
        The dataset; ``dataset[i]`` is a :class:`Sample`, ``dataset.index`` its columns.

    Raises:
        DatasetFormatError: If it is not a finished vlmdata dataset or needs a newer reader.
    """
    return VlmDataset(directory)
