"""The loader's state: the position of the next batch, the data and plan to which it applies, and masked samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlmdata.errors import ConfigMismatchError, DatasetFormatError, UsageError
from vlmdata.packing.config import ALGORITHMS, PlanConfig, concerns_assignment, config_differences
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
) -> dict[str, Any]:
    """Returns the state as JSON values, of a size that does not depend on the data.

    ``datasets`` are name and manifest's fingerprint of each, in order. ``dp_size`` matters only within a step.
    """
    return {
        "version": STATE_VERSION,
        **dataclasses.asdict(position),
        "dp_size": dp_size,
        "datasets": [{"name": name, "fingerprint": fingerprint} for name, fingerprint in datasets],
        "plan": plan.to_dict(),
        "damaged": [list(sample.id) for sample in damaged],
    }


def damaged_in(state: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Returns the samples that a saved state counts as masked; none for states of earlier versions."""
    return [(int(dataset), int(index)) for dataset, index in state.get("damaged", ())]


def restore(
    state: Mapping[str, Any], dp_size: int, datasets: tuple[tuple[str, str], ...], plan: PlanConfig
) -> Position:
    """Returns the position of the result of :func:`saved_state`, if data and plan are unchanged.

    Raises:
        UsageError: If it is no saved state.
        ConfigMismatchError: Listing every difference.
    """
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
    differences = config_differences(dict(state["plan"]), plan)
    # Between steps it does not matter which rank ran which pack. Within a step it determines the remaining packs.
    changed = [line for line in differences if position.micro_batch or not concerns_assignment(line)]
    saved = [(str(each["name"]), str(each["fingerprint"])) for each in state["datasets"]]
    if len(saved) != len(datasets):
        changed.append(f"datasets: {len(saved)} -> {len(datasets)}")
    for i, ((old_name, old), (name, new)) in enumerate(zip(saved, datasets, strict=False)):
        # Names are paths and may change; the contents must not.
        if old != new:
            changed.append(f"dataset {i} ({old_name}): content {old[:16]} -> {new[:16]} ({name})")
    if position.micro_batch and int(state["dp_size"]) != dp_size:
        changed.append(
            f"dp_size: {state['dp_size']} -> {dp_size}, within step {position.step} (at micro-batch "
            f"{position.micro_batch}); it may change only between steps"
        )
    if changed:
        listed = "\n".join(f"  {line}" for line in changed)
        remedy = "Restore these, or start a new run."
        if any(line.startswith("alignment: ") for line in changed):
            remedy += (
                " Samples are padded to multiples of the alignment. It follows from tensor parallelism with sequence "
                "parallelism, from context parallelism and from pad_multiple. If these sizes may change, begin a run "
                "with a pad_multiple for all of them, such as 16."
            )
        if any(line.startswith(ALGORITHMS) for line in changed):
            remedy += " An algorithm comes with the version of vlmdata: to resume, install the one that began the run."
        raise ConfigMismatchError(f"the loader state is of another run:\n{listed}\n{remedy}")
    return position
