"""Sources: whatever the user names is opened, row by row, and known by its content."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from datasets import Dataset, DatasetDict, Features, Json, List, Value
from datasets import Image as ImageFeature
from datasets.exceptions import DatasetNotFoundError
from huggingface_hub.errors import OfflineModeIsEnabled

from tests.chat_rows import write_jsonl
from tests.conftest import cord_row, encoded_image, write_cord_parquet
from vlmdata.errors import SourceError
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.row import Row
from vlmdata.preprocess.sources.datasets_library import _hub_errors
from vlmdata.preprocess.sources.open import open_source
from vlmdata.preprocess.sources.rows import Source
from vlmdata.reasons import Reason


def opened(spec: Path | str, **options: Any) -> Source:
    return open_source(str(spec), **options)


def values(source: Source) -> list[dict[str, Any]]:
    return [dict(source.row(number).values) for number in range(source.num_rows)]


def numbers(source: Source) -> list[int]:
    return [row["n"] for row in values(source)]


def numbered(*rows: int) -> list[dict[str, int]]:
    return [{"n": n} for n in rows]


def write_parquet(path: Path, *rows: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Dataset.from_list(numbered(*rows)).to_parquet(str(path))
    return path


def write_arrow(path: Path, *rows: int) -> Path:
    Dataset.from_list(numbered(*rows)).save_to_disk(str(path.with_suffix("")))
    return Path(shutil.copy(path.with_suffix("") / "data-00000-of-00001.arrow", path))


def fails(message: str, spec: Path | str, **options: Any) -> None:
    with pytest.raises(SourceError, match=message) as error:
        opened(spec, **options)
    assert str(error.value).startswith(("SOURCE ", "--"))


class TestFiles:
    def test_parquet(self, tmp_path):
        rows = [cord_row(n) for n in range(3)]
        source = opened(write_cord_parquet(tmp_path / "rows.parquet", rows))
        assert values(source) == rows, "images stay the bytes they were"

    def test_arrow(self, tmp_path):
        assert numbers(opened(write_arrow(tmp_path / "rows.arrow", 1, 2, 3))) == [1, 2, 3]

    @pytest.mark.parametrize("suffix", [".jsonl", ".ndjson"])
    def test_json_lines(self, tmp_path, suffix):
        assert numbers(opened(write_jsonl(tmp_path / f"rows{suffix}", numbered(1, 2)))) == [1, 2]

    def test_json_list(self, tmp_path):
        (tmp_path / "rows.json").write_text(json.dumps([{"n": 1, "m": {"a": [1]}}, {"n": 2, "m": {"a": []}}]))
        assert values(opened(tmp_path / "rows.json")) == [{"n": 1, "m": {"a": [1]}}, {"n": 2, "m": {"a": []}}]

    def test_json_of_mixed_types_comes_back_as_it_was(self, tmp_path):
        rows = [
            {"messages": [{"role": "user", "content": "text"}]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image"}]}]},
        ]
        (tmp_path / "rows.json").write_text(json.dumps(rows))
        assert values(opened(tmp_path / "rows.json")) == rows

    def test_a_pattern_takes_all_files_in_order_of_their_names(self, tmp_path):
        write_parquet(tmp_path / "b.parquet", 3, 4)
        write_parquet(tmp_path / "a.parquet", 1, 2)
        write_parquet(tmp_path / "other" / "c.parquet", 5)
        assert numbers(opened(tmp_path / "*.parquet")) == [1, 2, 3, 4]
        assert numbers(opened(tmp_path / "**" / "*.parquet")) == [1, 2, 3, 4, 5]

    @pytest.mark.parametrize("name", ["rows[1].jsonl", "ro*s.jsonl", "a b.jsonl", "größe.jsonl", ".hidden.jsonl"])
    def test_an_existing_name_is_meant_literally(self, tmp_path, name):
        write_jsonl(tmp_path / "rows1.jsonl", numbered(7))
        assert numbers(opened(write_jsonl(tmp_path / name, numbered(1)))) == [1]

    def test_a_file_in_a_folder_with_brackets(self, tmp_path):
        assert numbers(opened(write_jsonl(tmp_path / "set[1]" / "rows.jsonl", numbered(1)))) == [1]

    def test_relative_paths(self, tmp_path, monkeypatch):
        write_jsonl(tmp_path / "rows.jsonl", numbered(1))
        monkeypatch.chdir(tmp_path)
        assert numbers(opened("rows.jsonl")) == [1]

    def test_a_row_knows_its_number(self, tmp_path):
        source = opened(write_jsonl(tmp_path / "rows.jsonl", numbered(5, 6)))
        assert source.row(1) == Row(1, {"n": 6})

    def test_relative_image_paths_begin_at_the_file(self, tmp_path):
        assert opened(write_jsonl(tmp_path / "rows.jsonl", numbered(1))).image_root == str(tmp_path)

    def test_workers_get_the_same_rows(self, tmp_path):
        source = opened(write_parquet(tmp_path / "rows.parquet", 1, 2, 3), limit=2)
        assert numbers(pickle.loads(pickle.dumps(source))) == [1, 2]


class TestJsonLines:
    def test_a_bad_line_costs_one_row(self, tmp_path):
        lines = [
            b'{"n": 0}',
            b"",
            b"not JSON",
            b'["a", "list"]',
            b'{"n": "\xff\xfe"}',
            b'{"n": 1} {"n": 2}',
            b'{"n": ' * 100_000,
            b"   \t",
            b'{"n": 8}',
            b'{"a": [{"n": 1, "m": 2, "n": 1}]}',
        ]
        (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines))
        source = opened(tmp_path / "rows.jsonl")
        assert source.num_rows == len(lines)
        assert [source.row(number).values for number in (0, 8)] == [{"n": 0}, {"n": 8}]
        messages = {}
        for number in (*range(1, 8), 9):
            with pytest.raises(RowRejected) as rejection:
                source.row(number)
            assert rejection.value.reason is Reason.MALFORMED_ROW
            messages[number] = rejection.value.message
        assert messages[1] == messages[7] == "a blank line"
        assert messages[2].endswith(": not JSON")
        assert messages[3] == 'not a JSON object: ["a", "list"]'
        assert messages[4] == (
            r"""not UTF-8: byte 7 of the line is 0xff, near {"n": "\xff\xfe"}; convert the file to UTF-8"""
        )
        assert len(messages[6]) < 300
        assert "the key 'n' occurs twice in one object" in messages[9]

    def test_rows_of_any_types_stand_side_by_side(self, tmp_path):
        rows = [
            {"messages": "text", "n": 1},
            {"messages": [{"content": "text"}], "n": "one"},
            {"messages": [{"content": [{"type": "image", "image": {"path": "x"}}, "text"]}], "more": [[1, "a", None]]},
        ]
        assert values(opened(write_jsonl(tmp_path / "rows.jsonl", rows))) == rows, "and no key is added"

    def test_line_ends_of_all_systems_and_alphabets(self, tmp_path):
        text = '{"n": "a\u2028b\x85c"}\r\n{"n": "d\\ne"}\n{"n": 3}'
        (tmp_path / "rows.jsonl").write_bytes(text.encode())
        assert [row["n"] for row in values(opened(tmp_path / "rows.jsonl"))] == ["a\u2028b\x85c", "d\ne", 3]

    def test_a_byte_order_mark_is_no_part_of_the_first_row(self, tmp_path):
        (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"n": 1}\n{"n": 2}\n')
        assert numbers(opened(tmp_path / "rows.jsonl")) == [1, 2]

    def test_a_line_of_many_megabytes_is_one_row(self, tmp_path):
        rows = [{"n": "x" * (12 << 20)}, {"n": "short"}]
        assert [len(row["n"]) for row in values(opened(write_jsonl(tmp_path / "rows.jsonl", rows)))] == [12 << 20, 5]


class TestFolders:
    @staticmethod
    def split_folder(folder: Path) -> Path:
        for name, rows in (("train", (1, 2)), ("validation", (3,)), ("test", (4, 5, 6))):
            write_parquet(folder / "data" / f"{name}-00000-of-00001.parquet", *rows)
        return folder

    def test_train_is_the_default_split(self, tmp_path):
        assert numbers(opened(self.split_folder(tmp_path))) == [1, 2]

    @pytest.mark.parametrize(("split", "rows"), [("train", [1, 2]), ("validation", [3]), ("test", [4, 5, 6])])
    def test_splits_by_name(self, tmp_path, split, rows):
        source = opened(self.split_folder(tmp_path), split=split)
        assert numbers(source) == rows
        assert source.identity["split"] == split

    def test_the_only_split_is_taken_whatever_its_name(self, tmp_path):
        write_parquet(tmp_path / "test" / "rows.parquet", 9)
        assert numbers(opened(tmp_path)) == [9]

    def test_several_splits_without_train_must_be_chosen_from(self, tmp_path):
        write_parquet(tmp_path / "test" / "rows.parquet", 9)
        write_parquet(tmp_path / "validation" / "rows.parquet", 8)
        fails("it has several splits; choose with --split one of: validation, test", tmp_path)

    def test_a_split_that_is_not_there_names_those_that_are(self, tmp_path):
        fails(
            "it has no split dev; choose with --split one of: train, validation, test",
            self.split_folder(tmp_path),
            split="dev",
        )

    def test_json_lines_in_a_folder_are_read_line_by_line_too(self, tmp_path):
        (tmp_path / "train.jsonl").write_text('{"n": 1}\nbad\n{"n": "mixed"}\n')
        source = opened(tmp_path)
        assert [source.row(0).values, source.row(2).values] == [{"n": 1}, {"n": "mixed"}]
        with pytest.raises(RowRejected):
            source.row(1)

    def test_image_folder_with_metadata(self, tmp_path):
        for n in range(2):
            (tmp_path / "train").mkdir(exist_ok=True)
            (tmp_path / "train" / f"{n}.png").write_bytes(encoded_image(seed=n))
        rows = [{"file_name": f"{n}.png", "ground_truth": f'{{"gt_parse": {n}}}'} for n in range(2)]
        write_jsonl(tmp_path / "train" / "metadata.jsonl", rows)
        source = opened(tmp_path)
        assert [row["ground_truth"] for row in values(source)] == ['{"gt_parse": 0}', '{"gt_parse": 1}']
        assert source.image_root == str(tmp_path)
        assert [row["image"]["path"] for row in values(source)] == ["train/0.png", "train/1.png"]
        assert {file["name"] for file in source.identity["files"]} == {
            "train/0.png",
            "train/1.png",
            "train/metadata.jsonl",
        }

    def test_nothing_to_read(self, tmp_path):
        fails("no data files in this folder. Found: nothing. Read are: .parquet, ", tmp_path)
        (tmp_path / "train.py").write_text("")
        fails("no data files in this folder. Found: 1 .py. Read are: .parquet, ", tmp_path)

    def test_brackets_in_the_path_of_a_folder_are_meant_literally(self, tmp_path):
        write_parquet(tmp_path / "set1" / "train.parquet", 2)
        write_parquet(tmp_path / "set[1]" / "train.parquet", 1)
        assert numbers(opened(tmp_path / "set[1]")) == [1]

    def test_brackets_in_the_path_of_an_image_folder_are_refused_with_the_remedy(self, tmp_path):
        (tmp_path / "set[1]").mkdir()
        (tmp_path / "set[1]" / "0.png").write_bytes(encoded_image())
        fails("for a pattern; rename it, link to it by another name, or give its files", tmp_path / "set[1]")


class TestSaveToDisk:
    def test_dataset(self, tmp_path):
        Dataset.from_list(numbered(1, 2, 3)).save_to_disk(str(tmp_path / "saved"), num_shards=2)
        source = opened(tmp_path / "saved")
        assert numbers(source) == [1, 2, 3]
        assert source.identity["kind"] == "save_to_disk"
        assert len(source.identity["files"]) == 2

    def test_images_and_selected_rows(self, tmp_path):
        rows = [{"image": {"bytes": encoded_image(seed=n), "path": None}} for n in range(4)]
        features = Features({"image": ImageFeature()})
        Dataset.from_list(rows, features=features).select([3, 1]).save_to_disk(str(tmp_path / "saved"))
        assert values(opened(tmp_path / "saved")) == [rows[3], rows[1]]

    def test_dataset_dict_has_splits(self, tmp_path):
        splits = {"train": Dataset.from_list(numbered(1)), "test": Dataset.from_list(numbered(2))}
        DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
        assert numbers(opened(tmp_path / "saved")) == [1]
        assert numbers(opened(tmp_path / "saved", split="test")) == [2]
        fails("no split dev; choose with --split one of: train, test", tmp_path / "saved", split="dev")

    def test_a_single_dataset_has_the_split_it_was_saved_from(self, tmp_path):
        Dataset.from_list(numbered(1), split="test").save_to_disk(str(tmp_path / "saved"))
        assert numbers(opened(tmp_path / "saved")) == [1]
        assert numbers(opened(tmp_path / "saved", split="test")) == [1]
        fails("it has no split train; choose with --split one of: test", tmp_path / "saved", split="train")

    def test_damaged(self, tmp_path):
        Dataset.from_list(numbered(1)).save_to_disk(str(tmp_path / "saved"))
        (tmp_path / "saved" / "data-00000-of-00001.arrow").write_bytes(b"")
        fails("a save_to_disk folder that does not load", tmp_path / "saved")

    def test_json_columns_are_decoded(self, tmp_path):
        rows = [{"any": [1, "a", {"b": None}], "deep": [{"x": "s"}]}, {"any": None, "deep": [{"x": [1]}, {"x": None}]}]
        features = Features({"any": Json(), "deep": List({"x": Json()})})
        Dataset.from_list(rows, features=features).save_to_disk(str(tmp_path / "saved"))
        assert values(opened(tmp_path / "saved")) == rows


class TestLimit:
    @pytest.mark.parametrize(
        ("limit", "rows"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (99, [1, 2, 3]), (None, [1, 2, 3])]
    )
    def test_reads_the_first_rows(self, tmp_path, limit, rows):
        source = opened(write_parquet(tmp_path / "rows.parquet", 1, 2, 3), limit=limit)
        assert numbers(source) == rows
        assert source.identity["rows"] == source.num_rows == len(rows)

    @pytest.mark.parametrize("limit", [0, -1])
    def test_must_be_positive(self, limit):
        fails(f"--limit {limit}: it must be at least 1", "demo", limit=limit)


class TestIdentity:
    MAKERS = (
        ("rows.parquet", write_parquet),
        ("rows.arrow", write_arrow),
        ("rows.jsonl", lambda path, *rows: write_jsonl(path, numbered(*rows))),
    )

    @pytest.mark.parametrize(("name", "make"), MAKERS, ids=[name for name, _ in MAKERS])
    def test_is_the_content_and_not_the_place(self, tmp_path, name, make):
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        here = make(tmp_path / "a" / name, 1, 2)
        copy = Path(shutil.copy(here, tmp_path / "b" / name))
        other = make(tmp_path / name, 1, 3)
        # The headers of an Arrow file say nothing of its values.
        options = {"hash_source": name == "rows.arrow"}
        assert opened(here, **options).identity == opened(copy, **options).identity
        assert opened(here, **options).identity != opened(other, **options).identity

    def test_of_a_folder_likewise(self, tmp_path):
        here = TestFolders.split_folder(tmp_path / "here")
        copy = shutil.copytree(here, tmp_path / "copy")
        assert opened(here).identity == opened(copy).identity
        write_parquet(copy / "data" / "train-00000-of-00001.parquet", 1, 9)
        assert opened(here).identity != opened(copy).identity
        assert opened(here, split="test").identity == opened(copy, split="test").identity

    def test_of_a_saved_dataset_likewise(self, tmp_path):
        for name, rows in (("a", (1, 2)), ("b", (1, 2)), ("c", (1, 3))):
            Dataset.from_list(numbered(*rows)).save_to_disk(str(tmp_path / name))
        a, b, c = (opened(tmp_path / name).identity for name in "abc")
        assert a == b
        assert a != c

    def test_rows_are_of_the_file_as_it_is_even_if_its_time_and_size_did_not_change(self, tmp_path):
        path = write_jsonl(tmp_path / "rows.jsonl", numbered(1))
        before, status = opened(path), path.stat()
        write_jsonl(path, numbered(2))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert numbers(opened(path)) == [2]
        assert opened(path).identity != before.identity

    def test_of_very_many_files_is_one_hash_that_still_knows_each(self, tmp_path):
        for n in range(300):
            write_jsonl(tmp_path / f"{n:03d}.jsonl", numbered(n))
        before = opened(tmp_path / "*.jsonl").identity
        assert before["num_files"] == 300
        assert "files" not in before
        write_jsonl(tmp_path / "150.jsonl", numbered(999))
        assert opened(tmp_path / "*.jsonl").identity["listing_sha256"] != before["listing_sha256"]

    def test_fits_into_the_manifest(self, tmp_path):
        identity = opened(write_parquet(tmp_path / "rows.parquet", 1)).identity
        assert json.loads(json.dumps(identity)) == identity


class TestErrors:
    def test_unknown_path(self, tmp_path):
        fails("no such file or folder, and not a hub dataset id either", tmp_path / "nowhere")

    @pytest.mark.parametrize("spec", ["rows.jsonl", "some/rows.parquet"])
    def test_a_missing_file_is_not_taken_for_a_hub_id(self, spec):
        fails("no such file or folder", spec)

    def test_a_pattern_that_matches_nothing(self, tmp_path):
        fails("no file matches", tmp_path / "*.parquet")

    def test_an_unknown_kind_of_file(self, tmp_path):
        (tmp_path / "rows.xlsx").write_text("n\n1\n")
        fails(r"rows.xlsx is no data file; these are read: \.parquet, .*, \.tar$", tmp_path / "rows.xlsx")

    def test_several_kinds_of_files_at_once(self, tmp_path):
        write_jsonl(tmp_path / "a.jsonl", numbered(1))
        write_parquet(tmp_path / "b.parquet", 1)
        fails(r"several kinds: 1 JSON lines \(a.jsonl\), 1 parquet \(b.parquet\). Name files of one", tmp_path / "*")

    def test_a_file_has_no_splits(self, tmp_path):
        path = write_parquet(tmp_path / "rows.parquet", 1)
        assert numbers(opened(path, split="train")) == [1]
        fails("a data file has no splits, so --split test names nothing", path, split="test")

    @pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.json"])
    def test_no_rows(self, tmp_path, name):
        if name == "rows.parquet":
            Dataset.from_dict({"n": []}, features=Features({"n": Value("int64")})).to_parquet(str(tmp_path / name))
        else:
            (tmp_path / name).write_text("[]" if name == "rows.json" else "")
        fails("it has no rows", tmp_path / name)

    @pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "rows.json"])
    def test_a_damaged_file(self, tmp_path, name):
        (tmp_path / name).write_bytes(b"[{ nonsense")
        fails("the file is damaged", tmp_path / name)

    @pytest.mark.parametrize("spec", ["naver-clova-ix/cord-v2", "squad"])
    def test_a_hub_id_without_a_network_says_so(self, spec):
        fails("the Hugging Face hub cannot be reached .*HF_HUB_OFFLINE.* give its folder", spec)

    @pytest.mark.parametrize(
        ("error", "expected"),
        [
            (httpx.ConnectTimeout("slow"), "cannot be reached"),
            (OfflineModeIsEnabled("forbidden"), "cannot be reached"),
            (socket.gaierror("no name"), "cannot be reached"),
            (DatasetNotFoundError("'connect-4' does not exist on the Hub"), "does not give it: DatasetNotFoundError"),
        ],
    )
    def test_a_network_that_does_not_respond_is_told_from_a_dataset_that_there_is_not(self, error, expected):
        with pytest.raises(SourceError, match=expected), _hub_errors("SOURCE a/b"):  # noqa: PT012
            try:
                raise error
            except Exception as cause:
                raise ValueError("something else") from cause

    def test_the_demo_has_rows_for_the_built_in_recipes_alone(self):
        fails("rows for the recipes cord_v2 and chat, not for my_module:recipe", "demo", recipe="my_module:recipe")
