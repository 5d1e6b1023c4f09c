"""``vlmdata inspect --run`` names the samples of a run's steps from what the run itself recorded."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from tests.model.training.conftest import steps_of, train_here
from tests.model.training.ranks import Ranks, arguments_of
from tests.preprocess.command_line import Ended
from vlmdata.packing.config import ALGORITHM_VERSION

pytestmark = pytest.mark.slow


@pytest.fixture
def vlmdata(vlmdata: Callable[..., Ended]) -> Any:
    """Runs the command in this process; gives exit code, stdout, and the words of stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code, said, error = vlmdata(*arguments)
        return code, said, " ".join(error.split())

    return run


def digest_of(step: dict[str, Any], dp_rank: int = 0) -> str:
    """What ``metrics.jsonl`` says of rank 0's samples."""
    packs = [pack for pack in step["packs"] if pack["dp_rank"] == dp_rank]
    keys = sorted(sample["key"] for pack in packs for sample in pack["samples"])
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()[:12]


def test_the_samples_of_a_run_over_several_epochs(
    one_process: None, validation: Path, tmp_path: Path, vlmdata: Any
) -> None:
    out, copy = tmp_path / "run", tmp_path / "copy"
    few = shutil.copytree(validation, copy)
    settings = {"data__global_batch": 2, "data__seed": 3, "data__pad_multiple": 32, "data__max_patches": 96}
    train_here(out, few, run__steps=3, **settings)
    steps = steps_of(out)
    assert steps[-1]["epoch"] > 0, "the run is to pass into a second epoch"
    for logged in steps:
        code, said, _ = vlmdata("inspect", "--run", out, "--step", logged["step"], "--json")
        found = json.loads(said)
        assert code == 0
        assert (found["epoch"], digest_of(found)) == (logged["epoch"], logged["samples"])
    named = vlmdata("inspect", few, "--run", out, "--step", f"{found['epoch']}:{found['step']}", "--json")
    assert json.loads(named[1]) == found
    checkpoint = next((out / "checkpoints").glob("step-*"))
    assert json.loads(vlmdata("inspect", "--run", checkpoint, "--step", 3, "--json")[1]) == found
    assert json.loads(vlmdata("plan", "--run", out, "--json")[1])["config"]["seed"] == 3
    assert json.loads(vlmdata("plan", "--run", out, "--seed", 4, "--json")[1])["config"]["seed"] == 4


def test_the_samples_of_a_layout_with_sequence_parallelism(chats: Path, tmp_path: Path, vlmdata: Any) -> None:
    out = tmp_path / "run"
    layout = ("--tp", "2", "--sp", "--set", "data.pad_multiple=1", "--set", "data.max_patches=none")
    ranks = Ranks(arguments_of(chats, out, *layout, steps=2), tmp_path / "said", 2)
    assert ranks.wait() == [0, 0], ranks.said(0)[-3000:]
    for logged in steps_of(out):
        found = json.loads(vlmdata("inspect", "--run", out, "--step", logged["step"], "--json")[1])
        assert digest_of(found) == logged["samples"]
        assert all(each["aligned_length"] % 2 == 0 for pack in found["packs"] for each in pack["samples"])


def test_what_a_record_cannot_answer(
    one_process: None, chats: Path, validation: Path, tmp_path: Path, vlmdata: Any
) -> None:
    out = tmp_path / "run"
    train_here(out, chats, run__steps=1)
    assert vlmdata("inspect", "--run", out, "--step", "0")[::2] == (2, "error: no step 0: a run's steps count from 1")
    code, _, said = vlmdata("inspect", "--run", tmp_path, "--step", "1")
    assert (code, "has no loader.json, which vlmdata train writes" in said) == (2, True)
    code, _, said = vlmdata("inspect", validation, "--run", out, "--step", "1")
    assert (code, "Its steps had other samples" in said) == (2, True)
    record = json.loads((out / "loader.json").read_text())
    record["plan"]["algorithm"] = 0
    (out / "loader.json").write_text(json.dumps(record))
    code, _, said = vlmdata("inspect", "--run", out, "--step", "1")
    assert (code, f"makes different packs than the run had: algorithm: 0 -> {ALGORITHM_VERSION}" in said) == (2, True)
