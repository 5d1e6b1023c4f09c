"""``vlmdata preprocess`` over sources of several kinds, splits and held-out rows, as its user meets it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import tree_bytes
from tests.preprocess.command_line import SMALL_IMAGES, Ended
from vlmdata.format.manifest import Manifest
from vlmdata.storage.open import open_dataset
from vlmdata.verify.dataset import verify_dataset

OPTIONS = ("--recipe", "chat", "--tokenizer", "embedded", "-j", 1, "--rows-per-shard", 4, *SMALL_IMAGES)


@pytest.fixture
def vlmdata(vlmdata: Callable[..., Ended]) -> Callable[..., Ended]:
    """Runs the command in this process, on a terminal so wide that no message is broken."""
    return partial(vlmdata, columns=400)


def chat_row(n: int) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": f"Say {n}."},
            {"role": "assistant", "content": f"The number is {n}."},
        ]
    }


def write_chats(path: Path, *numbers: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(chat_row(n)) + "\n" for n in numbers))
    return path


class TestRefusals:
    @pytest.mark.parametrize(("name", "problem"), [("nowhere", "does not exist"), ("chats.jsonl", "is not a folder")])
    def test_an_image_root_that_is_no_folder_before_anything_is_read(self, tmp_path, vlmdata, name, problem):
        source = write_chats(tmp_path / "chats.jsonl", 1)
        root = tmp_path / name
        code, _, said = vlmdata("preprocess", source, "--image-root", root, "--out", tmp_path / "out", *OPTIONS)
        assert code == 2
        assert f"--image-root {root}: it {problem}; give the base folder" in said
        assert "opening" not in said
        assert not (tmp_path / "out").exists()

    def test_the_current_folder_with_several_kinds_of_data(self, tmp_path, vlmdata, monkeypatch):
        write_chats(tmp_path / "a.jsonl", 1)
        (tmp_path / "b.csv").write_text("n\n1\n")
        (tmp_path / "photo.png").write_bytes(b"")
        monkeypatch.chdir(tmp_path)
        code, _, said = vlmdata("preprocess", ".", "--out", "out", *OPTIONS)
        assert code == 2
        assert "data files of several kinds in one folder: 1 JSON lines (a.jsonl), 1 CSV or TSV (b.csv)" in said
        assert "Traceback" not in said


def rows_of(directory: Path) -> list[int]:
    return open_dataset(directory).index.source_row.tolist()


class TestSplits:
    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        write_chats(tmp_path / "source" / "train.jsonl", *range(6))
        write_chats(tmp_path / "source" / "validation.jsonl", 6, 7)
        return tmp_path / "source"

    def test_each_gives_a_dataset_and_a_summary(self, tmp_path, vlmdata, source):
        out = tmp_path / "out"
        code, summary, said = vlmdata("preprocess", source, "--split", "train,validation", "--out", out, *OPTIONS)
        assert code == 0, said
        assert {entry.name for entry in out.iterdir()} == {"train", "validation"}
        for split, rows in (("train", 6), ("validation", 2)):
            assert rows_of(out / split) == list(range(rows))
            assert verify_dataset(out / split).faults == []
            assert Manifest.read(out / split).source["split"] == split
            assert str(out / split) in summary
            assert f"{split}: {out / split}" in said
            vlmdata("preprocess", source, "--split", split, "--out", tmp_path / split, *OPTIONS)
            assert tree_bytes(tmp_path / split) == tree_bytes(out / split)

    def test_the_exit_code_is_the_worst_and_the_others_are_made(self, tmp_path, vlmdata, source):
        (source / "train.jsonl").write_text("bad\n")
        code, summary, said = vlmdata(
            "preprocess", source, "--split", "train, validation", "--out", tmp_path / "out", "--json", *OPTIONS
        )
        assert code == 1
        assert "failed: 1 row gave no samples" in said
        totals = {split: report["totals"]["samples"] for split, report in json.loads(summary).items()}
        assert totals == {"train": 0, "validation": 2}

    def test_again_makes_nothing(self, tmp_path, vlmdata, source):
        arguments = ("preprocess", source, "--split", "train,validation", "--out", tmp_path / "out", "--json", *OPTIONS)
        vlmdata(*arguments)
        _, summary, _ = vlmdata(*arguments)
        assert {split: report["shards_made"] for split, report in json.loads(summary).items()} == {
            "train": 0,
            "validation": 0,
        }

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--split", "train,test"), "it has no split test; choose with --split one of: train, validation"),
            (("--split", "train,train"), "--split train,train: give each split once"),
            (("--split", "train,"), "--split train,: give each split once"),
            (("--split", "train,validation", "--holdout", "0.1"), "--holdout divides one split; give one"),
            (("--split", "train,validation", "--trace", "1"), "--trace shows a row of one split; give one"),
            (("--holdout", "0"), "holdout is 0.0; it must be between 0 and 1"),
        ],
    )
    def test_what_is_refused_before_any_work(self, tmp_path, vlmdata, source, options, message):
        code, _, said = vlmdata("preprocess", source, *options, "--out", tmp_path / "out", *OPTIONS)
        assert code == 2
        assert message in said
        assert not (tmp_path / "out").exists()

    def test_a_dataset_is_no_place_for_those_of_splits(self, tmp_path, vlmdata, source):
        vlmdata("preprocess", source, "--out", tmp_path / "out", *OPTIONS)
        before = tree_bytes(tmp_path / "out")
        code, _, said = vlmdata("preprocess", source, "--holdout", "0.5", "--out", tmp_path / "out", *OPTIONS)
        assert code == 2
        assert "is itself a dataset, so it cannot contain one per split; give another --out" in said
        assert tree_bytes(tmp_path / "out") == before
        vlmdata("preprocess", source, "--holdout", "0.5", "--out", tmp_path / "parts", *OPTIONS)
        code, _, said = vlmdata("preprocess", source, "--out", tmp_path / "parts", *OPTIONS)
        assert (code, "contains other files (train, validation)" in said) == (2, True)


def test_holdout_makes_two_datasets_of_one_source(tmp_path, vlmdata):
    source = write_chats(tmp_path / "chats.jsonl", *range(40))
    arguments = ("preprocess", source, "--holdout", "0.2", "--out", tmp_path / "out", "--json", *OPTIONS)
    code, summary, said = vlmdata(*arguments)
    assert code == 0, said
    rows = {side: rows_of(tmp_path / "out" / side) for side in ("train", "validation")}
    assert sorted(rows["train"] + rows["validation"]) == list(range(40))
    assert 2 <= len(rows["validation"]) <= 16
    assert {side: report["totals"]["rows"] for side, report in json.loads(summary).items()} == {
        side: len(numbers) for side, numbers in rows.items()
    }
