"""The shards are plain WebDataset: they open with `webdataset` alone and hold the same arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import webdataset as wds

import vlmdata
from tests.conftest import cord_row, write_cord_parquet
from vlmdata.format.schema import MEMBERS


def read_with_webdataset(directory: Path) -> list[dict]:
    urls = sorted(str(path) for path in directory.glob("shard-*.tar"))
    return list(wds.WebDataset(urls, shardshuffle=False).decode())


def assert_same_samples(directory: Path) -> None:
    dataset = vlmdata.open_dataset(directory)
    plain = read_with_webdataset(directory)
    assert [sample["__key__"] for sample in plain] == [sample.key for sample in dataset]
    for i, found in enumerate(plain):
        arrays = {name: value for name, value in found.items() if not name.startswith("__")}
        assert arrays.keys() == {"json", *(member.suffix for member in MEMBERS)}
        assert arrays["json"] == dataset.metadata(i)
        for name, expected in dataset[i].arrays().items():
            assert arrays[f"{name}.npy"].dtype == expected.dtype
            np.testing.assert_array_equal(arrays[f"{name}.npy"], expected)


def test_mixed_samples_in_several_shards_of_which_one_has_no_sample(mixed_dataset):
    assert sorted(path.name for path in mixed_dataset.glob("*.tar")) == [f"shard-{n:06d}.tar" for n in range(4)]
    assert_same_samples(mixed_dataset)


def test_cord_samples(make_dataset, cord_parquet):
    assert_same_samples(make_dataset(cord_parquet, limit=7, rows_per_shard=3))


@pytest.mark.parametrize("bad_rows", [range(2), range(2, 4), range(4, 5)], ids=["first", "middle", "last"])
def test_a_shard_whose_rows_were_all_rejected_does_not_stop_the_reader(make_dataset, tmp_path, bad_rows):
    rows = [{**cord_row(n), **({"ground_truth": "not JSON"} if n in bad_rows else {})} for n in range(5)]
    directory = make_dataset(write_cord_parquet(tmp_path / "in" / "rows.parquet", rows), rows_per_shard=2)
    assert len(list(directory.glob("shard-*.tar"))) == 3
    assert len(vlmdata.open_dataset(directory)) == 5 - len(bad_rows)
    assert_same_samples(directory)


def test_one_member_of_a_sample_is_decoded_by_its_suffix_alone(mixed_dataset):
    url = str(mixed_dataset / "shard-000000.tar")
    lengths = [len(ids) for (ids,) in wds.WebDataset(url, shardshuffle=False).decode().to_tuple("input_ids.npy")]
    assert lengths == vlmdata.open_dataset(mixed_dataset).index.padded_lengths[:3].tolist()
