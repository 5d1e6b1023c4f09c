"""Keys that recipes leave aside: counted over a run, shown, and refused with ``--strict``."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.conftest import tree_bytes
from tests.preprocess.command_line import TOKENIZER, Ended
from vlmdata.format.ledger import read_ledger
from vlmdata.format.manifest import Manifest, ShardInfo, Totals, summed
from vlmdata.preprocess.cli.report import report_of
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig
from vlmdata.preprocess.run.closing import most_frequent
from vlmdata.preprocess.run.dataset import RunResult, Watcher, preprocess_dataset
from vlmdata.preprocess.shards.fingerprints import recipe_fingerprint
from vlmdata.preprocess.shards.job import ShardRecord, shortened
from vlmdata.preprocess.sources.open import open_source
from vlmdata.reasons import Reason
from vlmdata.storage import open_store
from vlmdata.verify.dataset import verify_dataset


def write_rows(folder: Path) -> Path:
    """Nine chat rows: all with an id, every third with ``mood``, one of these rejected for another reason."""
    rows: list[dict[str, Any]] = []
    for n in range(9):
        row = {"id": n, "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": f"{n}"}]}
        rows.append({**row, **({"mood": "fine"} if n % 3 == 0 else {})})
    rows[3]["messages"][1]["content"] = ""
    folder.mkdir()
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def preprocess(source: Path, out: Path, watcher: Watcher | None = None, **options: Any) -> RunResult:
    image = ImageConfig(min_pixels=1024, max_pixels=65_536)
    config = PreprocessConfig(recipe="chat", image=image, rows_per_shard=2, **options)
    return preprocess_dataset(open_source(str(source)), out, config, watcher=watcher)


def test_are_counted_in_the_manifest_and_survive_an_interruption(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "source")
    whole = preprocess(source, tmp_path / "whole").manifest
    assert (whole.unused_keys, whole.unknown_keys) == ({"id": 8}, {"mood": 2})
    assert Manifest.read(tmp_path / "whole") == whole
    assert verify_dataset(tmp_path / "whole").faults == []

    def stop(record: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        preprocess(source, tmp_path / "stopped", Watcher(shard_done=stop))
    assert preprocess(source, tmp_path / "stopped").kept == 1
    assert tree_bytes(tmp_path / "stopped") == tree_bytes(tmp_path / "whole")


def test_strict_rejects_rows_with_unknown_keys_alone(tmp_path: Path) -> None:
    manifest = preprocess(write_rows(tmp_path / "source"), tmp_path / "out", strict=True).manifest
    assert (manifest.totals.samples, manifest.unused_keys, manifest.unknown_keys) == (6, {"id": 6}, {})
    rejections = list(read_ledger(tmp_path / "out" / "rejected.jsonl"))
    assert [(each.row, each.reason) for each in rejections] == [(n, Reason.UNKNOWN_KEYS) for n in (0, 3, 6)]
    assert rejections[0].message.startswith("keys that the recipe does not know: mood. --strict")


def test_the_command_has_the_options(tmp_path: Path, vlmdata: Callable[..., Ended]) -> None:
    rows = [{"query": "What is <image>?", "response": "A tag."}, {"query": "?", "response": "x", "mood": "fine"}]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--strict", "-O", "stray_marks=plain", "-j", "1", "--json", *TOKENIZER)
    ended = vlmdata("preprocess", source, "--out", tmp_path / "out", *options)
    assert json.loads(ended.stdout)["rejects"] == {"unknown_keys": 1}


def test_are_shown_in_the_summary_and_in_its_json(tmp_path: Path) -> None:
    result = preprocess(write_rows(tmp_path / "source"), tmp_path / "out")
    report = report_of(open_store(tmp_path / "out"), result, 1.0, 0.5)
    console = Console(record=True, width=120, file=io.StringIO())
    report.print(console)
    said = console.export_text()
    assert "keys not used, harmless: id (8 samples)\n" in said
    assert "keys not used, unknown to the recipe: mood (2 samples)\n  check that they do not matter" in said
    shown = report.to_json()
    assert (shown["unused_keys"], shown["unknown_keys"]) == ({"id": 8}, {"mood": 2})


def test_a_manifest_without_any_is_as_it_was_before_there_were_such_fields(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "x"}]}\n')
    preprocess(path, tmp_path / "out")
    assert not {"unused_keys", "unknown_keys"} & json.loads((tmp_path / "out" / "manifest.json").read_text()).keys()


@given(rows=st.lists(st.lists(st.text("abc", max_size=2), unique=True)), cut=st.integers(0, 20))
def test_counts_do_not_depend_on_how_rows_lie_in_shards(rows: list[list[str]], cut: int) -> None:
    info, totals = ShardInfo("shard-000000.tar", 0, 2, 2, 0, 10, "00", 0), Totals(*range(len(fields(Totals))))
    records = [
        ShardRecord(info, totals, {}, ("images",), unknown=summed(map(Counter, part)), turns={"dropped_reasoning": 1})
        for part in (rows[:cut], rows[cut:])
    ]
    read = [ShardRecord.from_json(record.to_json()) for record in records]
    assert read == records
    expected = {key: sum(key in row for row in rows) for row in rows for key in row}
    assert most_frequent(summed(record.unknown for record in read)) == expected


def test_very_many_keys_are_counted_together() -> None:
    rows = [Counter(shortened(["often", f"{n:04}", "x" * 500])) for n in range(1000)]
    total = most_frequent(summed(rows))
    assert (len(total), total["often"], total["x" * 120], total["0197"], total["(other keys)"]) == (
        201,
        1000,
        1000,
        1,
        802,
    )


def test_the_fingerprint_of_a_recipe_covers_every_file_of_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "fingerprinted_recipes"
    (package / "parts").mkdir(parents=True)
    (package / "__init__.py").write_text("from fingerprinted_recipes.recipe import Recipe\n")
    (package / "recipe.py").write_text("class Recipe:\n    pass\n")
    (package / "parts" / "text.py").write_text("A = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = {recipe_fingerprint("fingerprinted_recipes:Recipe")}
    for name, content in (
        ("parts/text.py", "A = 2\n"),
        ("parts/new.py", ""),
        ("__init__.py", "from .recipe import *\n"),
    ):
        (package / name).write_text(content)
        seen.add(recipe_fingerprint("fingerprinted_recipes:Recipe"))
    assert len(seen) == 4
    assert recipe_fingerprint("fingerprinted_recipes.recipe:Recipe") not in seen
    assert recipe_fingerprint("chat") != recipe_fingerprint("vlmdata.preprocess.recipes.chat.recipe:Chat")
