"""A row that ends the process that processes it is named, and rejected if the user says so."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import tree_bytes
from tests.preprocess.command_line import SMALL_IMAGES, Ended, run
from tests.preprocess.run.runs import config
from vlmdata.errors import ResourceError
from vlmdata.preprocess.engines.local import Local
from vlmdata.preprocess.run.dataset import preprocess_dataset
from vlmdata.preprocess.sources.open import open_source
from vlmdata.verify.dataset import verify_dataset

RECIPE = """
import os
import signal

from vlmdata.preprocess.recipes.cord_v2 import CordV2


class Deadly(CordV2):
    def __call__(self, row):
        if row.number in (8, 10):
            os.kill(os.getpid(), signal.{signal})
        return super().__call__(row)
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "deadly.py").write_text(RECIPE.format(signal="SIGKILL"))
    return f"{tmp_path / 'deadly.py'}:Deadly"


def options(recipe: str, *more: Any) -> tuple[Any, ...]:
    return (*SMALL_IMAGES, "--recipe", recipe, "--rows-per-shard", 6, "--limit", 18, "--max-reject-rate", 0.5, *more)


def test_a_run_that_it_ends_names_shard_row_and_signal(
    cord_parquet: Path, tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlmdata.preprocess.engines.local.MAX_DEATHS", 2)
    with pytest.raises(ResourceError) as caught:
        preprocess_dataset(
            open_source(str(cord_parquet), limit=18), tmp_path / "out", config(recipe=recipe), workers=2, engine=Local()
        )
    message = str(caught.value)
    assert "2 worker processes died in a row on shard 1 (rows 6 to 11), the last one by SIGKILL, as when" in message
    assert ", at row 8. Finished shards are kept;" in message
    assert message.endswith("If row 8 itself is the cause, --reject-after-deaths 2 rejects such a row.")


def test_it_is_rejected_after_so_many_deaths_and_a_repair_rejects_it_again(
    vlmdata: Callable[..., Ended], cord_parquet: Path, tmp_path: Path, recipe: str
) -> None:
    out = tmp_path / "out"
    command = ("preprocess", cord_parquet, "--out", out, *options(recipe))
    ended = vlmdata(*command, "-j", 1, "--reject-after-deaths", 1)
    assert ended.code == 0, ended.stderr
    rejected = [json.loads(line) for line in (out / "rejected.jsonl").read_text().splitlines()]
    assert [(each["row"], each["reason"]) for each in rejected] == [(8, "worker_died"), (10, "worker_died")]
    assert verify_dataset(out).faults == []
    before = tree_bytes(out)
    (out / "shard-000001.tar").unlink()
    again = vlmdata(*command, "-j", 1)
    assert again.code == 0, again.stderr
    assert tree_bytes(out) == before


def test_a_process_of_its_own_says_where_it_ended(cord_parquet: Path, tmp_path: Path, recipe: str) -> None:
    ended = run("preprocess", cord_parquet, "--out", tmp_path / "out", *options(recipe, "-j", 1))
    assert ended.returncode == -signal.SIGKILL
    assert (
        "the process ended without a word (killed, out of memory, or a crash in a library) at row 8 of" in ended.stderr
    )
    assert "If it ends there again, --reject-after-deaths 2 rejects such a row." in ended.stderr
    assert (tmp_path / "out" / "shard-000000.tar").exists()


def test_a_process_that_ends_well_says_nothing(
    cord_parquet: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = open_source(str(cord_parquet), limit=6)
    preprocess_dataset(source, tmp_path / "out", config(), engine=Local(watch=True))
    assert not capfd.readouterr().err


def test_engines_without_it_refuse_the_option(
    vlmdata: Callable[..., Ended], cord_parquet: Path, tmp_path: Path
) -> None:
    command = ("preprocess", cord_parquet, *SMALL_IMAGES, "--out", tmp_path / "out", "--reject-after-deaths")
    ended = vlmdata(*command, 2, "--engine", "tests.preprocess.engines.test_engines:Remote")
    assert (
        "--engine-option reject_after_deaths=2: engine tests.preprocess.engines.test_engines:Remote has" in ended.said
    )
    assert "(--engine local has it)" in ended.said
    assert "reject_after_deaths is 0; it must be at least 1" in vlmdata(*command, 0).said
