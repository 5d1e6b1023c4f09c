"""Rejected rows are named by file, row in it and id, also after rows before them were added or removed."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.chat_rows import turn
from tests.conftest import build_dataset
from vlmdata import open_dataset
from vlmdata.errors import SourceError
from vlmdata.format.ledger import Rejection, read_ledger
from vlmdata.format.manifest import Manifest
from vlmdata.inspect.terminal.trace import print_row
from vlmdata.inspect.trace import describe_row
from vlmdata.preprocess.cli.report import report_of
from vlmdata.preprocess.run.dataset import RunResult
from vlmdata.preprocess.run.trace import number_in_source
from vlmdata.preprocess.sources.open import open_source
from vlmdata.storage import open_store

NAMES = [f"row {n}" for n in range(6)]


def talk(name: str, *, good: bool = True) -> dict[str, Any]:
    return {"id": name, "messages": [turn("user", name), turn("assistant", "yes" if good else "")]}


def write(folder: Path, files: dict[str, list[dict[str, Any]]]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, rows in files.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def places(folder: Path) -> dict[int, str]:
    return {each.row: each.place for each in read_ledger(folder / "rejected.jsonl")}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    a, b = [talk(name) for name in NAMES[:3]], [talk(name, good=name != "row 4") for name in NAMES[3:]]
    return write(tmp_path / "rows", {"a.jsonl": a, "b.jsonl": b})


@pytest.fixture
def out(source: Path, tmp_path: Path) -> Path:
    return build_dataset(source, tmp_path / "out", recipe="chat")


def test_in_the_first_version(out: Path) -> None:
    assert places(out) == {4: "b.jsonl, row 1, id row 4"}


def test_in_later_versions(source: Path, out: Path, tmp_path: Path) -> None:
    a = [talk("new", good=False), *(talk(name) for name in NAMES[:3])]
    b = [talk(name, good=name != "row 4") for name in NAMES[4:]]
    write(source, {"a.jsonl": a, "b.jsonl": b})
    build_dataset(source, out, recipe="chat")
    version = out / "versions" / "2"
    assert places(version) == {4: "b.jsonl, row 0, id row 4", 6: "a.jsonl, row 0, id new"}
    assert places(out) == {4: "b.jsonl, row 1, id row 4"}, "the first version stays as it was"
    # --trace takes the numbers of the ledger.
    opened, store = open_source(str(source)), open_store(out)
    found = {row: opened.row(number_in_source(store, opened, row)).values["id"] for row in (0, 4, 5, 6)}
    assert found == {0: "row 0", 4: "row 4", 5: "row 5", 6: "new"}
    with pytest.raises(SourceError, match=r"--trace 3: version 2 of .* has no row 3"):
        number_in_source(store, opened, 3)
    assert number_in_source(open_store(tmp_path / "none"), opened, 3) == 3
    result = RunResult(Manifest.read(version), made=0, kept=1, folder="versions/2")
    console = Console(file=io.StringIO(), width=200)
    report_of(store, result, 1.0, 1.0).print(console)
    dataset = open_dataset(version)
    print_row(console, describe_row(dataset, 4), [None])
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "empty_answer, for example row 4 (b.jsonl, row 0, id row 4): " in said
    assert said.count("b.jsonl, row 0, id row 4") == 2
    write(source, {"a.jsonl": a[1:]})
    changed = open_source(str(source))
    with pytest.raises(SourceError, match=r"--trace 4: the source has changed since version 2 of .* this was row 4"):
        number_in_source(store, changed, 4)


def test_lines_of_earlier_versions_are_read(tmp_path: Path) -> None:
    (tmp_path / "rejected.jsonl").write_text('{"row": 1, "reason": "overlong", "message": "m"}\n')
    (line,) = read_ledger(tmp_path / "rejected.jsonl")
    assert (line, line.place) == (Rejection(1, line.reason, "m"), "")


@pytest.mark.parametrize(("values", "place"), [({"uid": 7, "id": None}, "id 7"), ({"id": [1]}, ""), ({"id": ""}, "")])
def test_an_id_is_text_or_a_number(tmp_path: Path, values: dict[str, Any], place: str) -> None:
    rows = [{**talk("x", good=False), **values}, talk("y")]
    folder = write(tmp_path / "rows", {"a.jsonl": rows})
    assert places(build_dataset(folder, tmp_path / "out", recipe="chat")) == {
        0: ", ".join(["a.jsonl, row 0", *([place] if place else [])])
    }
