"""The last good checkpoint of a run: the newest one whose evaluation, if there was one, gave a finite loss."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from model.training.checkpoints.folder import step_of


def describe_last_good(checkpoints: Sequence[Path], log: Path, step: int, loss_is_finite: bool) -> str:
    """Says which checkpoint to continue from after a step that was not finite.

    Checkpoints are complete, oldest first. ``log`` is the run's ``metrics.jsonl``, earlier parts included. If the loss
    of the step was finite, its gradient was not.
    """
    if not checkpoints:
        return "there is no checkpoint yet"
    evaluated = _evaluations(log)
    bad = [each for each in checkpoints if _newest_up_to(step_of(each), evaluated) is False]
    good = [each for each in checkpoints if each not in bad]
    doubted = f"the evaluation of {' and '.join(each.name for each in bad)} was not finite" if bad else ""
    if not good:
        return f"there is no good checkpoint: {doubted}"
    last, notes = good[-1], [doubted] if doubted else []
    if step_of(last) == step - 1 and not loss_is_finite and evaluated.get(step - 1) is None:
        notes.append("its own weights gave this loss: if the samples are sound, take an earlier one")
    return f"the last good checkpoint is {last}{f' ({"; ".join(notes)})' if notes else ''}"


def _evaluations(log: Path) -> dict[int, bool]:
    """Returns whether the loss of each evaluation was finite, by step; without those that a resumed run repeats."""
    found: dict[int, bool] = {}
    for line in _lines(log):
        if line.get("event") == "resumed":
            found = {step: finite for step, finite in found.items() if step <= line["step"]}
        elif line.get("event") == "evaluation" and line.get("targets"):  # without targets there is no loss
            found[line["step"]] = line.get("loss") is not None
    return found


def _lines(log: Path) -> Iterable[Mapping[str, Any]]:
    with contextlib.suppress(OSError):
        for text in log.read_text().splitlines():
            with contextlib.suppress(ValueError):  # a disk was full
                yield json.loads(text)


def _newest_up_to(step: int, evaluated: Mapping[int, bool]) -> bool | None:
    """Returns the result of the newest evaluation up to a step; None if there is none."""
    steps = [each for each in evaluated if each <= step]
    return evaluated[max(steps)] if steps else None
