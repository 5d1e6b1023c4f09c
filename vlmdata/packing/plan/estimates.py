"""Estimates of layouts, which packages with a trainer offer as entry points: only a trainer knows its schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Protocol

from vlmdata.errors import UsageError
from vlmdata.packing.plan.epoch import EpochPlan

#: Entry points; each is an :class:`EstimateSplits`.
GROUP = "vlmdata.split_estimates"


@dataclass(frozen=True, slots=True)
class Split:
    """An estimate for one number of GPUs for vision."""

    vision_gpus: int  # that hold the tower
    vision_idle: float  # share of the time that they wait
    language_idle: float  # share of the time that the others wait
    speed: float  # share of the time in which the GPUs work
    gain: float | None  # steps per second relative to one layout for both on all GPUs; None if there is none
    time: float  # mean of a step: work of the cost model's units over FLOP/s


class EstimateSplits(Protocol):
    """Estimates each split of some GPUs that the global batch allows."""

    def __call__(
        self, plan: EpochPlan, gpus: int, model_parallel: int, stages: int = 1, ahead: int = 1
    ) -> Sequence[Split]:
        """Returns the estimates, by ascending ``vision_gpus``.

        Args:
            plan: The plan; its cost model is that of the whole model.
            gpus: GPUs for both sides.
            model_parallel: GPUs that share each layer of the language model for a pack (tensor x context parallel).
            stages: Its pipeline stages.
            ahead: Micro-batches that the tower encodes ahead.

        Raises:
            UsageError: If no split is possible.
        """


def split_estimates() -> EstimateSplits:
    """Returns what estimates splits.

    Raises:
        UsageError: If no installed package does.
    """
    for point in sorted(entry_points(group=GROUP), key=lambda each: each.name):
        found: EstimateSplits = point.load()
        return found
    raise UsageError("no installed package estimates GPUs for vision; pip install 'vlmdata[train]'")


def best_split(splits: Sequence[Split]) -> Split:
    """Returns the fastest split."""
    return max(splits, key=lambda each: each.gain if each.gain is not None else each.speed)
