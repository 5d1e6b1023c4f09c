"""The checkpoint from which to continue after a step that was not finite."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from vlmdata.model.training.evaluation import Evaluation, Evaluator
from vlmdata.model.training.processes.failure import NotFiniteError
from vlmdata.model.training.reports.not_finite import describe_last_good

CHECKPOINTS = [Path(f"run/checkpoints/step-{step:08d}") for step in (4, 8, 12)]


@pytest.fixture
def log(tmp_path: Path) -> Callable[..., Path]:
    """A log of evaluations: step and loss, or the step from which the run was resumed."""

    def write(*events: tuple[int, float | None] | int) -> Path:
        lines: list[dict[str, Any]] = [{"step": 1, "loss": 2.0}]
        for event in events:
            if isinstance(event, int):
                lines.append({"event": "resumed", "step": event})
            else:
                lines.append({"event": "evaluation", "step": event[0], "loss": event[1], "targets": 9})
        file = tmp_path / "metrics.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return file

    return write


@pytest.mark.parametrize(
    ("events", "good", "doubted"),
    [
        ([], 12, None),
        ([(4, 1.0), (8, 1.0), (12, 1.0)], 12, None),
        ([(4, 1.0), (8, 1.0), (12, None)], 8, "step-00000012"),
        ([(4, 1.0), (8, None), (12, None)], 4, "step-00000008 and step-00000012"),
        # Between checkpoints, and before a checkpoint without an evaluation of its own.
        ([(6, None)], 4, "step-00000008 and step-00000012"),
        # A later one that was finite.
        ([(8, None), (12, 1.0)], 12, "step-00000008"),
        # Of steps that a resumed run makes again.
        ([(4, 1.0), (8, None), 4, (8, 1.0)], 12, None),
        ([(4, 1.0), (8, None), 4], 12, None),
        # Known before it was resumed.
        ([(4, 1.0), (12, None), 12], 8, "step-00000012"),
    ],
)
def test_is_none_whose_evaluation_was_not_finite(
    log: Callable[..., Path], events: list[Any], good: int, doubted: str | None
) -> None:
    why = f" (the evaluation of {doubted} was not finite)" if doubted else ""
    said = describe_last_good(CHECKPOINTS, log(*events), 14, loss_is_finite=False)
    assert said == f"the last good checkpoint is run/checkpoints/step-{good:08d}{why}"


def test_may_not_exist(log: Callable[..., Path], tmp_path: Path) -> None:
    assert describe_last_good([], log(), 3, loss_is_finite=False) == "there is no checkpoint yet"
    assert describe_last_good(CHECKPOINTS[:1], log((4, None)), 5, loss_is_finite=False) == (
        "there is no good checkpoint: the evaluation of step-00000004 was not finite"
    )
    assert describe_last_good(CHECKPOINTS, tmp_path / "gone", 14, loss_is_finite=True).endswith("step-00000012")


def test_an_evaluation_without_targets_tells_nothing(tmp_path: Path) -> None:
    event = {"event": "evaluation", "step": 12, "loss": None, "targets": 0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(event) + '\n{"half')
    said = describe_last_good(CHECKPOINTS, tmp_path / "metrics.jsonl", 14, loss_is_finite=True)
    assert said == "the last good checkpoint is run/checkpoints/step-00000012"


def test_whose_own_weights_gave_the_loss_is_doubted(log: Callable[..., Path]) -> None:
    doubt = "its own weights gave this loss"
    assert doubt in describe_last_good(CHECKPOINTS, log((8, 1.0)), 13, loss_is_finite=False)
    assert doubt not in describe_last_good(CHECKPOINTS, log((12, 1.0)), 13, loss_is_finite=False)
    assert doubt not in describe_last_good(CHECKPOINTS, log(), 13, loss_is_finite=True)
    assert doubt not in describe_last_good(CHECKPOINTS, log(), 14, loss_is_finite=False)


@pytest.mark.slow
def test_a_run_says_so_also_right_after_it_was_resumed(
    run: Callable[..., Any], validation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate(self: Evaluator, step: int) -> Evaluation:
        return Evaluation(step, 1.0 if step < 2 else math.nan, {"validation": 0.0}, None, 1, 1, 0.0)

    monkeypatch.setattr(Evaluator, "__call__", evaluate)
    options = {"data__eval_paths": [str(validation)], "run__eval_every": 1, "data__global_batch": 1}
    run(run__steps=2, run__save_every=1, **options)
    # From here on, every gradient overflows.
    with pytest.raises(NotFiniteError, match=r"the last good checkpoint is .*/step-00000001 \(the evaluation of step-"):
        run(resume=True, run__steps=3, model__mtp_loss_scale=1e25, **options)
