"""Reports a step with an infinite or NaN loss or gradient, and the last good checkpoint.

That is the newest one whose evaluation, if there was one, gave a finite loss.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from vlmdata.errors import ResourceError
from vlmdata.model.training.checkpoints.checkpoint import Checkpoints
from vlmdata.model.training.checkpoints.folder import step_of
from vlmdata.model.training.data import RankPlace
from vlmdata.model.training.processes.agreement import decided
from vlmdata.model.training.processes.failure import NotFiniteError
from vlmdata.model.training.reports.logs import RunLog
from vlmdata.model.training.settings.config import TrainConfig
from vlmdata.model.training.step import MicroBatch, StepResult, digest
from vlmdata.wording import counted

#: Number of samples in the message; the file lists all.
_NAMED = 4


def not_finite_error(
    step: int, result: StepResult, config: TrainConfig, place: RankPlace, checkpoints: Checkpoints, log: RunLog
) -> NotFiniteError:
    """Returns the error for such a step, the same on all ranks. All ranks must call it.

    Writes the samples of each data-parallel rank to ``OUT/not-finite-step-00000012.json`` and an event to
    ``metrics.jsonl``. No checkpoint may be in progress.
    """
    everyone: list[Any] = [None] * place.world
    dist.all_gather_object(everyone, (place.dp_rank, result.batches))
    packs, first = _packs(everyone), digest(everyone[0][1])
    values = {"loss": result.loss, **result.extra_losses, "grad_norm": result.grad_norm}
    file = Path(config.run.out) / f"not-finite-step-{step:08d}.json"
    shown = {name: str(value) for name, value in values.items()}
    unlisted = decided(partial(_list, file, {"step": step, "values": shown, "packs": packs}))
    with contextlib.suppress(ResourceError):  # the error of the step matters more than a full disk
        log.event("not_finite", step, {**values, "samples": first})
    named = ", ".join(f"{name} {values[name]}" for name in result.not_finite)
    lines = Path(config.run.out) / "metrics.jsonl"
    loss_is_finite = set(result.not_finite) == {"grad_norm"}
    kept = decided(partial(describe_last_good, checkpoints.all(), lines, step, loss_is_finite))
    listed = f"are listed in {file}" if unlisted is None else f"could not be listed in {file}: {unlisted}"
    return NotFiniteError(
        f"step {step} gave {named}; it was not saved, and {kept}. {_where(packs)} All samples of the step (digest "
        f"{first} on rank 0) {listed}. Look at them with `vlmdata inspect "
        f"{config.data.paths[0]} --sample KEY`; try a lower optimizer.lr or optimizer.clip_grad, a longer "
        "optimizer.warmup_steps, or run.precision=fp32."
    )


def _list(file: Path, what: dict[str, Any]) -> str | None:
    """Writes the file. Returns the reason if that fails."""
    try:
        file.write_text(json.dumps(what, indent=1) + "\n")
    except OSError as error:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
        return error.strerror or str(error)
    return None


def _packs(everyone: list[tuple[int, tuple[MicroBatch, ...]]]) -> list[dict[str, Any]]:
    """Merges the ranks' reports: for each pack of the step, whether its loss is finite on all ranks."""
    packs: dict[tuple[int, int], dict[str, Any]] = {}
    for dp_rank, batches in everyone:
        if dp_rank < 0:  # a rank of a separate tower: it has no losses
            continue
        for number, batch in enumerate(batches):
            name = {"data_parallel_rank": dp_rank, "micro_batch": number}
            pack = packs.setdefault((dp_rank, number), name | vars(batch) | {"finite": True})
            pack["finite"] = pack["finite"] and batch.finite is not False
    return [packs[key] for key in sorted(packs)]


def _where(packs: list[dict[str, Any]]) -> str:
    guilty = [pack for pack in packs if not pack["finite"]]
    if not guilty:
        return "The loss of each pack is finite, so the gradient overflowed."
    first = guilty[0]
    keys = first["sample_keys"]
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    others = f" (and {counted(len(guilty) - 1, 'other pack')})" if len(guilty) > 1 else ""
    return (
        f"The loss is not finite in micro-batch {first['micro_batch']} of data-parallel rank "
        f"{first['data_parallel_rank']}: samples {', '.join(keys[:_NAMED])}{more}{others}."
    )


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
