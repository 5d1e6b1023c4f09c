"""The loader's state: where the next batch stands, and what must be unchanged for that to mean anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlmdata.errors import ConfigMismatchError
from vlmdata.packing.config import PlanConfig, concerns_assignment, config_differences

STATE_VERSION = 1


@dataclass(frozen=True, order=True)
class Position:
    """The next batch to hand out: epoch, optimizer step within it, micro-batch within that."""

    epoch: int = 0
    step: int = 0
    micro_batch: int = 0


@dataclass(frozen=True)
class LoaderState:
    """All there is to save; its size does not depend on the data.

    Attributes:
        position: The next batch.
        dp_size: Data-parallel ranks; matters only within a step.
        datasets: (name, fingerprint of the manifest) of every dataset, in order.
        plan: The plan's configuration.
    """

    position: Position
    dp_size: int
    datasets: tuple[tuple[str, str], ...]
    plan: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "version": STATE_VERSION,
            "epoch": self.position.epoch,
            "step": self.position.step,
            "micro_batch": self.position.micro_batch,
            "dp_size": self.dp_size,
            "datasets": [{"name": name, "fingerprint": fingerprint} for name, fingerprint in self.datasets],
            "plan": dict(self.plan),
        }


def restore(
    state: Mapping[str, Any], dp_size: int, datasets: tuple[tuple[str, str], ...], plan: PlanConfig
) -> Position:
    """The position a saved state stands for, if it is of the same data and plan.

    Args:
        state: What :meth:`LoaderState.to_dict` gave.
        dp_size: Data-parallel ranks now.
        datasets: Names and fingerprints now.
        plan: The plan's configuration now.

    Raises:
        ConfigMismatchError: Listing every difference.
    """
    if state.get("version") != STATE_VERSION:
        raise ConfigMismatchError(
            f"the loader state has version {state.get('version')}, this vlmdata reads {STATE_VERSION}"
        )
    position = Position(int(state["epoch"]), int(state["step"]), int(state["micro_batch"]))
    differences = config_differences(dict(state["plan"]), plan)
    # Between steps it does not matter which rank ran which pack; within one it decides what is left for whom.
    changed = [line for line in differences if position.micro_batch or not concerns_assignment(line)]
    saved = [(str(each["name"]), str(each["fingerprint"])) for each in state["datasets"]]
    if len(saved) != len(datasets):
        changed.append(f"datasets: {len(saved)} -> {len(datasets)}")
    for i, ((old_name, old), (name, new)) in enumerate(zip(saved, datasets, strict=False)):
        # Names are paths and may change; what they hold may not.
        if old != new:
            changed.append(f"dataset {i} ({old_name}): content {old[:16]} -> {new[:16]} ({name})")
    if position.micro_batch and int(state["dp_size"]) != dp_size:
        changed.append(
            f"dp_size: {state['dp_size']} -> {dp_size}, within step {position.step} (at micro-batch "
            f"{position.micro_batch}); it may change between steps only"
        )
    if changed:
        listed = "\n".join(f"  {line}" for line in changed)
        raise ConfigMismatchError(f"the loader state is of another run:\n{listed}\nRestore these, or start a new run.")
    return position
