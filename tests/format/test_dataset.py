"""``open_dataset``: samples are read-only views of memory-mapped shards, found by number or key."""

from __future__ import annotations

import copy
import io
import json
import mmap
import pickle
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import vlmdata
from tests.chat_rows import MIXED_ACCEPTED
from tests.verify.rewriting import rewrite_manifest, sha256
from vlmdata.errors import ChangedDataError, DatasetFormatError, UsageError
from vlmdata.format.schema import INDEX_NAME, MANIFEST_NAME

ACCEPTED = [row for rows in MIXED_ACCEPTED for row in rows]
IMAGES = {0: 1, 1: 0, 2: 2, 6: 0, 8: 1, 9: 0}


@pytest.fixture
def dataset(mixed_dataset: Path) -> vlmdata.VlmDataset:
    return vlmdata.open_dataset(mixed_dataset)


def edit_manifest(directory: Path, **fields: Any) -> None:
    path = directory / MANIFEST_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_there_is_one_sample_per_accepted_row(dataset):
    assert len(dataset) == len(ACCEPTED)
    assert dataset.index.source_row.tolist() == ACCEPTED


def test_samples_have_the_documented_shapes_and_types(dataset):
    for row, sample in zip(ACCEPTED, dataset, strict=True):
        padded, patches = len(sample.input_ids), int(sample.image_grid_thw.prod(axis=1).sum())
        assert 0 < sample.length <= padded
        assert padded % 16 == 0
        assert (sample.input_ids.dtype, sample.input_ids.shape) == (np.int32, (padded,))
        assert (sample.loss_mask.dtype, sample.loss_mask.shape) == (np.uint8, (padded,))
        assert (sample.position_ids.dtype, sample.position_ids.shape) == (np.int32, (3, padded))
        assert (sample.image_grid_thw.dtype, sample.image_grid_thw.shape) == (np.int32, (IMAGES[row], 3))
        assert (sample.patches.dtype, sample.patches.shape) == (np.uint8, (patches, dataset.family.patch_bytes))


def test_samples_equal_what_the_tar_holds(dataset):
    for i, sample in enumerate(dataset):
        with tarfile.open(dataset.shard_path(int(dataset.index.shard[i]))) as archive:
            for name, array in sample.arrays().items():
                member = archive.extractfile(f"{sample.key}.{name}.npy")
                np.testing.assert_array_equal(np.load(io.BytesIO(member.read())), array)


def owner(array: np.ndarray) -> Any:
    """The object whose memory an array shows."""
    base: Any = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    return base.obj if isinstance(base, memoryview) else base


def test_arrays_are_views_of_the_mapped_shard_and_nothing_is_copied(dataset):
    first, again, other = dataset[0], dataset[0], dataset[1]
    for name, array in first.arrays().items():
        assert isinstance(owner(array), mmap.mmap), name
        assert array.size == 0 or np.shares_memory(array, again.arrays()[name]), name
    assert owner(first.input_ids) is owner(other.input_ids), "one map a shard"
    assert not np.shares_memory(first.input_ids, other.input_ids)


def test_arrays_cannot_be_written(dataset):
    for array in dataset[0].arrays().values():
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_negative_numbers_count_from_the_end(dataset):
    assert dataset[-1].key == dataset[len(dataset) - 1].key
    assert dataset[-len(dataset)].key == dataset[0].key
    assert dataset.metadata(-1) == dataset.metadata(len(dataset) - 1)


def test_numpy_integers_are_numbers(dataset):
    assert dataset[np.int64(2)].key == dataset[2].key


@pytest.mark.parametrize("outside", [6, -7, 10**12])
def test_a_number_outside_is_an_index_error_that_says_both_numbers(dataset, outside):
    with pytest.raises(IndexError, match=rf"{outside} of a dataset of 6"):
        dataset[outside]


@pytest.mark.parametrize("wrong", ["000000001", 1.0, slice(2), None])
def test_what_is_no_number_is_refused_rather_than_guessed(dataset, wrong):
    with pytest.raises(TypeError):
        dataset[wrong]


def test_iteration_gives_every_sample_in_order(dataset):
    assert [sample.key for sample in dataset] == [f"{row:09d}" for row in ACCEPTED]


def test_a_sample_is_found_by_its_key(dataset):
    assert dataset.sample("000000008").key == "000000008"
    with pytest.raises(KeyError, match=r"no sample '000000003'; keys run from 000000000 to 000000009"):
        dataset.sample("000000003")


def test_metadata_tells_source_row_and_what_each_image_was(dataset):
    metadata = dataset.metadata(ACCEPTED.index(8))
    assert (metadata["key"], metadata["source_row"]) == ("000000008", 8)
    assert metadata["length"] == dataset[ACCEPTED.index(8)].length
    assert [(image["width"], image["height"], image["format"]) for image in metadata["images"]] == [(100, 70, "PNG")]
    assert dataset.metadata(ACCEPTED.index(1))["images"] == []


def test_index_columns_agree_with_the_samples(dataset):
    index = dataset.index
    for i, sample in enumerate(dataset):
        assert index.lengths[i] == sample.length
        assert index.padded_lengths[i] == len(sample.input_ids)
        assert index.num_targets[i] == sample.num_targets == int(sample.loss_mask.sum())
        assert index.num_patches[i] == len(sample.patches)
        grids = index.grids[index.grid_offsets[i] : index.grid_offsets[i + 1]]
        np.testing.assert_array_equal(grids, sample.image_grid_thw)
    assert index.item_counts.tolist() == [IMAGES[row] for row in ACCEPTED]
    assert index.target_turns.tolist() == [1, 1, 2, 1, 2, 1]
    assert index.shard.tolist() == [n for n, rows in enumerate(MIXED_ACCEPTED) for _ in rows]


def test_a_pickled_dataset_opens_the_same_samples(dataset):
    dataset[0]
    for copied in (pickle.loads(pickle.dumps(dataset)), copy.deepcopy(dataset)):
        assert len(copied) == len(dataset)
        np.testing.assert_array_equal(copied[2].patches, dataset[2].patches)


def test_threads_share_one_map_per_shard(mixed_dataset):
    dataset = vlmdata.open_dataset(mixed_dataset)
    with ThreadPoolExecutor(8) as pool:
        owners = {id(owner(sample.input_ids)) for sample in pool.map(lambda _: dataset[0], range(64))}
    assert len(owners) == 1


def test_repr_names_folder_and_counts(dataset):
    assert "samples=6" in repr(dataset)
    assert "shards=4" in repr(dataset)


def test_paths_may_be_strings(mixed_dataset):
    assert len(vlmdata.open_dataset(str(mixed_dataset))) == 6


class TestErrors:
    def test_missing_folder(self, tmp_path):
        with pytest.raises(DatasetFormatError, match="nowhere: no such directory"):
            vlmdata.open_dataset(tmp_path / "nowhere")

    def test_a_file(self, tmp_path):
        (tmp_path / "rows.jsonl").write_text("{}")
        with pytest.raises(DatasetFormatError, match=r"rows\.jsonl: it is a file, not the folder of a dataset"):
            vlmdata.open_dataset(tmp_path / "rows.jsonl")

    def test_a_folder_of_something_else(self, tmp_path):
        with pytest.raises(DatasetFormatError, match=r"has no manifest\.json"):
            vlmdata.open_dataset(tmp_path)

    def test_a_file_in_place_of_a_folder(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(DatasetFormatError, match="file"):
            vlmdata.open_dataset(tmp_path / "file")

    def test_an_unfinished_run_says_how_to_finish_it(self, tmp_path):
        (tmp_path / ".progress").mkdir()
        with pytest.raises(DatasetFormatError, match=r"not finished\. Run the same"):
            vlmdata.open_dataset(tmp_path)

    def test_missing_index(self, mixed_copy):
        (mixed_copy / INDEX_NAME).unlink()
        with pytest.raises(DatasetFormatError, match="cannot read the index"):
            vlmdata.open_dataset(mixed_copy)

    def test_an_index_of_another_dataset(self, mixed_copy):
        pq.write_table(pq.read_table(mixed_copy / INDEX_NAME).slice(1), mixed_copy / INDEX_NAME)
        with pytest.raises(DatasetFormatError, match="index has 5 rows, but the manifest has 6 samples"):
            vlmdata.open_dataset(mixed_copy)

    def test_a_changed_index(self, mixed_copy):
        """A shorter length would cut a sample, and no checksum of its arrays would differ."""
        table = pq.read_table(mixed_copy / INDEX_NAME)
        lengths = table["length"].to_pylist()
        column = pa.array([lengths[0] - 5, *lengths[1:]], table.schema.field("length").type)
        place = table.schema.get_field_index("length")
        pq.write_table(table.set_column(place, table.schema.field(place), column), mixed_copy / INDEX_NAME)
        for opened in (vlmdata.open_dataset, lambda path: vlmdata.StreamingLoader(path, capacity=4096, global_batch=1)):
            with pytest.raises(DatasetFormatError, match=r"index\.parquet: its sha256 is \w+…, the manifest says"):
                opened(mixed_copy)

    def test_a_manifest_without_its_last_shard(self, mixed_copy):
        manifest = json.loads((mixed_copy / MANIFEST_NAME).read_text())
        manifest["shards"].pop()
        (mixed_copy / MANIFEST_NAME).write_text(json.dumps(manifest))
        with pytest.raises(DatasetFormatError, match=r"shards of the manifest have \d samples?, but"):
            vlmdata.open_dataset(mixed_copy)

    def test_an_empty_place_is_not_the_current_folder(self, mixed_dataset, monkeypatch):
        monkeypatch.chdir(mixed_dataset)
        assert len(vlmdata.open_dataset(".")) == 6
        with pytest.raises(UsageError, match="a folder or URL is empty"):
            vlmdata.open_dataset("")

    @pytest.mark.parametrize("keep", [0, 512, -1])
    def test_a_cut_shard_is_an_error_and_not_a_crash(self, mixed_copy, keep):
        shard = mixed_copy / "shard-000000.tar"
        shard.write_bytes(shard.read_bytes()[:keep])
        dataset = vlmdata.open_dataset(mixed_copy)
        with pytest.raises(DatasetFormatError, match=r"shard-000000\.tar"):
            dataset[0]
        assert dataset[-1].length > 0, "other shards are still read"

    def test_a_missing_shard(self, mixed_copy):
        (mixed_copy / "shard-000002.tar").unlink()
        dataset = vlmdata.open_dataset(mixed_copy)
        with pytest.raises(DatasetFormatError, match=r"shard-000002\.tar: cannot map the shard"):
            dataset.sample("000000006")

    def test_a_feature_this_reader_lacks(self, mixed_copy):
        edit_manifest(mixed_copy, features=["images", "patches-raw", "patches-webp", "video"])
        with pytest.raises(DatasetFormatError, match="features this vlmdata lacks: patches-webp, video"):
            vlmdata.open_dataset(mixed_copy)

    def test_another_major_version(self, mixed_copy):
        edit_manifest(mixed_copy, schema_version="3.0")
        with pytest.raises(DatasetFormatError, match=r"schema version 3\.0, but this vlmdata reads 1\.x and 2\.x"):
            vlmdata.open_dataset(mixed_copy)

    @pytest.mark.parametrize(
        "member", ["input_ids", "loss_mask", "position_ids", "image_grid_thw", "patches of image 1"]
    )
    def test_changed_bytes_of_a_sample(self, mixed_copy, member):
        i = ACCEPTED.index(2)
        before = vlmdata.open_dataset(mixed_copy)
        if member.startswith("patches"):
            offset = int(before.index.item_offsets[int(before.index.grid_offsets[i]) + 1])
        else:
            offset = int(before.index.data_offsets[member][i])
        shard = before.shard_path(int(before.index.shard[i]))
        with open(shard, "r+b") as file:
            file.seek(offset)
            (byte,) = file.read(1)
            file.seek(offset)
            file.write(bytes([byte ^ 1]))
        dataset = vlmdata.open_dataset(mixed_copy)
        words = rf"{shard}: row 2 key 000000002 {member}: the data changed after preprocessing: xxh3 is \w+, expected"
        for read in (lambda: dataset[i], lambda: list(dataset), lambda: dataset.sample("000000002")):
            with pytest.raises(ChangedDataError, match=words):
                read()
        assert dataset[0].key == "000000000", "other samples are still read"
        if member.startswith("patches"):
            assert dataset.without_pixels(i).length > 0
        else:
            with pytest.raises(ChangedDataError, match=words):
                dataset.without_pixels(i)


class TestForwardCompatibility:
    def test_a_higher_minor_version_is_read(self, mixed_copy):
        edit_manifest(mixed_copy, schema_version="2.99")
        assert len(vlmdata.open_dataset(mixed_copy)) == 6

    def test_unknown_manifest_fields_are_ignored_at_every_level(self, mixed_copy):
        fields = json.loads((mixed_copy / MANIFEST_NAME).read_text())
        for part in (fields, fields["tokenizer"], fields["totals"], *fields["shards"]):
            part["later"] = {"some": ["thing"]}
        edit_manifest(mixed_copy, **fields)
        assert vlmdata.open_dataset(mixed_copy)[0].key == "000000000"

    def test_unknown_index_columns_are_ignored_and_their_order_is_free(self, mixed_copy):
        table = pq.read_table(mixed_copy / INDEX_NAME)
        table = table.append_column("later", pa.array(["x"] * len(table))).select([*reversed(table.column_names)])
        before = vlmdata.open_dataset(mixed_copy)
        expected = [before[i].input_ids.tolist() for i in range(len(before))]
        pq.write_table(table, mixed_copy / INDEX_NAME)
        rewrite_manifest(mixed_copy, index_sha256=sha256(mixed_copy / INDEX_NAME))
        assert [sample.input_ids.tolist() for sample in vlmdata.open_dataset(mixed_copy)] == expected
