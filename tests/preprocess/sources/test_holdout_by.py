"""Rows that share an image, or the value of a column, are held out together."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat_rows import turn, write_jsonl
from tests.conftest import encoded_image
from tests.preprocess.command_line import SMALL_IMAGES
from vlmdata import open_dataset
from vlmdata.preprocess.config import MediaConfig, PreprocessConfig
from vlmdata.preprocess.recipes.pictures import ByImage
from vlmdata.preprocess.row import Row
from vlmdata.preprocess.sources import holdout
from vlmdata.preprocess.sources.holdout import TRAIN, VALIDATION, ByColumn, hold_out
from vlmdata.preprocess.sources.open import open_source
from vlmdata.preprocess.sources.rows import Source

OPTIONS = ("--tokenizer", "embedded", "-j", "1", *SMALL_IMAGES)


class Listed:
    def __init__(self, rows: list[dict[str, Any]]):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def columns(self) -> None:
        return None

    def values(self, number: int) -> dict[str, Any]:
        return self.rows[number]


class ByNumbers:
    """Rows have the numbers in a column in common."""

    name = "numbers"

    def prepare(self, source: Source) -> Any:
        return lambda row: [holdout.content_hash({"n": number}) for number in row.values["numbers"]]


def held(rows: list[dict[str, Any]], share: float, by: Any) -> list[bool]:
    """Whether each row is held out, beside rows that leave no side empty."""
    more = [{"numbers": [number], "doc": number, "n": number} for number in range(100, 120)]
    numbers = set(hold_out(Source.whole(Listed([*rows, *more]), {}, None), share, by)[VALIDATION].numbers)
    return [number in numbers for number in range(len(rows))]


GROUPS = st.lists(st.lists(st.integers(0, 19), max_size=3), max_size=12)


@settings(max_examples=40, deadline=None)
@given(GROUPS, st.sampled_from([0.2, 0.5, 0.8]), st.randoms(use_true_random=False))
def test_connected_rows_are_on_one_side_in_any_order(groups: list[list[int]], share: float, random: Any) -> None:
    rows = [{"numbers": numbers, "n": n} for n, numbers in enumerate(groups)]
    found = held(rows, share, ByNumbers())
    for row, side in zip(rows, found, strict=True):
        for other, its in zip(rows, found, strict=True):
            if set(row["numbers"]) & set(other["numbers"]):
                assert side == its
    order = list(range(len(rows)))
    random.shuffle(order)
    assert held([rows[at] for at in order], share, ByNumbers()) == [found[at] for at in order]
    smaller = held(rows, share / 2, ByNumbers())
    assert all(side or not its for side, its in zip(found, smaller, strict=True))


@settings(max_examples=30, deadline=None)
@given(GROUPS, st.lists(st.integers(0, 19)))
def test_more_rows_move_none_unless_they_connect_groups(groups: list[list[int]], more: list[int]) -> None:
    rows = [{"numbers": numbers, "n": n} for n, numbers in enumerate([*groups, *([each] for each in more)])]
    assert held(rows, 0.5, ByNumbers())[: len(groups)] == held(rows[: len(groups)], 0.5, ByNumbers())


def test_the_share_of_groups_does_not_depend_on_their_size() -> None:
    class Pairs:
        name = "pairs"

        def prepare(self, source: Source) -> Any:
            return lambda row: [holdout.content_hash({"n": 8 * row.values["n"] + n}) for n in range(8)]

    rows = [{"n": n} for n in range(2000)]
    sides = hold_out(Source.whole(Listed(rows), {}, None), 0.1, Pairs())
    assert 140 < len(sides[VALIDATION].numbers) < 260


def test_a_column_keeps_its_rows_together_in_every_kind_of_file() -> None:
    rows = [{"doc": n // 3, "meta": {"page": str(n // 2)}, "n": n} for n in range(60)]
    found = held(rows, 0.4, ByColumn("doc"))
    assert len({(row["doc"], side) for row, side in zip(rows, found, strict=True)}) == 20
    assert held([{**row, "doc": str(row["doc"])} for row in rows], 0.4, ByColumn("doc")) == found
    nested = held(rows, 0.4, ByColumn("meta.page"))
    assert len({(row["meta"]["page"], side) for row, side in zip(rows, nested, strict=True)}) == 30
    # A row without a value is divided by its content.
    without = [{"doc": value, "n": n} for n, value in enumerate([None, ""] * 30)]
    assert held(without, 0.4, ByColumn("doc")) == held(without, 0.4, None)
    assert True in held(without, 0.4, None)


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three questions each about 12 pictures, which are files, also under other names, and data in the row."""
    folder = tmp_path_factory.mktemp("questions")
    rows = []
    for n in range(12):
        data = encoded_image(seed=n)
        for name in (f"{n}.png", f"copy-{n}.png"):
            (folder / name).write_bytes(data)
        inline = "data:image/png;base64," + base64.b64encode(data).decode()
        for image, asked in ((f"{n}.png", "What?"), (f"copy-{n}.png", "Where?"), (inline, "Who?")):
            turns = [turn("user", {"type": "image", "image": image}, asked), turn("assistant", f"Answer {n}.")]
            rows.append({"messages": turns, "week": n})
    write_jsonl(folder / "rows.jsonl", rows)
    return folder


def test_questions_about_a_picture_are_on_one_side(questions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(str(questions / "rows.jsonl"))
    config = PreprocessConfig(recipe="chat", media=MediaConfig(image_root=str(questions)))
    numbers = list(hold_out(source, 0.3, ByImage(config))[VALIDATION].numbers)
    assert numbers
    assert all({3 * (n // 3), 3 * (n // 3) + 1, 3 * (n // 3) + 2} <= set(numbers) for n in numbers)
    monkeypatch.setattr(holdout, "_SECONDS_ALONE", 0)
    monkeypatch.setattr(holdout, "_ROWS_PER_JOB", 7)
    assert list(hold_out(source, 0.3, ByImage(config), workers=2)[VALIDATION].numbers) == numbers
    hashes = ByImage(config).prepare(source)
    assert hashes(Row(0, {"messages": "none"})) == ()


def test_the_summary_counts_pictures_on_both_sides(questions: Path, tmp_path: Path, vlmdata: Any) -> None:
    """Rows keep their sides with more rows, and every part divides in the same way."""
    told = {}
    for name, options in {"rows": (), "image": ("--holdout-by", "image"), "week": ("--holdout-by", "week")}.items():
        given = (questions / "rows.jsonl", "--holdout", "0.3", *options, *OPTIONS, "--out", tmp_path / name)
        code, summary, said = vlmdata("preprocess", *given, "--json")
        assert code == 0, said
        told[name] = json.loads(summary)
    indexes = [open_dataset(tmp_path / "rows" / side).index.pixel_checksums for side in (TRAIN, VALIDATION)]
    shared = set(indexes[0].tolist()) & set(indexes[1].tolist())
    assert told["rows"]["validation"]["in_train"] == len(shared) > 0
    assert "in_train" not in told["rows"]["train"]
    assert [told[name]["validation"]["in_train"] for name in ("image", "week")] == [0, 0]
    code, summary, _ = vlmdata("preprocess", *given[:3], *OPTIONS, "--out", tmp_path / "rows")
    assert f"{len(shared)} of {len(set(indexes[1].tolist()))} distinct images are in train too" in summary
    assert "--holdout-by image keeps each on one side" in summary
    selection = open_dataset(tmp_path / "image" / TRAIN).manifest.source["selection"]
    assert (selection["by"], selection["side"]) == ("image", TRAIN)
    code, _, said = vlmdata("preprocess", *given[:3], "--holdout-by", "week", *OPTIONS, "--out", tmp_path / "image")
    assert (code, "source.selection.by" in said) == (2, True)
    code, _, said = vlmdata("preprocess", questions / "rows.jsonl", "--holdout-by", "week", *OPTIONS, "--out", "out")
    assert (code, "give `image` or a column, and --holdout with it" in said) == (2, True)
