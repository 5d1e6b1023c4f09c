"""The index: a round trip of every fact, read-only columns, and clear errors for what is no index."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmdata.errors import DatasetFormatError
from vlmdata.format.index import DatasetIndex
from vlmdata.format.index_row import INDEX_SCHEMA, ITEM_COLUMNS, IndexRow, index_table
from vlmdata.format.schema import MEMBERS
from vlmdata.format.shard import ArrayPlace, ItemPlace, Placement
from vlmdata.media.codecs import ItemShape

COUNT = st.integers(0, 2**31 - 1)
BIG = st.integers(0, 2**63 - 1)
HASH = st.integers(0, 2**64 - 1)
GRID = st.tuples(st.integers(1, 9), *[st.integers(1, 100).map(lambda n: 2 * n)] * 2)
SHAPE = st.builds(ItemShape, st.sampled_from(["image", "video"]), GRID, st.integers(1, 2))
ITEM = st.builds(ItemPlace, SHAPE, BIG, BIG, HASH, HASH, st.sampled_from(["raw", "zlib", "é"]))
WHOLE = [member.name for member in MEMBERS if member.name != "patches"]


@st.composite
def index_rows(draw, number: int = 0) -> IndexRow:
    items = tuple(draw(st.lists(ITEM, max_size=4)))
    placement = Placement(
        offset=draw(BIG),
        size=draw(BIG),
        checksum=draw(HASH),
        json_offset=draw(BIG),
        json_size=draw(COUNT),
        arrays={name: ArrayPlace(draw(BIG), draw(HASH)) for name in WHOLE},
        patches_offset=draw(BIG),
        items=items,
    )
    return IndexRow(
        key=f"{number:09d}",
        source_row=draw(BIG),
        shard=draw(COUNT),
        placement=placement,
        length=draw(COUNT),
        padded_length=draw(COUNT),
        num_targets=draw(COUNT),
        target_turns=draw(COUNT),
        truncated=draw(st.booleans()),
        item_starts=tuple(draw(COUNT) for _ in items),
    )


def simple_rows(count: int) -> list[IndexRow]:
    arrays = {name: ArrayPlace(n, n) for n, name in enumerate(WHOLE)}
    image = ItemShape("image", (1, 2, 2))
    return [
        IndexRow(
            key=f"{n:09d}",
            source_row=2 * n,
            shard=n // 2,
            placement=Placement(
                1024 * n, 1024, n, 512, 10, arrays, 5, tuple(ItemPlace(image, 4, 3, i, 9) for i in range(n))
            ),
            length=10 + n,
            padded_length=16,
            num_targets=n,
            target_turns=1,
            truncated=n % 2 == 1,
            item_starts=tuple(range(0, 2 * n, 2)),
        )
        for n in range(count)
    ]


@pytest.fixture
def index_file(tmp_path: Path) -> Path:
    pq.write_table(index_table(simple_rows(4)), tmp_path / "index.parquet")
    return tmp_path / "index.parquet"


@settings(max_examples=30, deadline=None)
@given(data=st.data(), count=st.integers(0, 6), group=st.integers(1, 4))
def test_every_row_comes_back_whatever_the_row_groups(tmp_path_factory, data, count, group):
    rows = [data.draw(index_rows(number)) for number in range(count)]
    path = tmp_path_factory.mktemp("index") / "index.parquet"
    pq.write_table(index_table(rows), path, row_group_size=group)
    index = DatasetIndex.read(path)
    assert [index.row(i) for i in range(len(index))] == rows


def test_columns_have_the_documented_types(index_file):
    index = DatasetIndex.read(index_file)
    types = {
        np.dtype(np.int32): ("lengths", "padded_lengths", "num_targets", "target_turns", "num_patches", "shard"),
        np.dtype(np.int64): ("source_row", "offset", "size", "json_offset"),
        np.dtype(np.uint64): ("checksum",),
        np.dtype(np.bool_): ("truncated",),
    }
    for dtype, names in types.items():
        for name in names:
            column = getattr(index, name)
            assert (column.dtype, column.shape) == (dtype, (4,)), name
    assert index.json_size.dtype == np.int32
    assert all(offsets.dtype == np.int64 for offsets in index.data_offsets.values())
    assert list(index.data_offsets) == [member.name for member in MEMBERS]


def test_grids_of_a_sample_are_a_slice_of_all_grids(index_file):
    index = DatasetIndex.read(index_file)
    assert index.grid_offsets.tolist() == [0, 0, 1, 3, 6]
    assert index.item_counts.tolist() == [0, 1, 2, 3]
    assert (index.grids.dtype, index.grids.shape) == (np.int32, (6, 3))
    assert index.num_patches.tolist() == [0, 4, 8, 12]
    assert index.item_starts.tolist() == [0, 0, 2, 0, 2, 4]
    assert index.item_checksums.tolist() == [0, 0, 1, 0, 1, 2]


@pytest.mark.parametrize("name", ["lengths", "source_row", "truncated", "grids"])
def test_columns_cannot_be_written(index_file, name):
    with pytest.raises(ValueError, match="read-only"):
        getattr(DatasetIndex.read(index_file), name)[...] = 0


def test_keys_are_found_by_position_and_back(index_file):
    index = DatasetIndex.read(index_file)
    assert [index.position_of(index.key(i)) for i in range(4)] == [0, 1, 2, 3]
    with pytest.raises(KeyError, match="no sample 'x'; keys run from 000000000 to 000000003"):
        index.position_of("x")


def test_an_index_without_samples_has_empty_columns(tmp_path):
    pq.write_table(index_table([]), tmp_path / "index.parquet")
    index = DatasetIndex.read(tmp_path / "index.parquet")
    assert len(index) == 0
    assert index.lengths.dtype == np.int32
    assert index.grids.shape == (0, 3)
    assert index.grid_offsets.tolist() == [0]
    with pytest.raises(KeyError, match="keys run from none to none"):
        index.position_of("000000000")


def test_a_missing_file_is_a_format_error(tmp_path):
    with pytest.raises(DatasetFormatError, match=r"index\.parquet: cannot read the index"):
        DatasetIndex.read(tmp_path / "index.parquet")


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[: len(data) // 2], lambda data: b"x" + data])
def test_a_damaged_file_is_a_format_error(index_file, damage):
    index_file.write_bytes(damage(index_file.read_bytes()))
    with pytest.raises(DatasetFormatError, match="cannot read the index"):
        DatasetIndex.read(index_file)


@pytest.mark.parametrize("name", INDEX_SCHEMA.names)
def test_a_missing_column_is_named(index_file, name):
    pq.write_table(pq.read_table(index_file).drop_columns([name]), index_file)
    with pytest.raises(DatasetFormatError, match=f"lacks the columns {name}$"):
        DatasetIndex.read(index_file)


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["ten"] * 4),
        pa.array([1, 2, None, 4], pa.int32()),
        pa.array([2**40] * 4, pa.int64()),
        pa.array([[1]] * 4),
    ],
    ids=["text", "null", "too large", "list"],
)
def test_a_column_of_the_wrong_type_is_a_format_error(index_file, column):
    table = pq.read_table(index_file)
    pq.write_table(table.set_column(table.column_names.index("length"), "length", column), index_file)
    with pytest.raises(DatasetFormatError, match="wrong type or nulls"):
        DatasetIndex.read(index_file)


@pytest.mark.parametrize("name", [name for name in ITEM_COLUMNS if name != "item_grids"])
def test_a_list_that_has_not_one_entry_an_item_is_a_format_error(index_file, name):
    table = pq.read_table(index_file)
    lists = table.column(name).to_pylist()
    moved = pa.array([lists[1], [], *lists[2:]], table.schema.field(name).type)
    pq.write_table(table.set_column(table.column_names.index(name), name, moved), index_file)
    with pytest.raises(DatasetFormatError, match=f"{name} does not have one entry per item"):
        DatasetIndex.read(index_file)


def test_wider_types_of_the_same_numbers_are_read(index_file):
    table = pq.read_table(index_file)
    wider = table.column("length").cast(pa.int64())
    pq.write_table(table.set_column(table.column_names.index("length"), "length", wider), index_file)
    assert DatasetIndex.read(index_file).lengths.dtype == np.int32
