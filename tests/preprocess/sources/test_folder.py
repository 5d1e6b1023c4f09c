"""Folders: which files are the data, which split they belong to, and clear words where that is not clear."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets.data_files import get_data_patterns, resolve_pattern
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import encoded_image
from vlmdata.errors import SourceError
from vlmdata.preprocess.sources.kinds import splits_by_name
from vlmdata.preprocess.sources.open import open_source

PARTS = ("train", "val", "my-test", "dev.x", "trainer", "x_eval_1", "data", "00000-of-00002", "valid 2", "testing", "a")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sets(
        st.one_of(
            st.lists(st.sampled_from(PARTS), min_size=1, max_size=3).map("/".join),
            st.sampled_from(["data/train-00000-of-00001", "data/own.name-00000-of-00002", "data/x-00000-of-1"]),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_splits_are_those_of_datasets(tmp_path_factory, names):
    folder = tmp_path_factory.mktemp("folder")
    paths = [f"{name}.jsonl" for name in names]
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).touch()
    theirs = {
        str(split): sorted({Path(f).relative_to(folder).as_posix() for p in patterns for f in _files(p, folder)})
        for split, patterns in get_data_patterns(str(folder)).items()
    }
    assert splits_by_name(paths) == theirs


def _files(pattern: str, folder: Path) -> list[str]:
    try:
        return resolve_pattern(pattern, str(folder))
    except FileNotFoundError:
        return []


def write(path: Path, **row: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(row) + "\n")
    return path


def refused(folder: Path, message: str) -> None:
    with pytest.raises(SourceError, match=message) as error:
        open_source(str(folder))
    assert str(error.value).startswith(f"SOURCE {folder}: ")
    assert "\n" not in str(error.value)


def test_data_beside_many_images_is_the_data(tmp_path):
    write(tmp_path / "chats.jsonl", image="images/train/0.png")
    for n in range(3):
        image = tmp_path / "images" / "train" / f"{n}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        image.write_bytes(encoded_image(seed=n))
    source = open_source(str(tmp_path))
    assert source.row(0).values == {"image": "images/train/0.png"}
    assert (source.num_rows, source.image_root) == (1, str(tmp_path))


def test_several_kinds_of_data_are_refused_with_the_remedy(tmp_path):
    for name in ("a.jsonl", "b.jsonl", "sub/c.csv"):
        write(tmp_path / name, n=1)
    refused(tmp_path, rf"2 JSON lines \(a.jsonl, b.jsonl\), 1 CSV or TSV \(sub/c.csv\). .* '{tmp_path}/\*\*/\*.jsonl'")
    assert open_source(f"{tmp_path}/**/*.jsonl").num_rows == 2


def test_a_file_that_belongs_to_no_split_is_not_left_out_in_silence(tmp_path):
    for name in ("train.jsonl", "test.jsonl", "more.jsonl"):
        write(tmp_path / name, n=1)
    refused(tmp_path, r"by its name more.jsonl belongs to none of the splits train, test \(1 such files\)")


def test_files_of_programs_and_hidden_files_are_no_data(tmp_path):
    write(tmp_path / "rows.csv", n=1)
    for name in ("dataset_infos.json", ".cache/x.parquet", "__pycache__/y.json", ".hidden.jsonl", "README.md"):
        write(tmp_path / name, n=1)
    (tmp_path / "rows.csv").write_text("n\n1\n")
    assert open_source(str(tmp_path)).row(0).values == {"n": "1"}


def test_a_dataset_card_that_names_files_is_obeyed(tmp_path):
    (tmp_path / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: b.jsonl\n---\n# Rows\n")
    write(tmp_path / "a.jsonl", n=1)
    write(tmp_path / "b.jsonl", n=2)
    assert open_source(str(tmp_path)).row(0).values == {"n": 2}


def test_a_dataset_of_ours_is_not_a_source_and_may_lie_in_one(make_dataset, cord_parquet, tmp_path):
    refused(make_dataset(cord_parquet, "sub/out", limit=2), "a dataset that `vlmdata preprocess` made")
    write(tmp_path / "sub" / "unfinished" / ".progress" / "run.json")
    write(tmp_path / "sub" / "unfinished" / "train.jsonl", n=2)
    write(tmp_path / "sub" / "rows.jsonl", n=1)
    source = open_source(str(tmp_path / "sub"))
    assert (source.num_rows, source.row(0).values) == (1, {"n": 1})
