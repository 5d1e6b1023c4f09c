"""Rows are named by file, row there and id, in samples too; an edited row is an edit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.changing_source import REJECTED, Team, row
from tests.chat_rows import write_jsonl
from tests.preprocess.command_line import SMALL_IMAGES
from vlmdata.errors import SourceError, UsageError
from vlmdata.format.ledger import read_ledger
from vlmdata.format.row_places import RowPlaces
from vlmdata.inspect import describe_sample
from vlmdata.inspect.edits import EditDescriber
from vlmdata.select.compare import compare


def named(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**each, "meta": {"name": f"r{n}"}} for n, each in enumerate(rows)]


ID = {"id_column": "meta.name"}


@pytest.fixture
def team(tmp_path: Path) -> Team:
    team = Team(tmp_path)
    team.run(named(team.rows), config=ID)
    return team


def places(team: Team) -> dict[int, str]:
    dataset = team.version()
    found = RowPlaces.read(dataset.directory, dataset.manifest)
    return {number: found.text(number) for number in found.table["row"].to_pylist()}


def test_samples_and_rejections_name_file_row_and_id(team: Team) -> None:
    assert places(team) == {n: f"rows.jsonl, row {n}, id r{n}" for n in range(8)}
    assert describe_sample(team.version(), "000000005").source.endswith("rows.jsonl, row 5, id r5")
    assert [each.place for each in read_ledger(team.out / "rejected.jsonl")] == ["rows.jsonl, row 4, id r4"]


def test_an_edited_row_is_an_edit_and_all_follow_their_places(team: Team) -> None:
    rows = [{**each, "meta": {"name": f"r{n}"}} for n, each in enumerate(team.rows)]
    edited = {**row("Edited", "2.png"), "meta": {"name": "r2"}}
    result = team.run([{**row("new"), "meta": {"name": "new"}}, rows[0], *rows[3:], edited], config=ID)
    assert result.version is not None
    assert result.version.changes == {"kept": 6, "made": 2, "removed": 2, "edited": 1}
    told = {0: "1, id r0", **{n: f"{n - 1}, id r{n}" for n in range(3, 8)}, 8: "0, id new", 9: "7, id r2"}
    assert places(team) == {number: f"rows.jsonl, row {text}" for number, text in told.items()}
    (rejected,) = read_ledger(team.out / "versions/2/rejected.jsonl")
    assert rejected.place == "rows.jsonl, row 3, id r4"
    found = compare(team.version(1), team.version(2), "id")
    assert (found.equal, found.only_first, found.only_second) == (5, ("000000001",), ("000000008",))
    (changed,) = found.changed
    assert (changed.key, changed.second_key, changed.id) == ("000000002", "000000009", "r2")
    edit = EditDescriber(team.version(1), team.version(2))(changed)
    assert [(line.count("Row 2"), line.count("Edited")) for line in (*edit.old, *edit.new)] == [(1, 0)] * 2 + [
        (0, 1)
    ] * 2


def test_an_id_found_by_name_is_that_of_now(tmp_path: Path) -> None:
    """A row that has gained an id, or another one, is kept, and named by it."""
    team = Team(tmp_path)
    team.run()
    result = team.run([*({**each, "id": n} for n, each in enumerate(team.rows)), row("new")])
    assert result.version is not None
    assert result.version.changes == {"kept": 8, "made": 1, "removed": 0}
    assert [text.rpartition(", ")[2] for text in places(team).values()] == [f"id {n}" for n in range(8)] + ["row 8"]
    (rejected,) = read_ledger(team.out / "versions/2/rejected.jsonl")
    assert rejected.id == "4"


def test_what_has_no_ids_is_refused(team: Team, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no ids of this name\. Kept columns: none"):
        compare(team.version(), team.version(), "name")
    table = pq.read_table(team.out / "rows.parquet")
    pq.write_table(table.drop_columns(["id"]), team.out / "rows.parquet")
    assert places(team) == {}
    with pytest.raises(UsageError, match="--match id"):
        compare(team.version(), team.version(), "id")


def boxed(x: int) -> dict[str, Any]:
    answer = f'[{{"bbox_2d": [0, 0, {x}, 500], "label": "total"}}]'
    asked = {"role": "user", "content": [{"type": "image", "image": "1.png"}, {"type": "text", "text": "Where?"}]}
    return {"messages": [asked, {"role": "assistant", "content": answer}], "id": "box"}


def test_command(tmp_path: Path, vlmdata: Any) -> None:
    """``diff --match id`` shows old and new text and boxes of rows that are in another order."""
    options = ("--tokenizer", "embedded", "-j", 1, "--max-reject-rate", 1, *SMALL_IMAGES)
    for name, x, price in (("a", 500, "12"), ("b", 900, "13")):
        (tmp_path / f"of-{name}").mkdir()
        team = Team(tmp_path / f"of-{name}")
        rows = [{**row("Same"), "id": "s"}, {**row(f"Price {price}"), "id": 7}, boxed(x), REJECTED]
        write_jsonl(team.file, rows if name == "a" else rows[::-1])
        given = (team.file, "--image-root", team.file.parent / "images", *options)
        ended = vlmdata("preprocess", *given, "--id", "id", "-o", tmp_path / name)
        assert ended.code == 0, ended.said
    compared = ("diff", tmp_path / "a", tmp_path / "b")
    ended = vlmdata(*compared, "--match", "id")
    assert ended.code == 1, ended.said
    for words in ("1 equal", "2 changed", "id 7, 000000001 and 000000002: ", "    - Price 12.", "    + Price 13."):
        assert words in ended.stdout
    for words in (
        "    - box total [0, 0, 500, 500]",
        "    + box total [0, 0, 900, 500]",
        f"0 only in {tmp_path / 'b'}",
    ):
        assert words in ended.stdout
    fields = json.loads(vlmdata(*compared, "--match", "id", "--json").stdout)
    assert [edit["id"] for edit in fields["edits"]] == ["7", "box"]
    assert "box total" not in vlmdata(*compared).stdout


def test_a_column_that_is_not_there_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa

    from vlmdata.preprocess.config import PreprocessConfig
    from vlmdata.preprocess.run.dataset import preprocess_dataset
    from vlmdata.preprocess.sources.open import open_source

    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    config = PreprocessConfig(recipe="text", id_column="uid")
    with pytest.raises(SourceError, match="--id uid: the source has no such column"):
        preprocess_dataset(open_source(str(tmp_path / "a.parquet")), tmp_path / "out", config)
