"""Whole runs: the loss falls, what is resumed is what was, and a run survives what happens to it."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

import vlmdata.model.training.loop
from tests.model.training.conftest import SETTINGS, steps_of, train_here
from tests.model.training.ranks import Ranks, arguments_of
from vlmdata.errors import ConfigMismatchError
from vlmdata.model.training.processes.failure import NotFiniteError
from vlmdata.model.training.settings.config import ConfigError

pytestmark = pytest.mark.slow

EXACT = ("loss", "grad_norm", "lr", "targets", "tokens", "images", "patches", "samples", "epoch", "mtp_loss")


#: The first step changes the weights by about the learning rate, so the second one overflows.
DIVERGING = {"optimizer__lr": 1e30, "optimizer__min_lr": 0.0, "optimizer__warmup_steps": 0}


def lines_of(out: Path) -> list[dict[str, Any]]:
    """All lines of a log."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def exact(out: Path) -> list[dict[str, Any]]:
    return [{name: line[name] for name in EXACT} for line in steps_of(out)]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The model of a checkpoint."""
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load_plain_tensors(str(folder))
    return {name: tensor for name, tensor in loaded.items() if name.startswith(("vision.", "language."))}


def scalars_of(out: Path, name: str) -> dict[int, float]:
    """The values of a scalar in TensorBoard's files, by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    return {each.step: each.value for each in events.Scalars(name)}


def last(out: Path) -> Path:
    return sorted((out / "checkpoints").glob("step-*"))[-1]


class TestARun:
    def test_the_loss_falls_and_everything_is_written(self, run: Any, tmp_path: Path) -> None:
        outcome = run(run__tensorboard=True)
        assert (outcome.steps, outcome.interrupted_by) == (6, None)
        lines = steps_of(tmp_path / "run")
        assert [line["step"] for line in lines] == list(range(1, 7))
        assert lines[-1]["loss"] < lines[0]["loss"] - 1.0
        assert outcome.loss == lines[-1]["loss"]
        assert all(0 < line["fill"] <= 1 and line["tokens_per_second"] > 0 for line in lines)
        folder = last(tmp_path / "run")
        assert folder.name == "step-00000006"
        state = json.loads((folder / "run.json").read_text())
        assert state["step"] == 6
        assert tomllib.loads((folder / "config.toml").read_text())["run"]["steps"] == 6
        assert scalars_of(tmp_path / "run", "train/loss") == pytest.approx(
            {each["step"]: each["loss"] for each in lines}
        )
        lrs = scalars_of(tmp_path / "run", "train/lr")
        assert lrs == pytest.approx({each["step"]: each["lr"] for each in lines}, rel=1e-6)

    def test_equal_runs_are_equal_to_the_last_bit(self, run: Any, whole: Path, tmp_path: Path) -> None:
        run("again")
        assert exact(tmp_path / "again") == exact(whole)
        one, two = weights_of(last(tmp_path / "again")), weights_of(last(whole))
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)

    def test_only_the_newest_checkpoints_are_kept(self, run: Any, tmp_path: Path) -> None:
        run(run__steps=4, run__save_every=1, run__keep=2, data__global_batch=1)
        names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
        assert names == ["step-00000003", "step-00000004"]

    @pytest.mark.parametrize("part", ["vision", "merger", "language"])
    def test_frozen_parts_stay_as_they_are(self, run: Any, tmp_path: Path, part: str) -> None:
        run(run__steps=2, run__save_every=1, run__keep=0, model__freeze=[part], data__global_batch=1)
        from vlmdata.model.training.optimizer.learner import part_of

        first, end = (weights_of(tmp_path / "run/checkpoints" / f"step-0000000{n}") for n in (1, 2))
        changed = {part_of(name) for name in first if not torch.equal(first[name], end[name])}
        assert changed == {"vision", "merger", "language"} - {part}


class TestResuming:
    def test_is_exact(self, run: Any, whole: Path, tmp_path: Path) -> None:
        run("parts", run__steps=2)
        run("parts", resume=True, run__steps=3)
        run("parts", resume=True)
        self.same(tmp_path / "parts", whole)

    def test_is_exact_with_experts(self, run: Any, tmp_path: Path) -> None:
        run("whole", model__preset="tiny-moe", run__steps=3)
        run("parts", model__preset="tiny-moe", run__steps=2)
        run("parts", resume=True, model__preset="tiny-moe", run__steps=3)
        self.same(tmp_path / "parts", tmp_path / "whole")

    def same(self, one: Path, other: Path) -> None:
        assert exact(one) == exact(other)
        these, those = weights_of(last(one)), weights_of(last(other))
        assert these.keys() == those.keys()
        assert all(torch.equal(these[name], those[name]) for name in these)

    def test_what_changed_is_reported(self, run: Any, capsys: pytest.CaptureFixture[str]) -> None:
        run(run__steps=1)
        run(resume=True, run__steps=2, optimizer__weight_decay=0.0)
        said = capsys.readouterr().out
        assert "optimizer.weight_decay: 0.1 -> 0.0" in said
        assert "run.steps: 1 -> 2" in said
        assert "; 1 process: dp 1 x tp 1" in said

    def test_other_packs_are_refused(self, run: Any) -> None:
        run(run__steps=1)
        with pytest.raises(ConfigMismatchError, match="capacity: 448 -> 480"):
            run(resume=True, data__capacity=480)

    def test_another_model_is_refused(self, run: Any) -> None:
        run(run__steps=1)
        with pytest.raises(ConfigError, match="contains another model"):
            run(resume=True, model__preset="tiny-moe")

    def test_an_old_run_is_not_overwritten(self, run: Any) -> None:
        run(run__steps=1)
        with pytest.raises(
            ConfigError, match=r"contains the checkpoint step-00000001 of an earlier run: continue with --resume"
        ):
            run(run__steps=2)

    def test_the_logs_of_a_run_that_died_before_its_first_checkpoint_are_kept_aside(
        self, run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "run"
        for number in (1, 2):
            with pytest.raises(NotFiniteError):
                run(run__tensorboard=True, **DIVERGING)
            events = [line.get("event") for line in lines_of(out)]
            assert events == [None, "not_finite"], "of this run alone"
            assert capsys.readouterr().out.count("had logs of an earlier run without a checkpoint") == number - 1
        assert len(list((out / "tensorboard").iterdir())) == 1
        run(run__steps=1)
        aside = [out / f"earlier-run-{number}" for number in (1, 2)]
        assert f"{out} had logs of an earlier run without a checkpoint: they are now in {aside[1]}" in (
            capsys.readouterr().out
        )
        assert [line["step"] for line in lines_of(out)] == [1]
        assert not list(out.glob("not-finite-*"))
        for folder in aside:
            assert [line["step"] for line in lines_of(folder)] == [1, 2]
            assert sorted(path.name for path in folder.iterdir()) == [
                "metrics.jsonl", "not-finite-step-00000002.json", "tensorboard",
            ]  # fmt: skip
        run(resume=True, run__steps=2)
        assert [line.get("event", line["step"]) for line in lines_of(out)] == [1, "resumed", 2]

    def test_a_run_that_ended_before_its_first_step_leaves_nothing_to_keep(self, run: Any, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "metrics.jsonl").write_text("")
        run(run__steps=1)
        assert not (tmp_path / "run" / "earlier-run-1").exists()

    def test_nothing_to_resume_is_reported(self, run: Any) -> None:
        with pytest.raises(ConfigError, match="contains no checkpoint to resume from"):
            run(resume=True)


def killed_in_step(number: int, rank: int) -> None:
    """Kills the process when it asks for the first batch of a step, from 1."""
    endless = vlmdata.model.training.loop.endless

    def batches(loader: Any) -> Iterator[Any]:
        for count, batch in enumerate(endless(loader)):
            if count == (number - 1) * SETTINGS["data.global_batch"]:
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    vlmdata.model.training.loop.endless = batches


class TestTheCommand:
    def test_killed_at_a_random_step_it_goes_on_as_if_nothing_had_been(
        self, chats: Path, whole: Path, tmp_path: Path
    ) -> None:
        out, saved = tmp_path / "run", random.Random(5).randint(2, 5)
        prepare = partial(killed_in_step, saved + 1)
        killed = Ranks(arguments_of(chats, out, "--save-every", "1"), tmp_path / "killed", prepare=prepare)
        assert killed.wait() == [-signal.SIGKILL], killed.said(0)
        assert last(out).name == f"step-{saved:08d}"
        resumed = Ranks(arguments_of(chats, out, "--resume"), tmp_path / "resumed")
        assert resumed.wait() == [0], resumed.said(0)
        assert "step 6/6" in resumed.said(0)
        assert exact(out) == exact(whole)

    def test_a_checkpoint_moves_to_another_layout_and_back(self, chats: Path, whole: Path, tmp_path: Path) -> None:
        out = tmp_path / "run"
        train_here(out, chats, run__steps=2)
        layout = ("--tp", "2", "--sp", "--pp", "2")
        spread = Ranks(arguments_of(chats, out, "--resume", *layout, steps=4), tmp_path / "said", 4)
        assert spread.wait() == [0] * 4, spread.said(0)[-3000:]
        assert "dp 1 x tp 2 x cp 1 x pp 2" in spread.said(0)
        train_here(out, chats, resume=True)
        for ours, theirs in zip(steps_of(out), steps_of(whole), strict=True):
            assert ours["samples"] == theirs["samples"] or ours["step"] in (3, 4)
            assert ours["targets"] == theirs["targets"]
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)

    def test_a_tower_that_two_ranks_hold_learns_as_one_does(
        self, one_process: None, chats: Path, tmp_path: Path
    ) -> None:
        """Nothing but the tower is trained, so that the gradient's norm is the tower's, counted once."""
        alone, spread = tmp_path / "alone", tmp_path / "spread"
        tower = {"model__freeze": ("language", "merger"), "data__max_patches": None, "data__capacity": 896}
        train_here(alone, chats, run__steps=1, **tower)
        shutil.copytree(alone, spread)
        train_here(alone, chats, run__steps=3, resume=True, **tower)
        options = ("--freeze", "language,merger", "--set", "data.max_patches=none", "--capacity", "896")
        layout = ("--tp", "2", "--sp", "--set", "parallel.vision_tp=1")
        ranks = Ranks(arguments_of(chats, spread, "--resume", *layout, *options, steps=3), tmp_path / "said", 2)
        assert ranks.wait() == [0, 0], ranks.said(0)[-3000:]
        assert min(line["images"] for line in steps_of(alone)[1:]) > 2, "both ranks have images in every step"
        for ours, theirs in zip(steps_of(spread), steps_of(alone), strict=True):
            assert ours["samples"] == theirs["samples"]
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--preset", "huge"], "unknown preset 'huge'; choose one of tiny"),
            (["--set", "data.capasity=1"], "the nearest is 'data.capacity'"),
            (["--capacity", "32"], "longer than capacity 32"),
            (["--hf", "a", "--preset", "tiny"], "give only one of --preset and --hf"),
            (["--hf", "nowhere/at-all"], "not a local folder with a config.json, and the hub reports"),
            (["--hf", "."], "model.hf '.': the folder has no config.json"),
            (["--ep", "2"], "expert"),
        ],
    )
    def test_what_is_wrong_ends_in_a_line(self, chats: Path, tmp_path: Path, options: list[str], message: str) -> None:
        process = Ranks(arguments_of(chats, tmp_path / "run", *options), tmp_path / "said")
        assert process.wait() == [2]
        assert message in process.said(0)
        assert "Traceback" not in process.said(0)
        assert not (tmp_path / "run" / "checkpoints").exists()

    def test_no_data_ends_in_a_line(self, tmp_path: Path) -> None:
        arguments = [part for part in arguments_of(tmp_path, tmp_path / "run") if part not in ("--data", str(tmp_path))]
        process = Ranks(arguments, tmp_path / "said")
        assert process.wait() == [2]
        assert (
            process.said(0) == "error: no data: give a dataset directory with --data, written by "
            "`vlmdata preprocess`, or --config\n"
        )
