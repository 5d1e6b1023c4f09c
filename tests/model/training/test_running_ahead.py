"""A step is launched before the one before it is finished, unless something is due between them.

Runs do so on GPUs. Here they do it on the CPU, where it makes no difference to the device, and must make none at all.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

import vlmdata.model.training.loop
from tests.model.training.conftest import evaluations_of, steps_of
from vlmdata.model.parallel.waiting import DeviceMoment, DeviceValues
from vlmdata.model.training.loop import runs_ahead
from vlmdata.model.training.processes.failure import NotFiniteError
from vlmdata.model.training.step import LaunchedStep, Stepper, StepResult

pytestmark = pytest.mark.slow

EXACT = ("step", "loss", "grad_norm", "lr", "targets", "tokens", "samples", "epoch")


def exact(out: Path) -> list[dict[str, Any]]:
    return [{name: line[name] for name in EXACT} for line in steps_of(out)]


def checkpoints(out: Path) -> list[str]:
    return sorted(each.name for each in (out / "checkpoints").glob("step-*"))


@pytest.fixture(autouse=True)
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vlmdata.model.training.loop, "runs_ahead", lambda device, vision: True)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the trainer does, in order: +1 where it launches the first step, -1 where it finishes it."""
    found: list[str] = []
    launch, finish = Stepper.launch, Stepper.finish
    numbers: dict[int, int] = {}

    def launched(stepper: Stepper, batches: Iterator[Any]) -> LaunchedStep:
        work = launch(stepper, batches)
        numbers[id(work)] = 1 + len(numbers)
        found.append(f"+{numbers[id(work)]}")
        kept.append(work)
        return work

    def finished(stepper: Stepper, work: LaunchedStep) -> StepResult:
        found.append(f"-{numbers[id(work)]}")
        return finish(stepper, work)

    kept: list[LaunchedStep] = []  # so that numbers of objects are not used again
    monkeypatch.setattr(Stepper, "launch", launched)
    monkeypatch.setattr(Stepper, "finish", finished)
    return found


def test_on_gpus_only() -> None:
    assert runs_ahead(torch.device("cuda", 0), None)
    assert not runs_ahead(torch.device("cpu"), None)
    assert not runs_ahead(torch.device("cuda", 0), object())  # type: ignore[arg-type]


def test_results_are_those_of_a_run_that_waits(
    run: Callable[..., Any], whole: Path, tmp_path: Path, events: list[str]
) -> None:
    assert run().steps == 6
    assert exact(tmp_path / "run") == exact(whole)
    assert " ".join(events) == "+1 -1 +2 +3 -2 +4 -3 +5 -4 +6 -5 -6"


def test_nothing_is_launched_before_a_checkpoint_or_an_evaluation(
    run: Callable[..., Any], validation: Path, tmp_path: Path, events: list[str]
) -> None:
    validated = {"data__eval_paths": [str(validation)], "run__eval_every": 5, "data__global_batch": 1}
    run(run__steps=6, run__save_every=3, **validated)
    assert " ".join(events) == "+1 -1 +2 +3 -2 -3 +4 +5 -4 -5 +6 -6"
    assert checkpoints(tmp_path / "run") == ["step-00000003", "step-00000006"]
    assert [each["step"] for each in evaluations_of(tmp_path / "run")] == [0, 5, 6]


def test_waiting_for_data_counts_only_where_the_device_waits_too(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceMoment, "has_come", lambda moment: False)
    run(run__steps=3, data__global_batch=1)
    assert [line["data_wait"] > 0 for line in steps_of(tmp_path / "run")] == [True, False, False]


def test_values_tell_when_they_are_ready() -> None:
    begun = DeviceMoment(torch.device("cpu"))
    values = DeviceValues(torch.zeros(2), torch.ones(()), torch.zeros(0))
    assert 0 < values.ready.seconds_after(begun) == -begun.seconds_after(values.ready)
    assert values.ready.has_come()
    assert values.get() == [[0.0, 0.0], [1.0], []]


def test_a_signal_lets_the_launched_steps_end(
    run: Callable[..., Any], whole: Path, tmp_path: Path, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = Stepper.finish

    def interrupted(stepper: Stepper, work: LaunchedStep) -> StepResult:
        result = finish(stepper, work)
        if events[-1] == "-2":  # step 3 is launched, and cannot know
            signal.raise_signal(signal.SIGTERM)
        return result

    monkeypatch.setattr(Stepper, "finish", interrupted)
    outcome = run()
    assert (outcome.steps, outcome.interrupted_by) == (5, signal.SIGTERM)
    assert events[-3:] == ["+5", "-4", "-5"]
    assert checkpoints(tmp_path / "run") == ["step-00000005"]
    monkeypatch.undo()
    run(resume=True)
    assert exact(tmp_path / "run") == exact(whole)


def test_a_step_whose_successor_fails_is_logged(
    run: Callable[..., Any], tmp_path: Path, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Stepper.launch

    def failing(stepper: Stepper, batches: Iterator[Any]) -> LaunchedStep:
        if events[-1:] == ["-2"]:
            raise RuntimeError("no data for step 4")
        return launch(stepper, batches)

    monkeypatch.setattr(Stepper, "launch", failing)
    with pytest.raises(RuntimeError, match="no data for step 4"):
        run(data__global_batch=1)
    assert [line["step"] for line in steps_of(tmp_path / "run")] == [1, 2, 3]


def test_a_step_that_is_not_finite_is_the_one_that_is_named(
    run: Callable[..., Any], tmp_path: Path, events: list[str]
) -> None:
    with pytest.raises(NotFiniteError, match=r"^step 2 gave loss nan.*the last good checkpoint is .*step-00000001"):
        run(optimizer__lr=1e30, optimizer__warmup_steps=0, optimizer__clip_grad=0.0, run__save_every=1)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("event") for line in lines] == [None, "not_finite"]


def test_profiled_steps_are_by_themselves(run: Callable[..., Any], tmp_path: Path, events: list[str]) -> None:
    run(run__steps=5, run__profile=[3, 3], data__global_batch=1)
    assert " ".join(events) == "+1 -1 +2 -2 +3 -3 +4 +5 -4 -5"
    assert (tmp_path / "run" / "profile" / "rank-00000.txt").exists()
