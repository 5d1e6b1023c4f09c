"""The mixture that a run has over its steps: the share of each dataset in samples, tokens and targets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vlmdata.packing.config import PlanConfig
from vlmdata.packing.plan.blend import DatasetShare, realised_shares
from vlmdata.packing.plan.epoch import EpochPlan


class Plans(Protocol):
    """The plans of a run by epoch: :class:`vlmdata.packing.plan.run.RunPlans` or those of a loader."""

    def __getitem__(self, epoch: int) -> EpochPlan:
        """Returns the plan of an epoch."""

    def steps_before(self, epoch: int) -> int:
        """Returns the optimizer steps of the run before an epoch."""


@dataclass(frozen=True, slots=True)
class StepShares:
    """What some consecutive steps hold of each dataset."""

    first_step: int  # of the run, from 0
    steps: int
    epoch: int  # of the first of them
    changed: bool  # whether other settings hold than in the part before
    datasets: tuple[DatasetShare, ...]


def shares_over_steps(plans: Plans, epoch: int, steps: int, parts: int = 8) -> list[StepShares]:
    """Returns the realised mixture of the steps from an epoch on, in about ``parts`` parts.

    A part ends where the settings change.
    """
    size, begun = -(-steps // parts), plans.steps_before(epoch)
    found: list[StepShares] = []
    pieces: list[npt.NDArray[np.int32]] = []
    count, first, at, settings, changed = 0, begun, epoch, _settings(plans[epoch]), False

    table = plans[epoch].table

    def finish() -> None:
        found.append(StepShares(first, count, at, changed, realised_shares(table, np.concatenate(pieces))))

    left = steps
    while left:
        plan, step = plans[epoch], 0
        while step < plan.num_steps and left:
            if count == size or (count and _settings(plan) != settings):
                finish()
                pieces, count = [], 0
            if not count:
                changed = _settings(plan) != settings
                first, at, settings = begun + step, epoch, _settings(plan)
            more = min(size - count, plan.num_steps - step, left)
            last = min((step + more) * plan.config.global_batch, plan.num_packs)
            pieces.append(plan.samples[plan.offsets[step * plan.config.global_batch] : plan.offsets[last]])
            step, count, left = step + more, count + more, left - more
        begun, epoch = begun + plan.num_steps, epoch + 1
    finish()
    return found


def _settings(plan: EpochPlan) -> PlanConfig:
    """Returns the settings of an epoch alone: which ones came earlier is recorded differently after each change."""
    return replace(plan.config, earlier=(), schedule=())
