"""The readers of docs/extend/reader.md, through every command that opens a source, and what they may not do."""

from __future__ import annotations

import gzip
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import vlmdata
from tests.conftest import tree_bytes
from tests.preprocess.extend_pages import write_example
from vlmdata.cli.main import app
from vlmdata.errors import SourceError
from vlmdata.format.manifest import Manifest
from vlmdata.preprocess.registries import READERS
from vlmdata.preprocess.sources import open as opening
from vlmdata.preprocess.sources.open import open_source

OPTIONS = ["--tokenizer", "embedded", "--recipe", "chat", "--rows-per-shard", "4"]


def text_of(pairs: list[tuple[str, str]]) -> str:
    return "\n".join(f"query: {query}\nresponse: {response}\n" for query, response in pairs)


PAIRS = [(f"What is {number}?", f"It is {number}.") for number in range(12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readers")
    for number in range(2):
        write_example("reader.md", folder, number)
    (folder / "data").mkdir()
    (folder / "data" / "a.para").write_text(text_of(PAIRS[:7]))
    (folder / "data" / "b.para.gz").write_bytes(gzip.compress(text_of(PAIRS[7:]).encode()))
    rows = [{"query": query, "response": response} for query, response in PAIRS]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


@pytest.fixture(autouse=True)
def _in_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(READERS, "_given", {})


def run(*words: Any, code: int = 0) -> str:
    done = CliRunner().invoke(app, [*map(str, words)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.stdout


def preprocess(*words: Any, code: int = 0) -> str:
    return run("preprocess", "data", "--reader", "paragraphs.py:Paragraphs", *OPTIONS, *words, code=code)


def ids(directory: str) -> list[list[int]]:
    return [sample.input_ids.tolist() for sample in vlmdata.open_dataset(directory)]


def test_every_command_that_opens_a_source_takes_it(folder: Path, tmp_path: Path) -> None:
    preprocess("--out", tmp_path / "own", "-j", 1)
    run("preprocess", "rows.jsonl", *OPTIONS, "--out", tmp_path / "json", "-j", 1)
    assert ids(str(tmp_path / "own")) == ids(str(tmp_path / "json"))
    run("verify", tmp_path / "own", "-j", 1)
    source = Manifest.read(tmp_path / "own").source
    assert (source["reader"], len(source["reader_source"])) == ("paragraphs", 64)
    assert str(folder) not in json.dumps(source)
    assert "What is 3?" in preprocess("--trace", 3)
    assert json.loads(preprocess("--lengths", "64", "--json"))["rows"] == len(PAIRS)
    preprocess("--out", tmp_path / "parts", "--part", "1/2", "-j", 1)
    preprocess("--out", tmp_path / "parts", "--part", "2/2", "-j", 1)
    run("finish", tmp_path / "parts")
    assert tree_bytes(tmp_path / "parts") == tree_bytes(tmp_path / "own")
    preprocess("--out", tmp_path / "held", "--holdout", "0.4", "-j", 1)
    sides = [len(vlmdata.open_dataset(tmp_path / "held" / side)) for side in ("train", "validation")]
    assert sum(sides) == len(PAIRS)
    assert min(sides) > 0
    again = ["retokenize", tmp_path / "own", "--source", "data", "--tokenizer", "embedded", "-j", 1]
    run(*again, "--reader", "paragraphs.py:Paragraphs", "--out", tmp_path / "again")
    assert ids(str(tmp_path / "again")) == ids(str(tmp_path / "own"))


def test_an_edited_reader_is_another_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_example("reader.md", tmp_path)
    data = tmp_path / "rows.para"
    data.write_text(text_of(PAIRS[:4]))
    before = open_source(str(data), reader=f"{tmp_path}/paragraphs.py:Paragraphs").identity
    other = tmp_path / "other"
    other.mkdir()
    write_example("reader.md", other)
    monkeypatch.setattr(READERS, "_given", {})
    assert open_source(str(data), reader=f"{other}/paragraphs.py:Paragraphs").identity == before
    (tmp_path / "edited").mkdir()
    edited = tmp_path / "edited" / "paragraphs.py"
    edited.write_text((other / "paragraphs.py").read_text() + "\n# edited\n")
    monkeypatch.setattr(READERS, "_given", {})
    changed = open_source(str(data), reader=f"{edited}:Paragraphs").identity
    assert {name for name in before if before[name] != changed[name]} == {"reader_source"}


def test_only_the_user_makes_one_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMDATA_READERS", f"{folder}/paragraphs.py:Paragraphs")
    with pytest.raises(SourceError, match=r"a\.para is no data file; these are read: \.parquet, \.arrow, \.json, "):
        open_source("data/a.para")
    assert open_source("data/a.para", reader="paragraphs").num_rows == 7


def test_only_its_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    (tmp_path / "a.jpg").write_bytes(b"")
    with pytest.raises(SourceError, match="data files of several kinds in one folder"):
        open_source(str(tmp_path))
    assert open_source(str(tmp_path), reader="csv").row(0).values == {"a": "1", "b": "2"}
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "rows.jsonl").write_text('{"messages": []}\n')
    assert (
        open_source(str(tmp_path / "alone"), reader="jsonl").identity == open_source(str(tmp_path / "alone")).identity
    )
    with pytest.raises(SourceError, match=r"--reader csv: .* no --subset"):
        open_source(str(tmp_path), reader="csv", config_name="x")
    with pytest.raises(SourceError, match="--reader csv: datasets of the hub"):
        open_source("some/dataset", reader="csv")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("none", "--reader none: unknown reader. Known: parquet, arrow, json, jsonl, csv, tar"),
        ("wrong.py:Nameless", "wrong.py:Nameless: it has no `name`"),
        ("wrong.py:Endless", "wrong.py:Endless: it has no `endings`"),
        ("wrong.py:plain", "wrong.py:plain: it has no `name`"),
        ("wrong.py:Taken", "its name is 'csv', but another reader has this name"),
    ],
)
def test_what_is_no_reader_is_refused(folder: Path, name: str, problem: str) -> None:
    base = "from vlmdata.preprocess.sources.records import RecordFile\nplain = 3\n"
    classes = {"Nameless": "endings = ('.x',)", "Endless": "name = 'x'", "Taken": "name = 'csv'; endings = ('.x',)"}
    (folder / "wrong.py").write_text(
        base + "".join(f"class {own}(RecordFile): {body}\n" for own, body in classes.items())
    )
    with pytest.raises(SourceError) as refused:
        open_source("data", reader=name)
    assert problem in str(refused.value)


def test_a_process_that_never_saw_the_file_reads_the_rows(folder: Path, tmp_path: Path) -> None:
    source = open_source("data", reader="paragraphs.py:Paragraphs")
    (tmp_path / "source").write_bytes(pickle.dumps(source))
    code = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).row(9).values['query'])"
    told = subprocess.run([sys.executable, "-c", code, tmp_path / "source"], capture_output=True, text=True, cwd=folder)
    assert told.stdout == "What is 9?\n", told.stderr


@given(st.lists(st.tuples(st.text("ab ?", min_size=1), st.text("xy .", min_size=1)), min_size=1), st.data())
def test_columns_in_fragments_are_those_of_parquet(folder: Path, pairs: list[tuple[str, str]], data: Any) -> None:
    from pyarrow import orc, parquet

    table = pa.table({"query": [one for one, _ in pairs], "response": [two for _, two in pairs]})
    orc.write_table(table, "rows.orc", batch_size=1)
    parquet.write_table(table, "rows.parquet")
    own, built_in = open_source("rows.orc", reader="orc_files.py:Orc"), open_source("rows.parquet")
    for number in data.draw(st.permutations(range(len(pairs)))):
        assert own.row(number) == built_in.row(number)
    assert own.rows.columns() == built_in.rows.columns()
    assert opening.open_source("rows.orc", reader="orc").identity["files"][0].keys() == {"name", "bytes", "xxh3_128"}
