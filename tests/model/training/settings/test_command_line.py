"""What the command line passes on: the options that were given, and nothing for those that were not; and refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.model.training.conftest import ROOT, environment
from vlmdata import train


@pytest.fixture
def passed_on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command; gives file, overrides and resume as it would train with them."""
    seen: list[Any] = []

    def run(*arguments: str) -> Any:
        monkeypatch.setattr(train, "_run", lambda *what: seen.append(what) or 0)
        done = CliRunner().invoke(train.app, list(arguments))
        assert done.exit_code == 0, done.output
        return seen.pop()

    return run


def test_a_file_keeps_what_is_not_named(passed_on: Any) -> None:
    """As in the line that an interrupted run prints: with data from the file."""
    assert passed_on("--config", "a.toml", "--resume") == (Path("a.toml"), [], True)


def test_what_is_named_wins(passed_on: Any) -> None:
    _, overrides, resume = passed_on(
        "--data", "a", "--data", "b", "--freeze", "vision,merger", "--steps", "3", "--no-sp"
    )
    assert not resume
    found = {name: list(value) if isinstance(value, list | tuple) else value for name, value in overrides}
    assert found == {
        "data.paths": ["a", "b"],
        "model.freeze": ["vision", "merger"],
        "run.steps": 3,
        "parallel.sp": False,
    }


def test_all_parts_of_a_repeated_option_are_frozen(passed_on: Any) -> None:
    given = ("--freeze", "vision", "--freeze", "merger,language")
    assert passed_on(*given)[1] == [("model.freeze", ["vision", "merger", "language"])]


def test_parts_can_be_thawed(passed_on: Any) -> None:
    assert passed_on("--freeze", "")[1] == [("model.freeze", [])]


class TestWhatIsWrongIsToldAtOnce:
    def refused(self, *options: str, folder: str = "", **variables: str) -> tuple[str, set[str]]:
        """What train.py says, and which packages it has imported by then; those in a folder go first."""
        path = os.pathsep.join(each for each in (folder, str(ROOT), *sys.path) if each)
        process = subprocess.run(
            [sys.executable, "-X", "importtime", str(ROOT / "train.py"), *options],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env=environment() | {"PYTHONPATH": path} | variables,
        )
        assert process.returncode == 2
        lines = process.stderr.splitlines()
        imported = {
            line.rpartition("|")[2].strip().partition(".")[0] for line in lines if line.startswith("import time:")
        }
        assert "typer" in imported
        return "\n".join(line for line in lines if not line.startswith("import time:")), imported

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--set", "data.capasity=3"), "the nearest is 'data.capacity'"),
            (("--data", "nowhere"), "nowhere: no such directory"),
            (("--data", "a", "--preset", "huge"), "unknown preset 'huge'"),
            ((), "no data: give a dataset directory"),
            (
                ("--data", "a", "--steps", "5", "--set", "optimizer.warmup_steps=5"),
                "optimizer.warmup_steps 5 leaves none of the 5 steps for decay; set it below 5",
            ),
            (("--data", "a", "--tp", "2"), "world size 1 is not a multiple of tensor 2 x context 1 x pipeline 1 = 2"),
            (("--data", "a", "--sp"), "parallel.sp splits tokens over tensor-parallel ranks: it needs parallel.tp > 1"),
            (
                ("--data", "a", "--set", "model.backend=torch", "--set", "run.fp8=true"),
                "run.fp8 needs model.backend 'transformer_engine', got 'torch'",
            ),
            (
                ("--data", "a", "--set", "run.precision=fp32", "--set", "model.vision_attention=flash_attention_4"),
                "model.vision_attention 'flash_attention_4' computes in bfloat16, got fp32; choose 'auto'",
            ),
        ],
    )
    def test_before_torch_is_imported(self, options: tuple[str, ...], message: str) -> None:
        said, imported = self.refused(*options)
        assert said.startswith("error: ")
        assert message in said
        assert not imported & {"torch", "megatron", "transformers"}

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--tp", "8"), "parallel.tp 8 does not divide vision.num_heads 4"),
            (("--pp", "8"), "parallel.pp 8 does not divide the 2 layers into equal stages"),
            (("--cp", "3"), "world size 8 is not a multiple of tensor 1 x context 3 x pipeline 1 = 3"),
            (("--global-batch", "12"), "data.global_batch 12 is not a multiple of the 8 data-parallel ranks"),
        ],
    )
    def test_a_layout_that_does_not_fit_before_torch_is_imported(self, options: tuple[str, ...], message: str) -> None:
        said, imported = self.refused("--data", "a", *options, RANK="0", LOCAL_RANK="0", WORLD_SIZE="8")
        assert message in said
        assert not imported & {"torch", "megatron", "transformers"}

    @pytest.mark.parametrize(("rank", "says"), [("0", True), ("1", False)])
    @pytest.mark.parametrize("launcher", ["torchrun", "srun"])
    def test_by_one_process_of_a_node(self, rank: str, says: bool, launcher: str) -> None:
        names = {
            "torchrun": {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"},
            "srun": {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"},
        }
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        said, _ = self.refused("--set", "data.capasity=3", **names[launcher], **meeting)
        assert bool(said) == says

    def test_that_megatron_core_is_not_installed(self, tmp_path: Path, chats: Path) -> None:
        (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['megatron'] = None\n")
        said, _ = self.refused("--data", str(chats), folder=str(tmp_path))
        assert said.startswith("error: this needs megatron-core, which is not installed: pip install 'vlmdata[train]'")
        assert "\n" not in said
