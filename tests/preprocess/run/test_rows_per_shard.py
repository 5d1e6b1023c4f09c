"""Without rows per shard, the number of rows decides, and runs that are there keep theirs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chat_rows import turn, write_jsonl
from tests.conftest import tree_bytes
from tests.preprocess.command_line import TOKENIZER, Ended
from vlmdata import open_dataset
from vlmdata.format.schema import MANIFEST_NAME
from vlmdata.preprocess.config import PreprocessConfig
from vlmdata.preprocess.run.dataset import Watcher, preprocess_dataset
from vlmdata.preprocess.run.directory import ShardPlan
from vlmdata.preprocess.sources.open import open_source


@given(st.integers(0, 10**7))
def test_all_rows_are_in_shards_of_a_sensible_size(rows: int) -> None:
    plan = ShardPlan.of(rows, None)
    assert 8 <= plan.rows_per_shard <= 256
    assert [row for job in plan.jobs[:3] for row in range(job.row_start, job.row_stop)] == list(
        range(min(rows, 3 * plan.rows_per_shard))
    )
    if 512 <= rows <= 16_384:
        assert 32 < len(plan.jobs) <= 64
    if rows >= 16_384:
        assert plan.rows_per_shard == 256


def rows_of(*numbers: int) -> list[Any]:
    return [{"messages": [turn("user", f"Question {n}?"), turn("assistant", f"Answer {n}.")]} for n in numbers]


@pytest.fixture
def command(vlmdata: Callable[..., Ended]) -> Callable[..., None]:
    def run(source: Path, out: Path, *options: Any) -> None:
        ended = vlmdata("preprocess", source, "--out", out, "--recipe", "chat", *TOKENIZER, *options)
        assert ended.code == 0, ended.said

    return run


def shards(place: Path | str) -> list[int]:
    return [info.row_stop - info.row_start for info in open_dataset(place).manifest.shards]


def test_a_small_set_has_shards_for_all_workers_and_grows(tmp_path: Path, command: Callable[..., None]) -> None:
    source, out = write_jsonl(tmp_path / "rows.jsonl", rows_of(*range(20))), tmp_path / "out"
    command(source, out, "-j", 2)
    assert shards(out) == [8, 8, 4]
    alone = tmp_path / "alone"
    command(source, alone, "-j", 1)
    assert tree_bytes(alone) == tree_bytes(out)
    write_jsonl(source, rows_of(*range(700)))
    command(source, out)
    assert shards(f"{out}@2")[3:] == [11] * 61 + [9]  # 680 new rows


@pytest.mark.parametrize("finished", [True, False])
def test_what_is_there_keeps_its_shards(tmp_path: Path, command: Callable[..., None], finished: bool) -> None:
    """As runs of earlier versions, which recorded 256."""
    source, out = write_jsonl(tmp_path / "rows.jsonl", rows_of(*range(20))), tmp_path / "out"
    config = PreprocessConfig(recipe="chat")
    if finished:
        preprocess_dataset(open_source(str(source), recipe="chat"), out, config)
        before = tree_bytes(out)
        command(source, out)
        assert tree_bytes(out) == before
        command(source, out, "--overwrite")
        assert shards(out) == [8, 8, 4]
        assert json.loads((out / MANIFEST_NAME).read_bytes())["config"]["options"]["rows_per_shard"] is None
        return

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        preprocess_dataset(open_source(str(source), recipe="chat"), out, config, watcher=Watcher(started=stop))
    command(source, out)
    assert shards(out) == [20]
