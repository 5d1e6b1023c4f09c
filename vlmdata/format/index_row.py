"""Rows of the index, and the table of ``index.parquet``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from vlmdata.format.schema import DOCUMENTS, IMAGES, MEMBERS, OPTIONAL_MEMBERS
from vlmdata.format.shard import ABSENT, ItemPlace, Placement
from vlmdata.media.codecs import codec_feature

_PATCHES = next(i for i, member in enumerate(MEMBERS) if member.name == "patches")
_GRID = pa.list_(pa.list_(pa.int32(), 3))

#: Members hashed as one array; ``patches`` is hashed per image.
WHOLE_MEMBERS = tuple(member for member in MEMBERS if member.name != "patches")

#: Arrow types of the columns of every index, by name. docs/data-format.md documents them.
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
        *(pa.field(f"{member.name}_checksum", pa.uint64(), nullable=False) for member in WHOLE_MEMBERS),
        pa.field("image_checksums", pa.list_(pa.uint64()), nullable=False),
        pa.field("item_offsets", pa.list_(pa.int64()), nullable=False),
        pa.field("item_bytes", pa.list_(pa.int64()), nullable=False),
        pa.field("pixel_checksums", pa.list_(pa.uint64()), nullable=False),
        pa.field("item_kinds", pa.list_(pa.string()), nullable=False),
        pa.field("item_codecs", pa.list_(pa.string()), nullable=False),
    ]
)
#: Columns with an entry per item. An index of format 1.0 lacks them: its items are consecutive raw images.
ITEM_COLUMNS = ("item_offsets", "item_bytes", "pixel_checksums", "item_kinds", "item_codecs")


def index_schema(features: Collection[str]) -> pa.Schema:
    """Returns the index columns of a dataset with these features."""
    fields = list(INDEX_SCHEMA)
    for member in OPTIONAL_MEMBERS:
        if member.feature in features:
            fields.append(pa.field(f"{member.name}_offset", pa.int64(), nullable=False))
            fields.append(pa.field(f"{member.name}_checksum", pa.uint64(), nullable=False))
    return pa.schema(fields)


@dataclass(frozen=True)
class IndexRow:
    """The index row of a sample. Units: tokens, patches, bytes.

    Attributes:
        key: The sample's key.
        source_row: Source row of the sample.
        shard: Number of its shard.
        placement: Place of the sample in the shard.
        length: True length.
        padded_length: Stored length.
        num_targets: Number of targets.
        target_turns: Assistant turns that are targets.
        truncated: Whether the last answer was truncated (so its turn has no ``<|im_end|>``).
        image_grid_thw: Patches along t, h, w of each image.
        image_starts: First token of each image.
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
        """Total patches of all images."""
        return sum(t * h * w for t, h, w in self.image_grid_thw)

    @property
    def items(self) -> tuple[ItemPlace, ...]:
        """The place and storage form of each image."""
        return self.placement.items[: len(self.image_grid_thw)]


def used_features(rows: Iterable[IndexRow]) -> frozenset[str]:
    """Returns the features that a reader of these samples must support."""
    used: set[str] = set()
    for row in rows:
        if row.image_grid_thw:
            used |= {IMAGES, *(codec_feature(item.codec) for item in row.items)}
        if row.target_turns == 0:
            used.add(DOCUMENTS)
        used |= {str(member.feature) for member in OPTIONAL_MEMBERS if member.name in row.placement.optional}
    return frozenset(used)


def index_table(rows: Sequence[IndexRow], features: Collection[str] | None = None) -> pa.Table:
    """Converts rows to an arrow table of :func:`index_schema`.

    Args:
        rows: The rows.
        features: Features whose columns are included; None means those that the rows use.
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
                **{f"{m.name}_checksum": place.data_checksums[MEMBERS.index(m)][0] for m in WHOLE_MEMBERS},
                "image_checksums": place.data_checksums[_PATCHES][: len(row.image_grid_thw)],
                "item_offsets": [item.offset for item in row.items],
                "item_bytes": [item.bytes for item in row.items],
                "pixel_checksums": [item.pixel_checksum for item in row.items],
                "item_kinds": [item.kind for item in row.items],
                "item_codecs": [item.codec for item in row.items],
                **{f"{name}_offset": found.offset for name, found in extra.items()},
                **{f"{name}_checksum": found.checksum for name, found in extra.items()},
            }
        )
    return pa.Table.from_pylist(records, schema=schema)
