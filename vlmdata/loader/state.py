"""The loader's state: the position of the next batch, the data and plan to which it applies, and masked samples."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlmdata.errors import ConfigMismatchError, DatasetFormatError, UsageError
from vlmdata.packing.config import (
    ALGORITHMS,
    HISTORY_SETTING,
    PlanConfig,
    Stage,
    concerns_assignment,
    config_differences,
    first_epoch,
)
from vlmdata.packing.plan.run import settings_at
from vlmdata.wording import counted

STATE_VERSION = 1


@dataclass(frozen=True, order=True)
class Position:
    """Position of the next batch: epoch, optimizer step in the epoch, micro-batch in the step."""

    epoch: int = 0
    step: int = 0
    micro_batch: int = 0


#: A sample: the number of its dataset, and its number in it.
type SampleId = tuple[int, int]


@dataclass(frozen=True)
class DamagedSample:
    """A sample that was masked: numbers of its dataset and in it, its shard, its row of the source, and its key."""

    dataset: int
    index: int
    file: str
    row: int
    key: str

    @property
    def id(self) -> SampleId:
        """Returns what identifies the sample in a loader's state."""
        return self.dataset, self.index

    def __str__(self) -> str:
        return f"{self.file}: row {self.row} key {self.key}"


@dataclass(frozen=True)
class LoaderStats:
    """Counts of a loader since its creation.

    Attributes:
        batches: Batches returned.
        tokens: True tokens in these batches (of whole packs).
        bytes_read: Bytes read from shards, or received from a service, for these batches.
        wait_seconds: Time the consumer waited for batches.
        damaged: Samples that are masked because their bytes changed (``on_damage="mask"``), those of a loaded state
            included.
    """

    batches: int = 0
    tokens: int = 0
    bytes_read: int = 0
    wait_seconds: float = 0.0
    damaged: tuple[DamagedSample, ...] = ()


def require_few(damaged: Sequence[DamagedSample], most: int) -> None:
    """Raises a DatasetFormatError that names all masked samples, if there are more than ``most``."""
    if len(damaged) > most:
        listed = "\n".join(f"  {each}" for each in damaged)
        raise DatasetFormatError(
            f"{counted(len(damaged), 'sample')} of this run are damaged, more than max_damaged {most}:\n{listed}\n"
            "Run `vlmdata verify` on the dataset; it names the remedy. Or raise max_damaged."
        )


def saved_state(
    position: Position,
    dp_size: int,
    datasets: Sequence[tuple[str, str]],
    plan: PlanConfig,
    damaged: Sequence[DamagedSample],
    known: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Returns the state as JSON values, of a size that does not depend on the data.

    ``datasets`` are name and manifest's fingerprint of each, in order. ``dp_size`` matters only within a step.
    ``known`` are an epoch and the optimizer steps before it, for a plan with a schedule.
    """
    return {
        "version": STATE_VERSION,
        **dataclasses.asdict(position),
        "dp_size": dp_size,
        "datasets": [{"name": name, "fingerprint": fingerprint} for name, fingerprint in datasets],
        "plan": plan.to_dict(),
        "damaged": [list(sample.id) for sample in damaged],
        **({} if known is None else {"known_steps": list(known)}),
    }


@dataclass(frozen=True)
class Restored:
    """What a loader continues with.

    Attributes:
        position: Position of the next batch.
        earlier: What the run did with other settings before.
        known: An epoch and the optimizer steps before it, if the state has them.
        damaged: Samples that are masked.
    """

    position: Position
    earlier: tuple[Stage, ...]
    known: tuple[int, int] | None
    damaged: tuple[SampleId, ...]


def restore(
    state: Mapping[str, Any],
    dp_size: int,
    datasets: tuple[tuple[str, str], ...],
    plan: PlanConfig,
    change: bool = False,
) -> Restored:
    """Returns what the result of :func:`saved_state` says, for a loader with these datasets and this plan.

    With ``change``, data and plan may be others than before: the run changes between two steps. It begins a new epoch
    then, unless one had just ended.

    Raises:
        UsageError: If it is no saved state.
        ConfigMismatchError: Listing every difference, or what makes a change impossible.
    """
    found, values = _read(state), dict(state.get("plan", {}))
    values.pop(HISTORY_SETTING, None)
    differences = config_differences(values, replace(plan, earlier=()))
    position = found.position
    # Between steps it does not matter which rank ran which pack. Within a step it determines the remaining packs.
    changed = [line for line in differences if position.micro_batch or not concerns_assignment(line)]
    saved = [(str(each["name"]), str(each["fingerprint"])) for each in state["datasets"]]
    if len(saved) != len(datasets):
        changed.append(f"datasets: {len(saved)} -> {len(datasets)}")
    for i, ((old_name, old), (name, new)) in enumerate(zip(saved, datasets, strict=False)):
        # Names are paths and may change; the contents must not.
        if old != new:
            changed.append(f"dataset {i} ({old_name}): content {old[:16]} -> {new[:16]} ({name})")
    if change and changed and not any(line.startswith(ALGORITHMS) for line in changed):
        return _changed(found, PlanConfig.from_dict(values), saved, datasets)
    if position.micro_batch and int(state["dp_size"]) != dp_size:
        changed.append(
            f"dp_size: {state['dp_size']} -> {dp_size}, within step {position.step} (at micro-batch "
            f"{position.micro_batch}); it may change only between steps"
        )
    if changed:
        raise _of_another_run(changed)
    return found


def state_in(place: str) -> dict[str, Any]:
    """Reads a state from a JSON file, or from the ``run.json`` of a checkpoint of vlmdata train.

    Raises:
        UsageError: If it cannot be read.
    """
    path = Path(place)
    path = path / "run.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text())
        found: dict[str, Any] = values.get("loader", values)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, AttributeError) as error:
        raise UsageError(f"{path}: is no state of a loader: {error}") from error
    return found


def _read(state: Mapping[str, Any]) -> Restored:
    """Returns what a state says; an error if it is none."""
    if not isinstance(state, Mapping):
        raise UsageError(f"the loader state is {state!r:.80}; it must be what state_dict() returned, a dictionary")
    if state.get("version") != STATE_VERSION:
        raise ConfigMismatchError(
            f"the loader state has version {state.get('version')}, but this vlmdata reads {STATE_VERSION}"
        )
    for name in ("epoch", "step", "micro_batch", "dp_size", "plan", "datasets"):
        if name not in state:
            raise UsageError(f"the loader state has no {name!r}; it must be what state_dict() returned")
    position = Position(int(state["epoch"]), int(state["step"]), int(state["micro_batch"]))
    if min(position.epoch, position.step, position.micro_batch) < 0:
        raise UsageError(f"the loader state is at {position}; all three count from 0")
    earlier = tuple(Stage.from_dict(each) for each in state["plan"].get(HISTORY_SETTING, ()))
    known = state.get("known_steps")
    damaged = tuple((int(dataset), int(index)) for dataset, index in state.get("damaged", ()))
    return Restored(position, earlier, None if known is None else (int(known[0]), int(known[1])), damaged)


def _changed(
    old: Restored,
    plan: PlanConfig,
    saved: Sequence[tuple[str, str]],
    datasets: Sequence[tuple[str, str]],
) -> Restored:
    """Returns what a run continues with that had these settings and datasets until now, and has others from here on.

    Raises:
        ConfigMismatchError: If it is within a step, or if a dataset is missing whose samples were used.
    """
    position, known = old.position, old.known
    if position.micro_batch:
        raise ConfigMismatchError(
            f"the loader state is within step {position.step}, at micro-batch {position.micro_batch}: data and plan "
            "may change only between steps. Continue without changes to the end of the step"
        )
    if position.epoch < first_epoch(old.earlier) or (known is not None and known[0] != position.epoch):
        raise ConfigMismatchError(
            f"the loader state is at {position}, before the run's latest change: it cannot change there again"
        )
    numbers = _numbers_among(saved, datasets)
    stages = [replace(each, datasets=tuple(numbers[i] for i in each.datasets)) for each in old.earlier]
    if (position.epoch, position.step) > (first_epoch(old.earlier), 0):
        settings = settings_at(plan, known[1] if known is not None else 0)
        stages.append(Stage(settings, tuple(numbers), position.epoch, position.step))
    return Restored(
        position=Position(first_epoch(stages)),
        earlier=tuple(stages),
        known=None if known is None else (first_epoch(stages), known[1] + position.step),
        damaged=tuple((numbers[dataset], index) for dataset, index in old.damaged),
    )


def _numbers_among(saved: Sequence[tuple[str, str]], datasets: Sequence[tuple[str, str]]) -> list[int]:
    """Returns the number among the present datasets of each one that a state names, by their contents."""
    numbers: list[int] = []
    for name, fingerprint in saved:
        number = next((i for i, (_, new) in enumerate(datasets) if new == fingerprint and i not in numbers), None)
        if number is None:
            raise ConfigMismatchError(
                f"{name}: the run used this dataset (content {fingerprint[:16]}), which is not given any more. Give "
                "it with weight 0: its index tells what was used, and its shards are not read"
            )
        numbers.append(number)
    return numbers


def _of_another_run(changed: Sequence[str]) -> ConfigMismatchError:
    listed = "\n".join(f"  {line}" for line in changed)
    remedy = "Restore these, or start a new run."
    if not any(line.startswith((*ALGORITHMS, "dp_size:")) for line in changed):
        remedy = (
            "Restore these, or start a new run. Or let this run change from here on: load_state_dict(state, "
            "change=True), data.change=true."
        )
    if any(line.startswith("alignment: ") for line in changed):
        remedy += (
            " Samples are padded to multiples of the alignment. It follows from tensor parallelism with sequence "
            "parallelism, from context parallelism and from pad_multiple. If these sizes may change, begin a run "
            "with a pad_multiple for all of them, such as 16."
        )
    if any(line.startswith(ALGORITHMS) for line in changed):
        remedy += " An algorithm comes with the version of vlmdata: to resume, install the one that began the run."
    return ConfigMismatchError(f"the loader state is of another run:\n{listed}\n{remedy}")
