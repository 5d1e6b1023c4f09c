"""The index: one parquet row per sample, enough to plan packing and to read any member by its offset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from vlmdata.errors import DatasetFormatError, NotFoundError
from vlmdata.format.earlier import upgraded_index
from vlmdata.format.index_row import ITEM_COLUMNS, WHOLE_MEMBERS, IndexRow, index_schema
from vlmdata.format.manifest import ShardInfo, Totals
from vlmdata.format.schema import DOCUMENTS, KIND_FEATURES, MEMBER_BY_NAME, MEMBERS, OPTIONAL_MEMBERS
from vlmdata.format.shard import ArrayPlace, ItemPlace, Placement
from vlmdata.format.source_columns import source_fields, values_of
from vlmdata.media.codecs import ItemShape, codec_feature

#: The codec that stores files as they are.
_FILES = "source"


def _column[T: np.generic](name: str, kind: type[T]) -> cached_property[npt.NDArray[T]]:
    """A fixed-width column, (n,)."""

    def read(index: DatasetIndex) -> npt.NDArray[T]:
        return index.column(name)

    return _cached(read)


def _items[T: np.generic](name: str, kind: type[T]) -> cached_property[npt.NDArray[T]]:
    """A column with an entry per item, (G,), in the order of :attr:`DatasetIndex.grids`."""

    def read(index: DatasetIndex) -> npt.NDArray[T]:
        return np.asarray(_array(index._flat(name)), dtype=kind)

    return _cached(read)


def _names(name: str) -> cached_property[npt.NDArray[np.object_]]:
    """A column of names with an entry per item, object (G,); equal names share one object."""

    def read(index: DatasetIndex) -> npt.NDArray[np.object_]:
        encoded = index._flat(name).dictionary_encode()
        names = np.array(encoded.dictionary.to_pylist(), dtype=object)
        return np.asarray(names[_array(encoded.indices)], dtype=object)

    return _cached(read)


def _require_bytes(path: Path, metadata: pq.FileMetaData) -> None:
    """Refuses more values than a file can have: equal ones take next to no bytes, but checksums differ by sample.

    Raises:
        DatasetFormatError: If a column has more values than the file has bits.
    """
    groups, columns = range(metadata.num_row_groups), range(metadata.num_columns)
    size = path.stat().st_size
    for column in columns:
        if (count := sum(metadata.row_group(group).column(column).num_values for group in groups)) > 8 * size:
            raise DatasetFormatError(f"{path}: {count:,} rows or items in a file of {size:,} bytes")


def _array(values: pa.Array) -> npt.NDArray[Any]:
    """Returns values as an array. If they are numbers, does not import pandas, as ``to_numpy`` always does."""
    if pa.types.is_boolean(values.type) or not pa.types.is_primitive(values.type) or values.null_count:
        return np.asarray(values.to_numpy(zero_copy_only=False))
    return np.from_dlpack(values)


def _cached[T](read: Callable[[DatasetIndex], T]) -> cached_property[T]:
    return cached_property(read)


class DatasetIndex:
    """The index as read-only numpy columns of length n (one entry per sample), in storage order.

    Fixed-width columns are views of the arrow buffers; nothing is copied or converted until needed. An index of an
    earlier schema has the columns of this one. G is the number of all items.

    Attributes:
        table: The underlying arrow table.
    """

    lengths = _column("length", np.int32)
    """True lengths in tokens, int32 (n,)."""
    padded_lengths = _column("padded_length", np.int32)
    """Stored lengths in tokens, int32 (n,)."""
    num_targets = _column("num_targets", np.int32)
    """Targets, int32 (n,)."""
    target_turns = _column("target_turns", np.int32)
    """Assistant turns that are targets, int32 (n,)."""
    truncated = _column("truncated", np.bool_)
    """Whether the last answer was truncated, bool (n,)."""
    num_patches = _column("num_patches", np.int32)
    """Vision patches, int32 (n,)."""
    shard = _column("shard", np.int32)
    """Shard numbers, int32 (n,), ascending."""
    source_row = _column("source_row", np.int64)
    """Source rows, int64 (n,), ascending."""
    offset = _column("offset", np.int64)
    """First byte of each sample in its shard, int64 (n,)."""
    size = _column("size", np.int64)
    """Bytes of each sample in its shard, int64 (n,)."""
    checksum = _column("checksum", np.uint64)
    """xxh3-64 of each sample's bytes, uint64 (n,)."""
    json_offset = _column("json_offset", np.int64)
    """First byte of each sample's metadata JSON, int64 (n,)."""
    json_size = _column("json_size", np.int32)
    """Bytes of each sample's metadata JSON, int32 (n,)."""
    item_kinds = _names("item_kinds")
    """Kind of each item, object (G,)."""
    item_codecs = _names("item_codecs")
    """Codec name of each item, object (G,)."""
    item_copies = _items("item_copies", np.int32)
    """Temporal copies stored of each patch of an item, int32 (G,)."""
    item_starts = _items("item_starts", np.int32)
    """First token of each item within its sample, int32 (G,)."""
    item_offsets = _items("item_offsets", np.int64)
    """Offset of each item in its shard in bytes, int64 (G,)."""
    item_bytes = _items("item_bytes", np.int64)
    """Stored bytes of each item, int64 (G,)."""
    item_checksums = _items("item_checksums", np.uint64)
    """xxh3-64 of the stored bytes of each item, uint64 (G,)."""
    pixel_checksums = _items("pixel_checksums", np.uint64)
    """xxh3-64 of the decoded patches of each item, uint64 (G,); of raw items that of the stored bytes."""

    def __init__(self, table: pa.Table):
        self.table = table.combine_chunks()

    @classmethod
    def read(cls, path: Path, *, shard: int | None = None) -> DatasetIndex:
        """Reads ``index.parquet``.

        Args:
            path: The file.
            shard: Number of the shard whose samples are wanted; only their row group is read. None is all samples.

        Raises:
            DatasetFormatError: If the file is missing, damaged, or lacks a column.
        """
        try:
            if shard is None:
                with pq.ParquetFile(path, memory_map=False) as file:  # pq.read_table imports pandas
                    _require_bytes(path, file.metadata)
                    table = file.read()
            else:
                table = pq.read_table(path, memory_map=False, filters=[("shard", "=", shard)])
            names = table.column_names
        except (OSError, ValueError, pa.ArrowException) as error:  # ValueError: names that are not UTF-8
            what = "no such file" if isinstance(error, FileNotFoundError) else error
            raise DatasetFormatError(
                f"{path}: cannot read the index: {what}. Run the same `vlmdata preprocess` command again."
            ) from error
        try:
            table = upgraded_index(table)
            schema = index_schema([str(m.feature) for m in OPTIONAL_MEMBERS if f"{m.name}_offset" in names])
            if missing := [name for name in schema.names if name not in table.column_names]:
                raise DatasetFormatError(f"{path}: the index lacks the columns {', '.join(missing)}")
            # Ignore columns of later minor versions.
            schema = pa.schema([*schema, *source_fields(table.schema)])
            index = cls(table.select(schema.names).cast(schema))
        except (pa.ArrowException, ValueError, AttributeError) as error:  # AttributeError: a list is no list
            raise DatasetFormatError(f"{path}: a column of the index has the wrong type or nulls: {error}") from error
        for name in ITEM_COLUMNS:
            # All samples share one flat array per column, addressed through the grids.
            if not np.array_equal(index._list_lengths(name), index.item_counts):
                raise DatasetFormatError(f"{path}: {name} does not have one entry per item")
        return index

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def column(self, name: str) -> npt.NDArray[Any]:
        """Returns a fixed-width column as a read-only array of shape (n,)."""
        values = _array(self._chunk(name))
        values.flags.writeable = False
        return np.asarray(values)

    def _chunk(self, name: str) -> pa.Array:
        column = self.table.column(name)
        if column.num_chunks == 0:
            return pa.array([], type=column.type)
        assert column.num_chunks == 1
        return column.chunk(0)

    def _flat(self, name: str) -> pa.Array:
        return self._chunk(name).flatten()

    def _list_lengths(self, name: str) -> npt.NDArray[np.int32]:
        return np.asarray(_array(self._chunk(name).value_lengths()), dtype=np.int32)

    @cached_property
    def optional_members(self) -> tuple[str, ...]:
        """Names of the optional members that samples of this dataset may have."""
        return tuple(m.name for m in OPTIONAL_MEMBERS if f"{m.name}_offset" in self.table.column_names)

    @cached_property
    def features(self) -> frozenset[str]:
        """The features of the samples. Items of an unknown kind have none."""
        used = {KIND_FEATURES[kind] for kind in set(self.item_kinds.tolist()) if kind in KIND_FEATURES}
        used |= set(map(codec_feature, set(self.item_codecs.tolist())))
        used |= {str(MEMBER_BY_NAME[m].feature) for m in self.optional_members if (self.data_offsets[m] >= 0).any()}
        return frozenset(used | ({DOCUMENTS} if (self.target_turns == 0).any() else set()))

    @cached_property
    def stored_item_bytes(self) -> int:
        """Stored bytes of all items; those that samples of a shard share count once."""
        shards = np.repeat(self.shard, self.item_counts)
        _, first = np.unique(np.stack([shards, self.item_offsets]), axis=1, return_index=True)
        return int(self.item_bytes[first].sum(dtype=np.int64))

    @property
    def file_bytes(self) -> int:
        """Bytes of the image files that the items were made of; 0 unless all items are stored as these files."""
        as_files = set(self.item_codecs.tolist()) == {_FILES}
        return int(self.item_bytes.sum(dtype=np.int64)) if as_files else 0

    def totals(self, shards: Sequence[ShardInfo], file_bytes: int) -> Totals:
        """Returns the sums over the samples and over their shards.

        Args:
            shards: The shards.
            file_bytes: Bytes of the image files, which the index does not always tell.
        """
        # Summed in int64: a 32-bit sum of token counts overflows at two billion.
        tokens = int(self.lengths.sum(dtype=np.int64))
        return Totals(
            rows=sum(info.row_stop - info.row_start for info in shards),
            samples=len(self),
            rejected=sum(info.rejected for info in shards),
            tokens=tokens,
            padding=int(self.padded_lengths.sum(dtype=np.int64)) - tokens,
            targets=int(self.num_targets.sum(dtype=np.int64)),
            items=len(self.grids),
            patches=int(self.num_patches.sum(dtype=np.int64)),
            bytes=sum(info.bytes for info in shards),
            truncated=int(self.truncated.sum()),
            extra_candidates=sum(info.extra_candidates for info in shards),
            item_bytes=self.stored_item_bytes,
            file_bytes=file_bytes,
        )

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
    def grid_offsets(self) -> npt.NDArray[np.int64]:
        """int64 (n + 1,): items of sample i are ``grids[grid_offsets[i] : grid_offsets[i + 1]]``."""
        counts = np.zeros(len(self) + 1, dtype=np.int64)
        np.cumsum(self._list_lengths("item_grids"), out=counts[1:])
        return counts

    @cached_property
    def grids(self) -> npt.NDArray[np.int32]:
        """Grids of all items, int32 (G, 3)."""
        grids = np.asarray(_array(self._flat("item_grids").flatten()), dtype=np.int32).reshape(-1, 3)
        grids.flags.writeable = False
        return grids

    @cached_property
    def item_counts(self) -> npt.NDArray[np.int64]:
        """Items per sample, int64 (n,)."""
        return np.diff(self.grid_offsets)

    @property
    def keys(self) -> pa.StringArray:
        """All keys as an arrow string array (n,); ``keys[i].as_py()`` is one key."""
        return self._chunk("key")

    def keys_of(self, samples: npt.NDArray[np.integer]) -> list[str]:
        """Returns the keys of samples (m,)."""
        # Through a buffer: to convert a numpy array, Arrow imports pandas.
        numbers = pa.Array.from_buffers(pa.int64(), len(samples), [None, pa.py_buffer(samples.astype(np.int64))])
        keys: list[str] = self.keys.take(numbers).to_pylist()
        return keys

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

    def shapes(self, i: int) -> tuple[ItemShape, ...]:
        """Returns kind, grid and copies of each item of sample ``i``."""
        own = slice(self.grid_offsets[i], self.grid_offsets[i + 1])
        grids = ((t, h, w) for t, h, w in self.grids[own].tolist())
        return tuple(map(ItemShape, self.item_kinds[own].tolist(), grids, self.item_copies[own].tolist()))

    def row(self, i: int) -> IndexRow:
        """Returns the index row of sample ``i``."""
        own = slice(self.grid_offsets[i], self.grid_offsets[i + 1])
        items = (self.item_offsets, self.item_bytes, self.item_checksums, self.pixel_checksums, self.item_codecs)
        placement = Placement(
            offset=int(self.offset[i]),
            size=int(self.size[i]),
            checksum=int(self.checksum[i]),
            json_offset=int(self.json_offset[i]),
            json_size=int(self.json_size[i]),
            arrays={
                name: ArrayPlace(int(self.data_offsets[name][i]), int(checksums[i]))
                for name, checksums in self.member_checksums.items()
                if name not in self.optional_members or self.data_offsets[name][i] >= 0
            },
            patches_offset=int(self.data_offsets["patches"][i]),
            items=tuple(map(ItemPlace, self.shapes(i), *(column[own].tolist() for column in items))),
        )
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
            item_starts=tuple(self.item_starts[own].tolist()),
            source={} if self._source is None else values_of(self._source.slice(i, 1).to_pylist()[0]),
        )

    @cached_property
    def _source(self) -> pa.Table | None:
        names = [field.name for field in source_fields(self.table.schema)]
        return self.table.select(names) if names else None
