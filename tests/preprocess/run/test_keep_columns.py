"""Columns of the source in the index: typed by all rows, kept by every command, and usable in expressions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.chat_rows import turn, write_jsonl
from tests.conftest import build_dataset, tree_bytes
from tests.preprocess.command_line import Ended
from vlmdata import open_dataset
from vlmdata.errors import SourceError, UsageError
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import INDEX_NAME
from vlmdata.format.source_columns import SourceTypes, columns_of, source_fields
from vlmdata.preprocess.recode.old_dataset import OldDataset
from vlmdata.preprocess.recode.run import recode_dataset
from vlmdata.preprocess.retokenize.run import old_config, retokenize_dataset
from vlmdata.select.choice import Choice, choose
from vlmdata.select.dataset import select_dataset
from vlmdata.storage import open_store
from vlmdata.storage.join import join_datasets
from vlmdata.verify.dataset import verify_dataset

TALK = {"messages": [turn("user", "What?"), turn("assistant", "This.")]}
FACTS: list[dict[str, Any]] = [
    {"lang": "de", "meta": {"quality": 1, "tags": ["a"]}, "mixed": 1},
    {"lang": "en", "meta": {"quality": 0.5}, "mixed": "two"},
    {"meta": {"quality": 3, "tags": []}, "good": True},
    {"lang": "de", "mixed": [1, None]},
]
KEPT = ("lang", "meta.quality", "meta.tags", "mixed", "good", "absent")
TYPES = {
    "source.lang": pa.string(),
    "source.meta.quality": pa.float64(),
    "source.meta.tags": pa.list_(pa.string()),
    "source.mixed": pa.string(),
    "source.good": pa.bool_(),
    "source.absent": pa.string(),
}
VALUES = {
    "source.lang": ["de", "en", None, "de"],
    "source.meta.quality": [1.0, 0.5, 3.0, None],
    "source.meta.tags": [["a"], None, [], None],
    "source.mixed": ["1", "two", None, "[1, null]"],
    "source.good": [None, None, True, None],
    "source.absent": [None] * 4,
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("rows") / "rows.jsonl", [{**TALK, **facts} for facts in FACTS])


def built(rows: Path, out: Path, **options: Any) -> Path:
    return build_dataset(rows, out, recipe="chat", rows_per_shard=1, keep_columns=KEPT, **options)


@pytest.fixture(scope="module")
def dataset(rows: Path) -> Path:
    return built(rows, rows.with_name("dataset"))


def columns(place: Path) -> tuple[dict[str, pa.DataType], dict[str, list[Any]]]:
    table = open_dataset(place).index.table
    fields = source_fields(table.schema)
    return {each.name: each.type for each in fields}, {each.name: table[each.name].to_pylist() for each in fields}


def test_a_column_has_the_type_of_all_its_values(dataset: Path) -> None:
    assert columns(dataset) == (TYPES, VALUES)
    assert verify_dataset(dataset).faults == []


def test_a_kept_column_is_not_unused_and_strict_accepts_it(rows: Path, tmp_path: Path) -> None:
    manifest = Manifest.read(built(rows, tmp_path / "strict", strict=True))
    assert (manifest.totals.rejected, manifest.unused_keys, manifest.unknown_keys) == (0, {}, {})
    manifest = Manifest.read(build_dataset(rows, tmp_path / "one", recipe="chat", keep_columns=("good",)))
    assert "good" not in {**manifest.unused_keys, **manifest.unknown_keys}
    assert manifest.unknown_keys, "of other columns"


@pytest.mark.parametrize(
    ("expression", "chosen"),
    [
        ("source.lang == 'de'", [0, 3]),
        ("source.meta.quality >= 1", [0, 2]),
        ("source['meta.quality'] < 1 or 'a' in source.meta.tags", [0, 1]),
        ("source.good", [2]),
        ("source.absent is None", [0, 1, 2, 3]),
    ],
)
def test_expressions_read_the_index_alone(
    dataset: Path, monkeypatch: pytest.MonkeyPatch, expression: str, chosen: list[int]
) -> None:
    opened = open_dataset(dataset)
    monkeypatch.setattr(opened, "metadata", None)
    assert np.flatnonzero(choose(opened, Choice(where=expression)).mask).tolist() == chosen


def test_an_unknown_column_lists_those_that_are_kept(dataset: Path) -> None:
    with pytest.raises(UsageError, match=r"no column source\.lnag.*source\.lang, source\.meta\.quality"):
        choose(open_dataset(dataset), Choice(where="source.lnag == 'de'"))


def test_a_lost_index_is_made_again_from_the_shards(rows: Path, tmp_path: Path) -> None:
    made = built(rows, tmp_path / "made")
    before = tree_bytes(made)
    (made / INDEX_NAME).unlink()
    built(rows, made)
    assert tree_bytes(made) == before


def test_other_commands_keep_them(rows: Path, dataset: Path, tmp_path: Path) -> None:
    recode_dataset(dataset, tmp_path / "recoded", "zstd")
    fresh = tree_bytes(built(rows, tmp_path / "zstd", pixels="zstd"))
    assert tree_bytes(tmp_path / "recoded") == fresh
    opened, choice = open_dataset(dataset), Choice(where="source.lang == 'de'")
    select_dataset(opened, open_store(dataset), open_store(tmp_path / "chosen"), choice, choose(opened, choice))
    assert columns(tmp_path / "chosen")[1]["source.meta.quality"] == [1.0, None]
    assert verify_dataset(tmp_path / "chosen").faults == []


@pytest.mark.parametrize("kept", [False, True], ids=["source", "shards"])
def test_a_retokenized_dataset_keeps_them(rows: Path, tmp_path: Path, kept: bool) -> None:
    from dataclasses import replace

    from vlmdata.preprocess.sources.open import open_source

    old = OldDataset.open(built(rows, tmp_path / "old", keep_conversations=kept))
    source = None if kept else open_source(str(rows), recipe="chat")
    config = replace(old_config(old), system_prompt="Answer.")
    retokenize_dataset(old, open_store(tmp_path / "out"), config, source=source)
    fresh = built(rows, tmp_path / "fresh", keep_conversations=kept, system_prompt="Answer.")
    assert tree_bytes(tmp_path / "out") == tree_bytes(fresh)


def test_joined_datasets_have_the_columns_of_all(dataset: Path, tmp_path: Path) -> None:
    other = write_jsonl(tmp_path / "rows.jsonl", [{**TALK, "lang": 7, "meta": {"quality": 2}, "more": 1}])
    options: dict[str, Any] = {"recipe": "chat", "keep_columns": ("lang", "meta.quality", "more")}
    places = [dataset, build_dataset(other, tmp_path / "other", **options)]
    join_datasets([open_store(place) for place in places], open_store(tmp_path / "joined"))
    types, values = columns(tmp_path / "joined")
    assert types == {**TYPES, "source.more": pa.int64()}
    assert values["source.lang"] == [*VALUES["source.lang"], "7"]
    assert values["source.meta.quality"] == [*VALUES["source.meta.quality"], 2.0]
    assert values["source.more"] == [None] * 4 + [1]
    assert verify_dataset(tmp_path / "joined").faults == []


def test_files_and_mappings_are_refused(rows: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--keep-columns meta: row 0 has a mapping there\. Name columns of numbers"):
        build_dataset(rows, tmp_path / "out", recipe="chat", keep_columns=("meta",))


def test_an_unknown_column_of_a_table_is_an_error_at_once(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([{**TALK, "lang": "de"}]), tmp_path / "rows.parquet")
    with pytest.raises(SourceError, match=r"--keep-columns lnag: the source has no such column\. Columns: .*lang"):
        build_dataset(tmp_path / "rows.parquet", tmp_path / "out", recipe="chat", keep_columns=("lnag",))


def test_the_commands(rows: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    command: Callable[..., Ended] = request.getfixturevalue("vlmdata")
    options = ("--tokenizer", "embedded", "--recipe", "chat", "--keep-columns", "lang, meta.quality", "-j", "1")
    assert command("preprocess", rows, *options, "--out", tmp_path / "out").code == 0
    shown = command("inspect", tmp_path / "out", "--sample", "000000000")
    assert "lang = de" in shown.said
    card = command("inspect", tmp_path / "out")
    assert "lang (string), meta.quality (double)" in card.said


def test_whole_numbers_that_no_fraction_holds_stay_what_they_are() -> None:
    """Beside a fraction, they would be floating-point numbers: two ids would be one."""
    ids, cases = [2**53 + 1, 2**53 + 2], {}
    for name, values in {"alone": ids, "beside": [*ids, 0.5], "small": [1, 2, 0.5], "lists": [[ids[0]], [0.5]]}.items():
        found = SourceTypes(["id"])
        rows = [{"id": value} for value in values]
        found.add(rows)
        cases[name] = columns_of(rows, found.types)["source.id"].to_pylist()
    assert cases["alone"] == ids
    assert cases["beside"] == [str(ids[0]), str(ids[1]), "0.5"]
    assert cases["small"] == [1.0, 2.0, 0.5]
    assert cases["lists"] == [[str(ids[0])], ["0.5"]]
