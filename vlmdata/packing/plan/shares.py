"""The mixture that a run has over its steps: the share of each dataset in samples, tokens and targets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlmdata.packing.plan.blend import DatasetShare, realised_shares
from vlmdata.packing.plan.run import RunPlans


@dataclass(frozen=True, slots=True)
class StepShares:
    """What some consecutive steps hold of each dataset."""

    first_step: int  # of the run, from 0
    steps: int
    epoch: int  # of the first of them
    datasets: tuple[DatasetShare, ...]


def shares_over_steps(plans: RunPlans, epoch: int, steps: int, parts: int = 8) -> list[StepShares]:
    """Returns the realised mixture of the steps from an epoch on, in about ``parts`` parts.

    A part ends where the settings change.
    """
    size, begun = -(-steps // parts), plans.steps_before(epoch)
    found: list[StepShares] = []
    pieces: list[npt.NDArray[np.int32]] = []
    count, first, at, settings = 0, begun, epoch, plans[epoch].config

    table = plans[epoch].table

    def finish() -> None:
        found.append(StepShares(first, count, at, realised_shares(table, np.concatenate(pieces))))

    left = steps
    while left:
        plan, step = plans[epoch], 0
        while step < plan.num_steps and left:
            if count == size or (count and plan.config != settings):
                finish()
                pieces, count = [], 0
            if not count:
                first, at, settings = begun + step, epoch, plan.config
            more = min(size - count, plan.num_steps - step, left)
            last = min((step + more) * plan.config.global_batch, plan.num_packs)
            pieces.append(plan.samples[plan.offsets[step * plan.config.global_batch] : plan.offsets[last]])
            step, count, left = step + more, count + more, left - more
        begun, epoch = begun + plan.num_steps, epoch + 1
    finish()
    return found
