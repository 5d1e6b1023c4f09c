"""Rows of the index, and the table of ``index.parquet``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from vlmdata.format.schema import DOCUMENTS, KIND_FEATURES, MEMBERS, OPTIONAL_MEMBERS, Member
from vlmdata.format.shard import ABSENT, ArrayPlace, ItemPlace, Placement
from vlmdata.format.source_columns import SOURCE, as_text
from vlmdata.media.codecs import Grid, codec_feature

#: Members hashed as one array; ``patches`` is hashed per item.
WHOLE_MEMBERS = tuple(member for member in MEMBERS if member.name != "patches")

#: Columns with an entry per item, with the Arrow types of the entries.
ITEM_COLUMNS: dict[str, pa.DataType] = {
    "item_kinds": pa.string(),
    "item_grids": pa.list_(pa.int32(), 3),
    "item_copies": pa.int32(),
    "item_starts": pa.int32(),
    "item_codecs": pa.string(),
    "item_offsets": pa.int64(),
    "item_bytes": pa.int64(),
    "item_checksums": pa.uint64(),
    "pixel_checksums": pa.uint64(),
}


def _schema(columns: Mapping[str, pa.DataType]) -> pa.Schema:
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns.items()])


#: Arrow types of the columns of every index, by name. docs/data-format.md documents them.
INDEX_SCHEMA = _schema(
    {
        "key": pa.string(),
        "source_row": pa.int64(),
        "shard": pa.int32(),
        "offset": pa.int64(),
        "size": pa.int64(),
        "checksum": pa.uint64(),
        "length": pa.int32(),
        "padded_length": pa.int32(),
        "num_targets": pa.int32(),
        "target_turns": pa.int32(),
        "truncated": pa.bool_(),
        "num_patches": pa.int32(),
        "json_offset": pa.int64(),
        "json_size": pa.int32(),
        **{f"{member.name}_offset": pa.int64() for member in MEMBERS},
        **{f"{member.name}_checksum": pa.uint64() for member in WHOLE_MEMBERS},
        **{name: pa.list_(kind) for name, kind in ITEM_COLUMNS.items()},
    }
)


def index_schema(features: Collection[str]) -> pa.Schema:
    """Returns the index columns of a dataset with these features."""
    fields = list(INDEX_SCHEMA)
    for member in OPTIONAL_MEMBERS:
        if member.feature in features:
            fields += _schema({f"{member.name}_offset": pa.int64(), f"{member.name}_checksum": pa.uint64()})
    return pa.schema(fields)


def with_columns(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Returns rows of an index with the columns of another: nothing for optional members and source columns it lacks.

    Raises:
        KeyError: If it lacks another column.
    """
    optional = {f"{member.name}_{what}": fill for member in OPTIONAL_MEMBERS for what, fill in vars(ABSENT).items()}
    columns = []
    for column in schema:
        if column.name in table.column_names:
            columns.append(table[column.name].cast(column.type))
        elif column.nullable:
            columns.append(pa.nulls(len(table), column.type))
        else:
            columns.append(pa.repeat(pa.scalar(optional[column.name], column.type), len(table)))
    return pa.table(columns, schema=schema)


@dataclass(frozen=True)
class IndexRow:
    """The index row of a sample. Units: tokens, patches, bytes."""

    key: str  # the sample's key
    source_row: int  # source row of the sample
    shard: int  # number of its shard
    placement: Placement  # place of the sample in the shard
    length: int  # true length
    padded_length: int  # stored length
    num_targets: int  # number of targets
    target_turns: int  # assistant turns that are targets
    truncated: bool  # whether the last answer was truncated (so its turn has no ``<|im_end|>``)
    item_starts: tuple[int, ...]  # first token of each item
    #: Values of kept source columns; they may have other types in the index than in the metadata.
    source: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def items(self) -> tuple[ItemPlace, ...]:
        """The place and storage form of each item."""
        return self.placement.items

    def grids(self, kind: str) -> tuple[Grid, ...]:
        """Returns the patches along t, h, w of each item of a kind."""
        return tuple(item.shape.grid for item in self.items if item.shape.kind == kind)

    @property
    def num_patches(self) -> int:
        """Total patches of all items."""
        return sum(item.shape.patches for item in self.items)

    def array(self, member: Member) -> ArrayPlace:
        """The place of a member, as the index has it; ``patches`` has the checksum 0."""
        if member.name == "patches":
            return ArrayPlace(self.placement.patches_offset, ABSENT.checksum)
        return self.placement.arrays.get(member.name, ABSENT)


def used_features(rows: Iterable[IndexRow]) -> frozenset[str]:
    """Returns the features that a reader of these samples must support."""
    used: set[str] = set()
    for row in rows:
        for item in row.items:
            used |= {KIND_FEATURES[item.shape.kind], codec_feature(item.codec)}
        if row.target_turns == 0:
            used.add(DOCUMENTS)
        used |= {str(member.feature) for member in OPTIONAL_MEMBERS if member.name in row.placement.arrays}
    return frozenset(used)


def index_table(rows: Sequence[IndexRow], features: Collection[str] | None = None) -> pa.Table:
    """Converts rows to an arrow table of :func:`index_schema`.

    Args:
        rows: The rows.
        features: Features whose columns are included; None means those that the rows use.

    Returns:
        The table; of rows with source columns also a column ``source``, which has them as JSON.
    """
    schema = index_schema(used_features(rows) if features is None else features)
    table = pa.Table.from_pylist([_record(row) for row in rows], schema=schema)
    if any(row.source for row in rows):  # its types are known when all samples are
        table = table.append_column(SOURCE, pa.array([as_text(row.source) for row in rows], pa.string()))
    return table


def _record(row: IndexRow) -> dict[str, Any]:
    """The columns of a row, also those of optional members."""
    place, members = row.placement, (*MEMBERS, *OPTIONAL_MEMBERS)
    return {
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
        "json_offset": place.json_offset,
        "json_size": place.json_size,
        **{f"{member.name}_offset": row.array(member).offset for member in members},
        **{f"{member.name}_checksum": row.array(member).checksum for member in members},
        "item_kinds": [item.shape.kind for item in row.items],
        "item_grids": [list(item.shape.grid) for item in row.items],
        "item_copies": [item.shape.copies for item in row.items],
        "item_starts": list(row.item_starts),
        "item_codecs": [item.codec for item in row.items],
        "item_offsets": [item.offset for item in row.items],
        "item_bytes": [item.bytes for item in row.items],
        "item_checksums": [item.checksum for item in row.items],
        "pixel_checksums": [item.pixel_checksum for item in row.items],
    }
