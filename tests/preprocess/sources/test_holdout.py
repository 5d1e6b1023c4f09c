"""Held-out rows: chosen by content alone; each is in one of two datasets, under its old number."""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat_rows import write_jsonl
from tests.conftest import encoded_image, tree_bytes
from vlmdata.errors import SourceError
from vlmdata.format.ledger import read_ledger
from vlmdata.format.manifest import Manifest
from vlmdata.inspect.dataset import source_name
from vlmdata.inspect.trace import describe_row
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig
from vlmdata.preprocess.engines.local import PRELOADED
from vlmdata.preprocess.run.dataset import preprocess_dataset
from vlmdata.preprocess.sources import holdout
from vlmdata.preprocess.sources.holdout import TRAIN, VALIDATION, SelectedRows, content_hash, hold_out, is_held_out
from vlmdata.preprocess.sources.open import open_source
from vlmdata.preprocess.sources.rows import Source
from vlmdata.storage.open import open_dataset
from vlmdata.verify.dataset import verify_dataset

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
#: Values of columns that CSV holds as text.
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
ROWS = st.dictionaries(st.text(max_size=3), VALUES, max_size=4)


class Listed:
    """Rows in memory."""

    def __init__(self, rows: list[dict[str, Any]]):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def values(self, number: int) -> dict[str, Any]:
        return self.rows[number]


def sides(rows: list[dict[str, Any]], share: float) -> dict[str, list[dict[str, Any]]]:
    source = Source.whole(Listed(rows), {}, None)
    return {side: [dict(part.row(n).values) for n in part.numbers] for side, part in hold_out(source, share).items()}


def reordered(value: Any, draw: Any) -> Any:
    """The value with the keys of its mappings in another order, and further keys that are None."""
    if isinstance(value, dict):
        items = draw(st.permutations([*value.items(), *([("none", None)] if "none" not in value else [])]))
        return {key: reordered(item, draw) for key, item in items}
    return [reordered(item, draw) for item in value] if isinstance(value, list) else value


class TestTheChoice:
    @settings(max_examples=40)
    @given(st.lists(ROWS, min_size=1, max_size=20), st.floats(0.05, 0.95), st.randoms())
    def test_is_of_the_content_alone(self, rows, share, random):
        alone = [is_held_out(row, share) for row in rows]
        mixed = rows + [{"other": n} for n in range(50)] + rows
        random.shuffle(mixed)
        found = sides(mixed, share)
        for row, held in zip(rows, alone, strict=True):
            assert [row in found[TRAIN], row in found[VALIDATION]] == [not held, held]

    @given(ROWS, st.data())
    def test_does_not_see_the_order_of_keys_or_keys_without_a_value(self, row, data):
        assert content_hash(reordered(row, data.draw)) == content_hash(row)

    @given(ROWS, st.floats(0.01, 0.99), st.floats(0.01, 0.99))
    def test_of_a_smaller_share_is_within_that_of_a_larger(self, row, a, b):
        assert is_held_out(row, min(a, b)) <= is_held_out(row, max(a, b))

    def test_sees_every_difference_in_content(self):
        rows: list[dict[str, Any]] = [
            {"a": "1"}, {"a": b"1"}, {"a": True}, {"a": [1]}, {"a": ["1"]}, {"a": [[1]]}, {"a": {"1": 1}}, {"b": 1},
            {"a": "x", "b": "y"}, {"a": "xy", "b": ""}, {"a": 1.5}, {"a": ["ab", "c"]}, {"a": ["a", "bc"]}, {"a": []},
            {"a": [None]}, {"a": {}}, {"a": "01"}, {"a": "1.50"}, {"a": "[1"}, {},
        ]  # fmt: skip
        assert len({content_hash(row) for row in rows}) == len(rows)

    def test_sees_the_bytes_of_stored_images_and_not_their_names(self):
        one, same, other = ({"image": {"bytes": b, "path": p}} for b, p in ((b"x", "1"), (b"x", None), (b"y", "1")))
        assert content_hash(one) == content_hash(same) == content_hash({**one, "__key__": "000"})
        assert content_hash(one) != content_hash(other)
        assert content_hash({"image": {"bytes": None, "path": "a"}}) != content_hash({"image": {"path": "b"}})

    def test_is_the_same_for_every_kind_of_file(self, tmp_path):
        rows = [{"text": f"row {n}", "more": None if n % 3 else {"n": str(n)}} for n in range(60)]
        write_jsonl(tmp_path / "rows.jsonl", rows)
        (tmp_path / "rows.json").write_text(json.dumps(rows))
        with tarfile.open(tmp_path / "rows.tar", "w") as tar:
            for n, row in enumerate(rows):
                (tmp_path / "member").write_text(json.dumps(row))
                tar.add(tmp_path / "member", f"{n}.json")
        numbers = [
            list(hold_out(open_source(str(tmp_path / f"rows.{kind}")), 0.3)[VALIDATION].numbers)
            for kind in ("jsonl", "json", "tar")
        ]
        assert numbers[0] == numbers[1] == numbers[2]

    @settings(max_examples=40)
    @given(st.lists(SCALARS, min_size=1, max_size=9))
    def test_is_that_of_the_text_of_a_column(self, values):
        row = {str(n): value for n, value in enumerate(values)}
        assert content_hash({name: None if value is None else str(value) for name, value in row.items()}) == (
            content_hash(row)
        )

    def test_survives_conversion_to_csv_and_parquet(self, tmp_path):
        """By pandas, whose columns of numbers are floats if one has no value."""
        rows = [
            {
                "n": n, "score": n / 4, "big": float(10 ** (n % 20)), "flag": n % 3 == 0, "text": f'row {n}, "x"\n',
                "some": None if n % 7 == 0 else n, "input": "" if n % 2 else "more", "code": f"{n:04d}",
                "messages": [{"role": "user", "content": f"é {n}", "n": n}, {"role": "assistant", "content": ""}],
            }
            for n in range(300)
        ]  # fmt: skip
        write_jsonl(tmp_path / "rows.jsonl", rows)
        table = pd.DataFrame(rows)
        table.to_parquet(tmp_path / "rows.parquet")
        table["messages"] = table["messages"].map(json.dumps)
        table.to_csv(tmp_path / "rows.csv", index=False)
        table.replace({True: "true", False: "false"}).to_csv(tmp_path / "lower.tsv", index=False, sep="\t")
        texts = pd.read_csv(tmp_path / "rows.csv", dtype=str, keep_default_na=False)
        texts.to_parquet(tmp_path / "texts.parquet")
        numbers = {
            name: list(hold_out(open_source(str(tmp_path / name)), 0.3)[VALIDATION].numbers)
            for name in ("rows.jsonl", "rows.parquet", "rows.csv", "lower.tsv", "texts.parquet")
        }
        assert len({tuple(found) for found in numbers.values()}) == 1, numbers
        assert 60 < len(numbers["rows.csv"]) < 120

    def test_takes_about_the_share(self):
        held = sum(is_held_out({"n": n}, 0.02) for n in range(20_000))
        assert 320 < held < 480

    def test_is_as_it_ever_was(self):
        """A dataset made by an earlier version stays divided as it is."""
        assert content_hash({"a": [1, "x", b"y", None, 2.5, {"b": True}]}) == 10394704407535950286
        assert content_hash({"text": "x", "code": "007"}) == 11341216432328862708
        assert content_hash({"text": "[Music] hi", "none": None}) == 9233065940024795659
        assert content_hash({"price": "12.50", "truth": "True"}) == 1148487003052019725

    @pytest.mark.parametrize(("share", "side"), [(0.999, "train"), (1e-9, "validation")])
    def test_that_leaves_a_side_empty_is_refused(self, share, side):
        with pytest.raises(SourceError, match=f"--holdout {share}: of 3 rows none would be for {side}; choose a"):
            sides([{"n": n} for n in range(3)], share)


class TestSelectedRows:
    @given(st.lists(st.booleans(), max_size=100), st.data())
    def test_are_those_of_the_mask(self, mask, data):
        expected = [n for n, chosen in enumerate(mask) if chosen]
        rows = SelectedRows.of(np.array(mask, dtype=bool))
        assert (list(rows), len(rows)) == (expected, len(expected))
        start, stop = (data.draw(st.integers(-3, len(expected) + 3)) for _ in range(2))
        assert rows[start:stop] == expected[start:stop]
        if expected:
            at = data.draw(st.integers(-len(expected), len(expected) - 1))
            assert rows[at] == expected[at]

    def test_of_many_rows_are_small_and_quick(self):
        mask = np.random.default_rng(0).random(3_000_000) < 0.9
        rows = SelectedRows.of(mask)
        expected = np.flatnonzero(mask)
        assert len(pickle.dumps(rows)) < 400_000
        for start in (0, 8191, 1_000_000, len(expected) - 256):
            assert rows[start : start + 256] == expected[start : start + 256].tolist()


def chat_source(folder: Path) -> Source:
    rows = [
        {"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"It is {n}."}]}
        for n in range(40)
    ]
    rows[7]["messages"] = []
    path = write_jsonl(folder / "rows.jsonl", rows)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:20], "not JSON", *lines[20:]]) + "\n")
    return open_source(str(path))


CONFIG = PreprocessConfig(recipe="chat", rows_per_shard=6, image=ImageConfig(1024, 65536))


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the datasets of both sides of 41 rows; rows 7 and 20 are bad."""
    folder = tmp_path_factory.mktemp("divided")
    for side, source in hold_out(chat_source(folder), 0.3).items():
        preprocess_dataset(source, folder / side, CONFIG)
    return folder


class TestTheDatasets:
    def test_hold_every_row_once_under_its_number(self, divided):
        rows, answers = [], {}
        for side in (TRAIN, VALIDATION):
            dataset = open_dataset(divided / side)
            rows += [entry.row for entry in read_ledger(divided / side / "rejected.jsonl")]
            rows += dataset.index.source_row.tolist()
            for i in range(len(dataset)):
                assert dataset.index.key(i) == f"{dataset.index.source_row[i]:09d}"
                answers[int(dataset.index.source_row[i])] = bytes(dataset[i].input_ids)
        assert sorted(rows) == list(range(41))
        whole = divided / "whole"
        preprocess_dataset(chat_source(divided), whole, CONFIG)
        dataset = open_dataset(whole)
        assert answers == {int(dataset.index.source_row[i]): bytes(dataset[i].input_ids) for i in range(len(dataset))}

    @pytest.mark.parametrize("side", [TRAIN, VALIDATION])
    def test_are_sound_and_say_what_they_are(self, divided, side):
        assert verify_dataset(divided / side).faults == []
        manifest = Manifest.read(divided / side)
        assert source_name(manifest.source) == f"files: rows.jsonl, {side} of --holdout 0.3"
        selection = manifest.source["selection"]
        assert {name: selection[name] for name in ("holdout", "side", "of_rows")} == {
            "holdout": 0.3,
            "side": side,
            "of_rows": 41,
        }
        assert manifest.totals.rows == manifest.source["rows"] == manifest.shards[-1].row_stop < 41
        assert {shard.row_stop - shard.row_start for shard in manifest.shards[:-1]} <= {6}

    def test_of_two_workers_are_the_same_bytes(self, divided, tmp_path, monkeypatch):
        monkeypatch.setattr(holdout, "_SECONDS_ALONE", 0.0)
        monkeypatch.setattr(holdout, "_ROWS_PER_JOB", 5)
        for side, source in hold_out(chat_source(tmp_path), 0.3, workers=2, preload=PRELOADED).items():
            preprocess_dataset(source, tmp_path / side, CONFIG, workers=2)
            assert tree_bytes(tmp_path / side) == tree_bytes(divided / side)

    def test_are_continued_and_not_with_another_share(self, divided, tmp_path):
        source = hold_out(chat_source(tmp_path), 0.3)[TRAIN]
        shutil.copytree(divided / TRAIN, tmp_path / "out")
        assert preprocess_dataset(source, tmp_path / "out", CONFIG).made == 0
        other = hold_out(chat_source(tmp_path), 0.2)[TRAIN]
        with pytest.raises(Exception, match=r"selection.holdout: 0.3 there, 0.2 now"):
            preprocess_dataset(other, tmp_path / "out", CONFIG)

    def test_trace_finds_rows_and_says_which_are_elsewhere(self, divided):
        train = open_dataset(divided / TRAIN)
        here, bad = int(train.index.source_row[-1]), 20
        assert describe_row(train, here).candidates[0].status == "sample"
        assert describe_row(train, bad).candidates[0].status == "rejected"
        elsewhere = int(open_dataset(divided / VALIDATION).index.source_row[0])
        with pytest.raises(IndexError, match=f"row {elsewhere} is not in this dataset: it contains .. of the .* 41"):
            describe_row(train, elsewhere)
        with pytest.raises(IndexError, match="the source has 41"):
            describe_row(train, 41)


class TestVerify:
    """Faults in what rows a part of a source is made of."""

    def faults(self, divided: Path, tmp_path: Path, **changes: Any) -> list[tuple[str, str]]:
        shutil.copytree(divided / TRAIN, tmp_path / "out")
        manifest = Manifest.read(tmp_path / "out")
        (tmp_path / "out" / "manifest.json").write_bytes(dataclasses.replace(manifest, **changes).to_json())
        return [(fault.check, fault.message) for fault in verify_dataset(tmp_path / "out").faults]

    def test_other_rows(self, divided, tmp_path):
        source = Manifest.read(divided / VALIDATION).source
        found = self.faults(divided, tmp_path, source=source)
        assert [check for check, _ in found] == ["source", "coverage"]  # the sides have other numbers of rows
        assert found[1][1].endswith("they are not the rows in the manifest's selection")

    def test_rows_in_other_shards(self, divided, tmp_path):
        shards = list(Manifest.read(divided / TRAIN).shards)
        shards[0] = dataclasses.replace(shards[0], row_stop=5)
        shards[1] = dataclasses.replace(shards[1], row_start=5)
        assert "index" in {check for check, _ in self.faults(divided, tmp_path, shards=tuple(shards))}

    def test_a_selection_of_the_wrong_form(self, divided, tmp_path):
        with pytest.raises(Exception, match=r"manifest.json: .*source.selection is 7"):
            self.faults(divided, tmp_path, source={"selection": 7})


def test_a_copy_of_an_image_folder_elsewhere_is_the_same_source(tmp_path: Path) -> None:
    """Its paths are relative to the folder, whatever the folder is called, or to the named root."""
    photos = tmp_path / "photos"
    photos.mkdir()
    for i in range(12):
        (photos / f"{i}.png").write_bytes(encoded_image(64, 64))
    write_jsonl(photos / "metadata.jsonl", [{"file_name": f"{i}.png", "text": f"a photo, {i}"} for i in range(12)])
    shutil.copytree(photos, tmp_path / "elsewhere" / "copy")
    (tmp_path / "link").symlink_to(photos)
    first = open_source(str(photos))
    assert first.row(3).values["image"] == {"bytes": None, "path": "3.png"}
    assert open_source(str(photos), image_root=str(tmp_path)).row(3).values["image"]["path"] == "photos/3.png"
    for other in ("elsewhere/copy", "link"):
        source = open_source(str(tmp_path / other))
        assert source.identity == first.identity
        assert [source.row(number).values for number in range(12)] == [first.row(number).values for number in range(12)]
