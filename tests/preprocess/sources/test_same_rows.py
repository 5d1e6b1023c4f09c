"""The same rows give the same samples, sides of a holdout and kept columns from every kind of source."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, Features, Json, Value

from tests.preprocess.recipes.chat_recipe import convert
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.shards.kept_columns import kept_values
from vlmdata.preprocess.sources.holdout import hold_out
from vlmdata.preprocess.sources.open import open_source
from vlmdata.preprocess.sources.rows import Source

#: Arguments that readers which guess types change: dates, 5 beside 2.5, integers over 64 bits, nulls, empty objects.
ARGUMENTS: list[Any] = [
    {"at": "2024-01-01", "n": 5, "flag": True},
    {"at": "2024-01-02 10:00:00", "n": 2.5, "big": 12345678901234567890},
    {"at": "2024-01-03T10:00:00Z", "n": None, "empty": {}, "list": [[1, "x"], [], [None, {"a": []}]]},
    {"at": 7, "n": -0.0, "text": '"]},[{\\ é\u2028', "big": 10**30},
]
ROWS: list[dict[str, Any]] = [
    {
        "id": f"{n:03d}",
        "created": f"2024-01-{1 + n % 28:02d}",
        "messages": [
            {"role": "user", "content": f"2024-02-{1 + n % 28:02d}"},
            {"role": "assistant", "content": "2024-03-1", "tool_calls": [{"name": "f", "arguments": ARGUMENTS[n % 4]}]},
        ],
        "tools": [{"name": "f", "parameters": {"minimum": 0, "maximum": 10**19, "default": ARGUMENTS[n % 4]["at"]}}],
    }
    for n in range(40)
]  # fmt: skip
TEXTS = [json.dumps(row) for row in ROWS]
#: A row that must be rejected everywhere: a key of its column occurs twice.
TWICE = '{"id": "no", "messages": [{"role": "user", "content": "a", "content": "b"}]}'
COLUMNS = list(ROWS[0])
JSON_COLUMNS = ("messages", "tools")


def as_columns() -> list[dict[str, str | None]]:
    """The rows with JSON text in the columns that are not text; the last is ``TWICE``."""
    rows: list[dict[str, str | None]] = [
        {name: json.dumps(value) if name in JSON_COLUMNS else value for name, value in row.items()} for row in ROWS
    ]
    return [*rows, {"id": "no", "messages": TWICE[TWICE.index("[") : -1], "created": None, "tools": None}]


def write_csv(path: Path) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS)
    writer.writeheader()
    writer.writerows(as_columns())
    path.write_bytes(text.getvalue().encode())


def write_tar(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        for n, text in enumerate([*TEXTS, TWICE]):
            member = tarfile.TarInfo(f"{n:03d}.json")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))


def save(path: Path) -> None:
    table = pa.Table.from_pylist(as_columns())
    features = Features({name: Json() if name in JSON_COLUMNS else Value("string") for name in COLUMNS})
    Dataset(table.select(COLUMNS).cast(features.arrow_schema)).save_to_disk(str(path))


def described(path: Path) -> None:
    path.mkdir()
    (path / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: rows.json\n---\n")
    (path / "rows.json").write_text(f"[{','.join([*TEXTS, TWICE])}]")


KINDS: dict[str, Callable[[Path], object]] = {
    "rows.json": lambda path: path.write_text(f"[{','.join([*TEXTS, TWICE])}]"),
    "rows.json.gz": lambda path: path.write_bytes(gzip.compress(f"[{','.join([*TEXTS, TWICE])}]".encode())),
    "objects.json": lambda path: path.write_text(
        "\n".join([*(json.dumps(row, indent=2, ensure_ascii=False) for row in ROWS), TWICE])
    ),
    "lines.json": lambda path: path.write_text("\n".join([*TEXTS, TWICE])),
    "rows.csv": write_csv,
    "rows.tar": write_tar,
    "rows.parquet": lambda path: pq.write_table(pa.Table.from_pylist(as_columns()), path),
    "saved": save,
    "described": described,
}


def learned(source: Source) -> list[Any]:
    return [convert(dict(source.row(n).values)) for n in range(len(ROWS))]


def held_out(source: Source) -> list[int]:
    """The held-out rows, but for that which is not readable in some kinds of files."""
    return [n for n in hold_out(source, 0.3)["validation"].numbers if n < len(ROWS)]


@pytest.mark.parametrize("name", KINDS)
def test_from_every_kind_of_source(tmp_path, name):
    KINDS[name](tmp_path / name)
    (tmp_path / "rows.jsonl").write_text("\n".join([*TEXTS, TWICE]))
    lines, source = open_source(str(tmp_path / "rows.jsonl")), open_source(str(tmp_path / name))
    assert source.num_rows == lines.num_rows == len(ROWS) + 1
    # By their text, because 5 == 5.0 and -0.0 == 0.
    found, expected = learned(source), learned(lines)
    assert [repr((each.messages, each.tools)) for each in found] == [
        repr((each.messages, each.tools)) for each in expected
    ]
    assert [each.messages[1].tool_calls[0]["arguments"] for each in expected] == [ARGUMENTS[n % 4] for n in range(40)]
    for each in (source, lines):
        with pytest.raises(RowRejected, match="'content' occurs twice"):
            convert(dict(each.row(len(ROWS)).values))
    assert held_out(source) == held_out(lines)
    kept = [[kept_values(each.row(n), ["id", "created"]) for n in range(len(ROWS))] for each in (source, lines)]
    assert kept[0] == kept[1]
    assert kept[0][3] == {"id": "003", "created": "2024-01-04"}


def test_a_row_of_another_type_moves_no_row_of_a_holdout(tmp_path):
    for name, rows in (("a.json", ROWS), ("b.json", [*ROWS, {"id": 7, "created": 2.5, "messages": {}, "tools": 1}])):
        (tmp_path / name).write_text(json.dumps(rows))
    before, after = (held_out(open_source(str(tmp_path / name))) for name in ("a.json", "b.json"))
    assert before == after


def test_times_in_arguments_whose_text_arrow_has_lost_are_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(TEXTS[:1]))
    Dataset.from_json(str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path / "cache")).save_to_disk(str(tmp_path / "d"))
    with pytest.raises(RowRejected, match=r"tools\[\] holds datetime.*; store it as text"):
        convert(dict(open_source(str(tmp_path / "d")).row(0).values))
