"""The index: one parquet row per sample, enough to plan packing and to read any member by its offset."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from vlmdata.errors import DatasetFormatError, NotFoundError
from vlmdata.families import DEFAULT_FAMILY, family
from vlmdata.format.index_row import INDEX_SCHEMA, ITEM_COLUMNS, WHOLE_MEMBERS, IndexRow, index_schema
from vlmdata.format.schema import IMAGE, MEMBERS, OPTIONAL_MEMBERS
from vlmdata.format.shard import ArrayPlace, ItemPlace, Placement
from vlmdata.media.codecs import RAW


def _with_raw_items(table: pa.Table, patch_bytes: int) -> pa.Table:
    """Adds the item columns to an index of format 1.0, in which a sample's images are consecutive in its patches."""
    grids = table.column("image_grid_thw").combine_chunks()
    counts = np.asarray(grids.value_lengths().to_numpy(zero_copy_only=False), dtype=np.int64)
    shapes = np.asarray(grids.flatten().flatten().to_numpy(zero_copy_only=False), dtype=np.int64).reshape(-1, 3)
    sizes = shapes.prod(axis=1) * patch_bytes
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    ends = np.cumsum(counts)
    firsts = np.asarray(table.column("patches_offset").to_numpy(), dtype=np.int64)
    offsets = before[:-1] + np.repeat(firsts - before[ends - counts], counts)
    bounds = pa.array(np.concatenate([[0], ends]), pa.int32())
    checksums = table.column("image_checksums").combine_chunks().flatten()
    names = (pa.repeat(IMAGE, len(sizes)), pa.repeat(RAW, len(sizes)))
    values = (pa.array(offsets), pa.array(sizes), checksums, *names)
    for name, value in zip(ITEM_COLUMNS, values, strict=True):
        kind = INDEX_SCHEMA.field(name).type
        table = table.append_column(name, pa.ListArray.from_arrays(bounds, value.cast(kind.value_type)))
    return table


class DatasetIndex:
    """The index as read-only numpy columns of length n (one entry per sample), in storage order.

    Fixed-width columns are views of the arrow buffers; nothing is copied or converted until needed.

    Attributes:
        table: The underlying arrow table.
    """

    def __init__(self, table: pa.Table):
        self.table = table.combine_chunks()

    @classmethod
    def read(
        cls, path: Path, patch_bytes: int = family(DEFAULT_FAMILY).patch_bytes, *, shard: int | None = None
    ) -> DatasetIndex:
        """Reads ``index.parquet``.

        Args:
            path: The file.
            patch_bytes: Bytes per patch, to find the items in an index of format 1.0.
            shard: Number of the shard whose samples are wanted; only their row group is read. None is all samples.

        Raises:
            DatasetFormatError: If the file is missing, damaged, or lacks a column.
        """
        try:
            chosen = None if shard is None else [("shard", "=", shard)]
            table = pq.read_table(path, memory_map=False, filters=chosen)
            names = table.column_names
        except (OSError, ValueError, pa.ArrowException) as error:  # ValueError: names that are not UTF-8
            what = "no such file" if isinstance(error, FileNotFoundError) else error
            raise DatasetFormatError(
                f"{path}: cannot read the index: {what}. Run the same `vlmdata preprocess` command again."
            ) from error
        features = [str(m.feature) for m in OPTIONAL_MEMBERS if f"{m.name}_offset" in names]
        schema = index_schema(features)
        # An index of format 1.0 has no item columns.
        old = not set(ITEM_COLUMNS).intersection(names)
        stored = pa.schema([field for field in schema if not (old and field.name in ITEM_COLUMNS)])
        missing = [name for name in stored.names if name not in names]
        if missing:
            raise DatasetFormatError(f"{path}: the index lacks the columns {', '.join(missing)}")
        try:
            # Ignore columns of later minor versions.
            table = table.select(stored.names).cast(stored)
            index = cls(_with_raw_items(table, patch_bytes).select(schema.names).cast(schema) if old else table)
        except (pa.ArrowException, ValueError) as error:
            raise DatasetFormatError(f"{path}: a column of the index has the wrong type or nulls: {error}") from error
        for name in ("image_starts", "image_checksums", *ITEM_COLUMNS):
            # All samples share one flat array per column, addressed through the grids.
            if not np.array_equal(index._list_lengths(name), index.image_counts):
                raise DatasetFormatError(f"{path}: {name} does not have one entry per image")
        return index

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def column(self, name: str) -> npt.NDArray[Any]:
        """Returns a fixed-width column as a read-only array of shape (n,)."""
        values = self._chunk(name).to_numpy(zero_copy_only=False)
        values.flags.writeable = False
        return np.asarray(values)

    def _chunk(self, name: str) -> pa.Array:
        column = self.table.column(name)
        if column.num_chunks == 0:
            return pa.array([], type=column.type)
        assert column.num_chunks == 1
        return column.chunk(0)

    def _list_lengths(self, name: str) -> npt.NDArray[np.int32]:
        return np.asarray(self._chunk(name).value_lengths().to_numpy(zero_copy_only=False), dtype=np.int32)

    @cached_property
    def lengths(self) -> npt.NDArray[np.int32]:
        """True lengths in tokens, int32 (n,)."""
        return self.column("length")

    @cached_property
    def padded_lengths(self) -> npt.NDArray[np.int32]:
        """Stored lengths in tokens, int32 (n,)."""
        return self.column("padded_length")

    @cached_property
    def num_targets(self) -> npt.NDArray[np.int32]:
        """Targets, int32 (n,)."""
        return self.column("num_targets")

    @cached_property
    def target_turns(self) -> npt.NDArray[np.int32]:
        """Assistant turns that are targets, int32 (n,)."""
        return self.column("target_turns")

    @cached_property
    def truncated(self) -> npt.NDArray[np.bool_]:
        """Whether the last answer was truncated, bool (n,)."""
        return self.column("truncated")

    @cached_property
    def num_patches(self) -> npt.NDArray[np.int32]:
        """Vision patches, int32 (n,)."""
        return self.column("num_patches")

    @cached_property
    def shard(self) -> npt.NDArray[np.int32]:
        """Shard numbers, int32 (n,), ascending."""
        return self.column("shard")

    @cached_property
    def source_row(self) -> npt.NDArray[np.int64]:
        """Source rows, int64 (n,), ascending."""
        return self.column("source_row")

    @cached_property
    def offset(self) -> npt.NDArray[np.int64]:
        """First byte of each sample in its shard, int64 (n,)."""
        return self.column("offset")

    @cached_property
    def size(self) -> npt.NDArray[np.int64]:
        """Bytes of each sample in its shard, int64 (n,)."""
        return self.column("size")

    @cached_property
    def checksum(self) -> npt.NDArray[np.uint64]:
        """xxh3-64 of each sample's bytes, uint64 (n,)."""
        return self.column("checksum")

    @cached_property
    def optional_members(self) -> tuple[str, ...]:
        """Names of the optional members that samples of this dataset may have."""
        return tuple(m.name for m in OPTIONAL_MEMBERS if f"{m.name}_offset" in self.table.column_names)

    @cached_property
    def data_offsets(self) -> dict[str, npt.NDArray[np.int64]]:
        """For each member, the first byte of its array data in the shard: int64 (n,); -1 for samples without it."""
        names = [*(member.name for member in MEMBERS), *self.optional_members]
        return {name: self.column(f"{name}_offset") for name in names}

    @cached_property
    def member_checksums(self) -> dict[str, npt.NDArray[np.uint64]]:
        """For each member except ``patches``, the xxh3-64 of its array data: uint64 (n,)."""
        names = [*(member.name for member in WHOLE_MEMBERS), *self.optional_members]
        return {name: self.column(f"{name}_checksum") for name in names}

    @cached_property
    def image_checksums(self) -> npt.NDArray[np.uint64]:
        """xxh3-64 of the stored bytes of each image, uint64 (G,), in the order of :attr:`grids`."""
        flat = self._chunk("image_checksums").flatten()
        return np.asarray(flat.to_numpy(zero_copy_only=False), dtype=np.uint64)

    @cached_property
    def pixel_checksums(self) -> npt.NDArray[np.uint64]:
        """xxh3-64 of the decoded patches of each image, uint64 (G,); for raw images that of the stored bytes."""
        flat = self._chunk("pixel_checksums").flatten()
        return np.asarray(flat.to_numpy(zero_copy_only=False), dtype=np.uint64)

    @cached_property
    def item_offsets(self) -> npt.NDArray[np.int64]:
        """Offset of each image in its shard in bytes, int64 (G,), in the order of :attr:`grids`."""
        flat = self._chunk("item_offsets").flatten()
        return np.asarray(flat.to_numpy(zero_copy_only=False), dtype=np.int64)

    @cached_property
    def item_bytes(self) -> npt.NDArray[np.int64]:
        """Stored bytes of each image, int64 (G,)."""
        flat = self._chunk("item_bytes").flatten()
        return np.asarray(flat.to_numpy(zero_copy_only=False), dtype=np.int64)

    @cached_property
    def item_kinds(self) -> npt.NDArray[np.object_]:
        """Kind of each item, object (G,); equal names share one object."""
        return self._names("item_kinds")

    @cached_property
    def item_codecs(self) -> npt.NDArray[np.object_]:
        """Codec name of each item, object (G,); equal names share one object."""
        return self._names("item_codecs")

    def _names(self, name: str) -> npt.NDArray[np.object_]:
        encoded = self._chunk(name).flatten().dictionary_encode()
        names = np.array(encoded.dictionary.to_pylist(), dtype=object)
        return np.asarray(names[encoded.indices.to_numpy(zero_copy_only=False)], dtype=object)

    @cached_property
    def json_offset(self) -> npt.NDArray[np.int64]:
        """First byte of each sample's metadata JSON, int64 (n,)."""
        return self.column("json_offset")

    @cached_property
    def json_size(self) -> npt.NDArray[np.int32]:
        """Bytes of each sample's metadata JSON, int32 (n,)."""
        return self.column("json_size")

    @cached_property
    def grid_offsets(self) -> npt.NDArray[np.int64]:
        """int64 (n + 1,): images of sample i are ``grids[grid_offsets[i] : grid_offsets[i + 1]]``."""
        counts = np.zeros(len(self) + 1, dtype=np.int64)
        np.cumsum(self._list_lengths("image_grid_thw"), out=counts[1:])
        return counts

    @cached_property
    def grids(self) -> npt.NDArray[np.int32]:
        """Grids of all images, int32 (G, 3)."""
        flat = self._chunk("image_grid_thw").flatten().flatten()
        grids = np.asarray(flat.to_numpy(zero_copy_only=False), dtype=np.int32).reshape(-1, 3)
        grids.flags.writeable = False
        return grids

    @cached_property
    def image_starts(self) -> npt.NDArray[np.int32]:
        """First token of each image within its sample, int32 (G,), in the order of :attr:`grids`."""
        flat = self._chunk("image_starts").flatten()
        return np.asarray(flat.to_numpy(zero_copy_only=False), dtype=np.int32)

    @cached_property
    def image_counts(self) -> npt.NDArray[np.int64]:
        """Images per sample, int64 (n,)."""
        return np.diff(self.grid_offsets)

    @property
    def keys(self) -> pa.StringArray:
        """All keys as an arrow string array (n,); ``keys[i].as_py()`` is one key."""
        return self._chunk("key")

    def key(self, i: int) -> str:
        """Returns the key of sample ``i``."""
        return str(self.keys[i].as_py())

    def position_of(self, key: str) -> int:
        """Returns the position of the sample with this key.

        Raises:
            NotFoundError: If there is no such sample.
        """
        found = self._by_key.get(key)
        if found is None:
            first, last = (self.key(0), self.key(len(self) - 1)) if len(self) else ("none", "none")
            raise NotFoundError(f"no sample {key!r}; keys run from {first} to {last}")
        return found

    @cached_property
    def _by_key(self) -> dict[str, int]:
        return {key: i for i, key in enumerate(self.keys.to_pylist())}

    def row(self, i: int) -> IndexRow:
        """Returns the index row of sample ``i``."""
        images = slice(self.grid_offsets[i], self.grid_offsets[i + 1])
        items = (self.item_offsets, self.item_bytes, self.pixel_checksums, self.item_kinds, self.item_codecs)
        placement = Placement(
            offset=int(self.offset[i]),
            size=int(self.size[i]),
            checksum=int(self.checksum[i]),
            json_offset=int(self.json_offset[i]),
            json_size=int(self.json_size[i]),
            data_offsets=tuple(int(self.data_offsets[m.name][i]) for m in MEMBERS),
            data_checksums=(
                *((int(self.member_checksums[m.name][i]),) for m in WHOLE_MEMBERS),
                tuple(self.image_checksums[images].tolist()),
            ),
            optional={
                name: ArrayPlace(int(self.data_offsets[name][i]), int(self.member_checksums[name][i]))
                for name in self.optional_members
                if self.data_offsets[name][i] >= 0
            },
            items=tuple(map(ItemPlace, *(column[images].tolist() for column in items))),
        )
        grids = self.grids[images].tolist()
        return IndexRow(
            key=self.key(i),
            source_row=int(self.source_row[i]),
            shard=int(self.shard[i]),
            placement=placement,
            length=int(self.lengths[i]),
            padded_length=int(self.padded_lengths[i]),
            num_targets=int(self.num_targets[i]),
            target_turns=int(self.target_turns[i]),
            truncated=bool(self.truncated[i]),
            image_grid_thw=tuple((t, h, w) for t, h, w in grids),
            image_starts=tuple(self.image_starts[images].tolist()),
        )
