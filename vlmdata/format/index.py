"""The index: one parquet row per sample, enough to plan packing and to read any member by offset alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from vlmdata.errors import DatasetFormatError, NotFoundError
from vlmdata.format.schema import DOCUMENTS, IMAGES, MEMBERS, OPTIONAL_MEMBERS, PATCHES_RAW
from vlmdata.format.shard import ArrayPlace, Placement

_PATCHES = next(i for i, member in enumerate(MEMBERS) if member.name == "patches")
_GRID = pa.list_(pa.list_(pa.int32(), 3))

#: Members hashed as one array; ``patches`` is hashed image by image.
TOKEN_MEMBERS = tuple(member for member in MEMBERS if member.name != "patches")

#: Column name -> arrow type of the columns that every index has. Documented in docs/data-format.md.
INDEX_SCHEMA = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("source_row", pa.int64(), nullable=False),
        pa.field("shard", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("size", pa.int64(), nullable=False),
        pa.field("checksum", pa.uint64(), nullable=False),
        pa.field("length", pa.int32(), nullable=False),
        pa.field("padded_length", pa.int32(), nullable=False),
        pa.field("num_targets", pa.int32(), nullable=False),
        pa.field("target_turns", pa.int32(), nullable=False),
        pa.field("truncated", pa.bool_(), nullable=False),
        pa.field("num_patches", pa.int32(), nullable=False),
        pa.field("image_grid_thw", _GRID, nullable=False),
        pa.field("image_starts", pa.list_(pa.int32()), nullable=False),
        pa.field("json_offset", pa.int64(), nullable=False),
        pa.field("json_size", pa.int32(), nullable=False),
        *(pa.field(f"{member.name}_offset", pa.int64(), nullable=False) for member in MEMBERS),
        *(pa.field(f"{member.name}_checksum", pa.uint64(), nullable=False) for member in TOKEN_MEMBERS),
        pa.field("image_checksums", pa.list_(pa.uint64()), nullable=False),
    ]
)

#: What stands in the columns of an optional member for a sample that lacks it.
ABSENT = ArrayPlace(offset=-1, checksum=0)


def index_schema(features: Collection[str]) -> pa.Schema:
    """The columns of the index of a dataset with these features."""
    fields = list(INDEX_SCHEMA)
    for member in OPTIONAL_MEMBERS:
        if member.feature in features:
            fields.append(pa.field(f"{member.name}_offset", pa.int64(), nullable=False))
            fields.append(pa.field(f"{member.name}_checksum", pa.uint64(), nullable=False))
    return pa.schema(fields)


@dataclass(frozen=True)
class IndexRow:
    """What the index says of one sample. Units: tokens, patches, bytes.

    Attributes:
        key: The sample's key.
        source_row: Row of the source it was made from.
        shard: Number of its shard.
        placement: Where it lies in the shard.
        length: True length.
        padded_length: Stored length.
        num_targets: Tokens under the loss.
        target_turns: Assistant turns that are targets.
        truncated: Whether the last answer was cut (so that turn has no ``<|im_end|>``).
        image_grid_thw: Patches along t, h, w for every image.
        image_starts: First token of every image.
    """

    key: str
    source_row: int
    shard: int
    placement: Placement
    length: int
    padded_length: int
    num_targets: int
    target_turns: int
    truncated: bool
    image_grid_thw: tuple[tuple[int, int, int], ...]
    image_starts: tuple[int, ...]

    @property
    def num_patches(self) -> int:
        """Patches over all images."""
        return sum(t * h * w for t, h, w in self.image_grid_thw)


def used_features(rows: Iterable[IndexRow]) -> frozenset[str]:
    """The features that a reader of these samples must know."""
    used: set[str] = set()
    for row in rows:
        if row.image_grid_thw:
            used |= {IMAGES, PATCHES_RAW}
        if row.target_turns == 0:
            used.add(DOCUMENTS)
        used |= {str(member.feature) for member in OPTIONAL_MEMBERS if member.name in row.placement.optional}
    return frozenset(used)


def index_table(rows: Sequence[IndexRow], features: Collection[str] | None = None) -> pa.Table:
    """Rows as an arrow table of :func:`index_schema`.

    Args:
        rows: The rows.
        features: Features that get their columns; None is those that the rows use.
    """
    schema = index_schema(used_features(rows) if features is None else features)
    optional = [member.name for member in OPTIONAL_MEMBERS if f"{member.name}_offset" in schema.names]
    records: list[dict[str, Any]] = []
    for row in rows:
        place = row.placement
        extra = {name: place.optional.get(name, ABSENT) for name in optional}
        records.append(
            {
                "key": row.key,
                "source_row": row.source_row,
                "shard": row.shard,
                "offset": place.offset,
                "size": place.size,
                "checksum": place.checksum,
                "length": row.length,
                "padded_length": row.padded_length,
                "num_targets": row.num_targets,
                "target_turns": row.target_turns,
                "truncated": row.truncated,
                "num_patches": row.num_patches,
                "image_grid_thw": [list(grid) for grid in row.image_grid_thw],
                "image_starts": list(row.image_starts),
                "json_offset": place.json_offset,
                "json_size": place.json_size,
                **{f"{m.name}_offset": o for m, o in zip(MEMBERS, place.data_offsets, strict=True)},
                **{f"{m.name}_checksum": place.data_checksums[MEMBERS.index(m)][0] for m in TOKEN_MEMBERS},
                "image_checksums": place.data_checksums[_PATCHES][: len(row.image_grid_thw)],
                **{f"{name}_offset": found.offset for name, found in extra.items()},
                **{f"{name}_checksum": found.checksum for name, found in extra.items()},
            }
        )
    return pa.Table.from_pylist(records, schema=schema)


class DatasetIndex:
    """The index as read-only numpy columns of length n (one entry a sample), in storage order.

    Fixed-width columns are views of the arrow buffers; nothing is copied or converted until asked for.

    Attributes:
        table: The arrow table behind it.
    """

    def __init__(self, table: pa.Table):
        self.table = table.combine_chunks()

    @classmethod
    def read(cls, path: Path) -> DatasetIndex:
        """Reads ``index.parquet``.

        Raises:
            DatasetFormatError: If the file is missing, damaged, or lacks a column.
        """
        try:
            table = pq.read_table(path, memory_map=False)
        except (OSError, pa.ArrowException) as error:
            what = "no such file" if isinstance(error, FileNotFoundError) else error
            raise DatasetFormatError(
                f"{path}: cannot read the index: {what}. Run the same `vlmdata preprocess` command again."
            ) from error
        features = [str(m.feature) for m in OPTIONAL_MEMBERS if f"{m.name}_offset" in table.column_names]
        schema = index_schema(features)
        missing = [name for name in schema.names if name not in table.column_names]
        if missing:
            raise DatasetFormatError(f"{path}: the index lacks the columns {', '.join(missing)}")
        try:
            # Columns a later minor version added are of no concern here.
            index = cls(table.select(schema.names).cast(schema))
        except (pa.ArrowException, ValueError) as error:
            raise DatasetFormatError(f"{path}: a column of the index has the wrong type or nulls: {error}") from error
        for name in ("image_starts", "image_checksums"):
            # All samples share one flat array of each, found through the grids alone.
            if not np.array_equal(index._list_lengths(name), index.image_counts):
                raise DatasetFormatError(f"{path}: {name} has not one entry an image")
        return index

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def column(self, name: str) -> npt.NDArray[Any]:
        """A fixed-width column as a read-only array of shape (n,)."""
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
        """Tokens under the loss, int32 (n,)."""
        return self.column("num_targets")

    @cached_property
    def target_turns(self) -> npt.NDArray[np.int32]:
        """Assistant turns that are targets, int32 (n,)."""
        return self.column("target_turns")

    @cached_property
    def truncated(self) -> npt.NDArray[np.bool_]:
        """Whether the last answer was cut, bool (n,)."""
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
    def token_checksums(self) -> dict[str, npt.NDArray[np.uint64]]:
        """For each member but ``patches``, the xxh3-64 of its array data: uint64 (n,)."""
        names = [*(member.name for member in TOKEN_MEMBERS), *self.optional_members]
        return {name: self.column(f"{name}_checksum") for name in names}

    @cached_property
    def image_checksums(self) -> npt.NDArray[np.uint64]:
        """xxh3-64 of the patches of every image, uint64 (G,), in the order of :attr:`grids`."""
        flat = self._chunk("image_checksums").flatten()
        return np.asarray(flat.to_numpy(zero_copy_only=False), dtype=np.uint64)

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
        """First token of every image within its sample, int32 (G,), in the order of :attr:`grids`."""
        flat = self._chunk("image_starts").flatten()
        return np.asarray(flat.to_numpy(zero_copy_only=False), dtype=np.int32)

    @cached_property
    def image_counts(self) -> npt.NDArray[np.int64]:
        """Images per sample, int64 (n,)."""
        return np.diff(self.grid_offsets)

    @property
    def keys(self) -> pa.StringArray:
        """All keys as an arrow string array (n,); ``keys[i].as_py()`` is one."""
        return self._chunk("key")

    def key(self, i: int) -> str:
        """Key of sample ``i``."""
        return str(self.keys[i].as_py())

    def position_of(self, key: str) -> int:
        """Index of the sample with this key.

        Raises:
            NotFoundError: If there is none.
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
        """Everything the index says of sample ``i``."""
        placement = Placement(
            offset=int(self.offset[i]),
            size=int(self.size[i]),
            checksum=int(self.checksum[i]),
            json_offset=int(self.json_offset[i]),
            json_size=int(self.json_size[i]),
            data_offsets=tuple(int(self.data_offsets[m.name][i]) for m in MEMBERS),
            data_checksums=(
                *((int(self.token_checksums[m.name][i]),) for m in TOKEN_MEMBERS),
                tuple(self.image_checksums[self.grid_offsets[i] : self.grid_offsets[i + 1]].tolist()),
            ),
            optional={
                name: ArrayPlace(int(self.data_offsets[name][i]), int(self.token_checksums[name][i]))
                for name in self.optional_members
                if self.data_offsets[name][i] >= 0
            },
        )
        grids = self.grids[self.grid_offsets[i] : self.grid_offsets[i + 1]].tolist()
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
            image_starts=tuple(self.image_starts[self.grid_offsets[i] : self.grid_offsets[i + 1]].tolist()),
        )
