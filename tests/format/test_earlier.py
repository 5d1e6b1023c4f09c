"""Datasets that the writers of schema 1.0, 1.1 and 2.0 made (without their tokenizers) are read as they were."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import vlmdata
from vlmdata.errors import ConfigMismatchError
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import INDEX_NAME, MANIFEST_NAME, SCHEMA_VERSION
from vlmdata.preprocess.chat.tokenizer import load_tokenizer
from vlmdata.preprocess.recode.run import recode_dataset
from vlmdata.storage import open_store
from vlmdata.storage.join import join_datasets
from vlmdata.verify.dataset import verify_dataset

#: Of each version: key, length and targets of the samples.
SAMPLES = {
    "1.0": [("000000000", 29, 5), ("000000002", 43, 10)],
    "1.1": [("000000000-000", 27, 5), ("000000000-001", 45, 5), ("000000002", 25, 5), ("000000003", 33, 8)],
}
SAMPLES["2.0"] = SAMPLES["1.1"]


def stored(version: str, folder: Path) -> Path:
    """A copy of a stored dataset, with its tokenizer."""
    directory = Path(shutil.copytree(Path(__file__).with_name(f"dataset-{version}"), folder / version))
    if version == "1.0":  # it did not record the tokenizer's files
        shutil.copytree(Path(__file__).parents[2] / "preprocess" / "assets" / "tokenizer", directory / "tokenizer")
    else:
        load_tokenizer().save(directory / "tokenizer")
    return directory


@pytest.fixture(params=SAMPLES)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def directory(version: str, tmp_path: Path) -> Path:
    return stored(version, tmp_path)


def test_its_samples(directory: Path, version: str) -> None:
    dataset = vlmdata.open_dataset(directory)
    assert dataset.manifest.schema_version == version
    assert [(sample.key, sample.length, sample.num_targets) for sample in dataset] == SAMPLES[version]
    assert dataset.manifest.totals.items == len(dataset.index.grids) > 0
    for sample in dataset:
        assert len(sample.patches) == sum(item.rows for item in sample.items)
        assert [list(item.grid) for item in sample.items] == sample.image_grid_thw.tolist()
    assert set(dataset.index.item_kinds.tolist()) == {"image"}
    assert set(dataset.index.item_copies.tolist()) == {1}


def test_its_fingerprint_is_that_of_its_file(directory: Path) -> None:
    """The state of a loader names it: a run that began before goes on."""
    assert Manifest.read(directory).to_json() == (directory / MANIFEST_NAME).read_bytes()


def test_it_is_sound(directory: Path) -> None:
    assert verify_dataset(directory).faults == []


def test_it_is_streamed(directory: Path, version: str) -> None:
    with vlmdata.StreamingLoader(directory, capacity=128, global_batch=1) as loader:
        batches = list(loader)
    assert sorted(key for batch in batches for key in batch.sample_keys) == [key for key, *_ in SAMPLES[version]]
    targets = sum(int(batch.loss_mask.sum()) for batch in batches if batch.loss_mask is not None)
    assert targets == sum(count for *_, count in SAMPLES[version])


@pytest.mark.parametrize("old", ["1.0", "1.1"])
def test_it_is_brought_up(old: str, tmp_path: Path) -> None:
    directory, out = stored(old, tmp_path), tmp_path / "out"
    made = recode_dataset(directory, out, None).manifest
    assert made.schema_version == SCHEMA_VERSION
    assert [shard.sha256 for shard in made.shards] == [shard.sha256 for shard in Manifest.read(directory).shards]
    assert "image_starts" not in pq.read_schema(out / INDEX_NAME).names
    assert verify_dataset(out).faults == []
    for before, after in zip(vlmdata.open_dataset(directory), vlmdata.open_dataset(out), strict=True):
        for name, array in before.arrays().items():
            np.testing.assert_array_equal(array, after.arrays()[name])


def test_datasets_of_1_1_and_2_0_are_joined_to_one_of_2_0(tmp_path: Path) -> None:
    parts = [open_store(stored(each, tmp_path)) for each in ("1.1", "2.0")]
    made = join_datasets(parts, open_store(tmp_path / "out"), allow_duplicates=True).manifest
    assert (made.schema_version, made.totals.items) == (SCHEMA_VERSION, 8)
    assert verify_dataset(tmp_path / "out").faults == []


def test_one_of_1_0_is_joined_after_it_was_brought_up(tmp_path: Path) -> None:
    old, other = stored("1.0", tmp_path), stored("1.1", tmp_path)
    with pytest.raises(ConfigMismatchError, match=r"version 1\.0 cannot be joined. Run `vlmdata recode .* --out"):
        join_datasets([open_store(other), open_store(old)], open_store(tmp_path / "out"))
    recode_dataset(old, tmp_path / "new", None)
    parts = [open_store(tmp_path / "new")] * 2
    join_datasets(parts, open_store(tmp_path / "out"), allow_duplicates=True)
    assert verify_dataset(tmp_path / "out").faults == []
