"""Estimates what GPUs of its own for the vision tower change: work, idle time and speed, from the cost model.

The estimate counts arithmetic and nothing else: a GPU does its share of it at the same speed whatever the layout, a
backward pass takes twice as long as a forward pass, and messages take no time. Memory is not considered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vlmdata.errors import UsageError
from vlmdata.packing.cost import CostModel
from vlmdata.packing.plan import EpochPlan

#: Steps that are simulated, spread over the epoch.
_STEPS = 100
_FORWARD = 1 / 3


@dataclass(frozen=True, slots=True)
class Split:
    """An estimate for one number of GPUs for vision.

    Attributes:
        vision_gpus: GPUs that hold the tower.
        vision_idle: Share of the time that they wait.
        language_idle: Share of the time that the others wait.
        speed: Steps per second, relative to the same GPUs without waiting: the share of the time in which they work.
        gain: Steps per second relative to one layout for both on all GPUs; None if that layout does not exist.
    """

    vision_gpus: int
    vision_idle: float
    language_idle: float
    speed: float
    gain: float | None


def estimate_splits(plan: EpochPlan, gpus: int, model_parallel: int, ahead: int = 1) -> tuple[Split, ...]:
    """Estimates each split of some GPUs that the global batch allows.

    Args:
        plan: The plan; its cost model is that of the whole model.
        gpus: GPUs for both sides.
        model_parallel: GPUs that share one pack in the language model (tensor x context parallel).
        ahead: Micro-batches that the tower encodes ahead.

    Returns:
        The estimates, by ascending ``vision_gpus``.

    Raises:
        UsageError: If no split is possible.
    """
    cost, batch = plan.config.cost, plan.config.global_batch
    language = _with_cost(plan, dataclasses.replace(cost, per_patch=0, per_patch_squared=0))
    vision = _with_cost(plan, CostModel(0, 0, 0, cost.per_patch, cost.per_patch_squared))
    steps = sorted({number * plan.num_steps // _STEPS for number in range(_STEPS)})
    together = _time_of_one_layout(plan, steps, gpus, model_parallel)
    found = []
    for apart in range(1, gpus):
        ranks, rest = divmod(gpus - apart, model_parallel)
        if rest or not ranks or batch % ranks:
            continue
        time = vision_work = language_work = 0.0
        for step in steps:
            packs = language.assignment(step, ranks)
            tower = vision.pack_costs(packs.ravel()).reshape(packs.shape).sum(1) / apart
            others = language.pack_costs(packs.ravel()).reshape(packs.shape) / model_parallel
            time += _step_time(tower.tolist(), others.max(1).tolist(), ahead + 1)
            vision_work += tower.sum()
            language_work += others.sum() / ranks
        vision_idle, language_idle = (float(1 - work / time) if time else 0.0 for work in (vision_work, language_work))
        speed = (apart * vision_work + (gpus - apart) * language_work) / (gpus * time) if time else 1.0
        gain = None if together is None or not time else together / time
        found.append(Split(apart, vision_idle, language_idle, float(speed), gain))
    if not found:
        raise UsageError(
            f"{gpus} GPUs cannot be split: a language model on {model_parallel} GPUs (tensor x context parallel) and a "
            f"tower need more, or data-parallel sizes that divide global_batch {batch}"
        )
    return tuple(found)


def best_split(splits: Sequence[Split]) -> Split:
    """Returns the fastest split."""
    return max(splits, key=lambda each: each.speed)


def _step_time(vision: Sequence[float], language: Sequence[float], in_flight: int) -> float:
    """Returns when both sides are done with the micro-batches of a step.

    Args:
        vision: Work of the tower in each micro-batch.
        language: Work of the language model in each.
        in_flight: Micro-batches that the tower encodes before it waits for a gradient.
    """
    tower = others = 0.0
    encoded = []

    def encode(number: int) -> None:
        nonlocal tower
        if number < len(vision):
            tower += _FORWARD * vision[number]
            encoded.append(tower)

    for number in range(in_flight):
        encode(number)
    for number, work in enumerate(language):
        others = max(others, encoded[number]) + work
        tower = max(tower, others) + (1 - _FORWARD) * vision[number]
        encode(number + in_flight)
    return max(tower, others)


def _time_of_one_layout(plan: EpochPlan, steps: Sequence[int], gpus: int, model_parallel: int) -> float | None:
    ranks, rest = divmod(gpus, model_parallel)
    if rest or plan.config.global_batch % ranks:
        return None
    times = []
    for step in steps:
        packs = plan.assignment(step, ranks)
        times.append(plan.pack_costs(packs.ravel()).reshape(packs.shape).sum(0).max() / model_parallel)
    return float(np.sum(times))


def _with_cost(plan: EpochPlan, cost: CostModel) -> EpochPlan:
    return dataclasses.replace(plan, config=dataclasses.replace(plan.config, cost=cost))
