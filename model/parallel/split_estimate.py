"""Estimates what GPUs of its own for the vision tower change: work, idle time and speed, from the cost model.

Steps of the plan are simulated pass by pass (:mod:`vlmdata.model.parallel.step_schedule`). The estimate counts
arithmetic and nothing else: messages take no time, pipeline stages share the layers evenly, and memory is not
considered. Images of one sample are encoded by one rank, where the trainer may spread them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlmdata.errors import UsageError
from vlmdata.model.parallel.step_schedule import FloatArray, step_time
from vlmdata.packing.cost import CostModel
from vlmdata.packing.item_runs import assigned
from vlmdata.packing.plan.epoch import EpochPlan
from vlmdata.packing.plan.estimates import Split

#: Steps that are simulated, spread over the epoch.
_STEPS = 40


@dataclass(frozen=True, slots=True)
class Speeds:
    """FLOP/s of a GPU, in any unit."""

    vision: float = 1.0  # in a tower of its own
    language: float = 1.0  # in the language model
    vision_together: float = 1.0  # in a tower in the language model's layout


def estimate_splits(
    plan: EpochPlan, gpus: int, model_parallel: int, stages: int = 1, ahead: int = 1, speeds: Speeds | None = None
) -> tuple[Split, ...]:
    """Estimates each split of GPUs for both sides that the global batch allows, by ascending ``vision_gpus``.

    The plan's cost model is that of the whole model. ``model_parallel`` GPUs share each layer of the language model for
    a pack (tensor x context parallel). The tower encodes ``ahead`` micro-batches ahead (``parallel.vision_ahead``). A
    UsageError if no split is possible.
    """
    batch, replica = plan.config.global_batch, model_parallel * stages
    simulation = SplitSimulation(plan, model_parallel, stages, speeds or Speeds())
    together = simulation.time_together(gpus)
    found = []
    for apart in range(1, gpus):
        ranks, rest = divmod(gpus - apart, replica)
        if not rest and ranks and batch % ranks == 0:
            found.append(simulation.split(gpus, apart, ahead, together))
    if not found:
        raise UsageError(
            f"{gpus} GPUs cannot be split: a language model on {replica} GPUs (tensor x context parallel x stages) and "
            f"a tower need more, or data-parallel sizes that divide global_batch {batch}"
        )
    return tuple(found)


class SplitSimulation:
    """Steps of a plan, and the work of each side in them; the arguments are those of :func:`estimate_splits`."""

    def __init__(self, plan: EpochPlan, model_parallel: int, stages: int, speeds: Speeds):
        cost = plan.config.cost
        self._plan = plan
        self._model_parallel, self._stages, self._speeds = model_parallel, stages, speeds
        config = dataclasses.replace(plan.config, cost=dataclasses.replace(cost, per_patch=0, per_patch_squared=0))
        self._language = dataclasses.replace(plan, config=config)
        self._vision = CostModel(0, 0, 0, cost.per_patch, cost.per_patch_squared)
        self._known: dict[int, npt.NDArray[np.int64]] = {}
        self.steps = sorted({number * plan.num_steps // _STEPS for number in range(_STEPS)})

    def split(self, gpus: int, apart: int, ahead: int, together: float | None) -> Split:
        """Estimates one split; ``together`` is the time of a step in one layout."""
        ranks = (gpus - apart) // (self._model_parallel * self._stages)
        time = vision = language = 0.0
        for step in self.steps:
            tower, others = self.work(step, apart, ranks)
            time += step_time(others, tower, ahead)
            vision += tower.sum()
            language += others.sum() * self._model_parallel
        vision_idle, language_idle = (
            1 - work / (count * time) if time else 0.0 for work, count in ((vision, apart), (language, gpus - apart))
        )
        speed = (vision + language) / (gpus * time) if time else 1.0
        time /= max(len(self.steps), 1)
        gain = None if together is None or not time else together / time
        return Split(apart, float(vision_idle), float(language_idle), float(speed), gain, time)

    def work(self, step: int, vision_gpus: int, ranks: int) -> tuple[FloatArray, FloatArray]:
        """Returns the time of each pass in a step: tower (n, V), and language (n, D, S)."""
        packs = self._language.assignment(step, ranks)
        loads = [0] * vision_gpus
        tower = np.zeros((len(packs), vision_gpus))
        for number, of_micro_batch in enumerate(packs):
            costs = np.concatenate([self._image_costs(pack) for pack in of_micro_batch.tolist()])
            tower[number] = np.bincount(assigned(costs, loads), weights=costs, minlength=vision_gpus)
        return tower / self._speeds.vision, self._of_stages(self._language.pack_costs(packs.ravel()), packs.shape)

    def time_together(self, gpus: int) -> float | None:
        """Returns the mean time of a step if the first stage's ranks also hold the tower; None if sizes do not fit."""
        ranks, rest = divmod(gpus, self._model_parallel * self._stages)
        if rest or not ranks or self._plan.config.global_batch % ranks:
            return None
        time = 0.0
        for step in self.steps:
            packs = self._plan.assignment(step, ranks)
            language = self._of_stages(self._language.pack_costs(packs.ravel()), packs.shape)
            tower = np.array([self._image_costs(pack).sum() for pack in packs.ravel().tolist()]).reshape(packs.shape)
            language[:, :, 0] += tower / self._model_parallel / self._speeds.vision_together
            time += step_time(language)
        return time / max(len(self.steps), 1)

    def _of_stages(self, costs: npt.NDArray[np.int64], shape: tuple[int, ...]) -> FloatArray:
        of_pack = costs.reshape(shape) / (self._model_parallel * self._stages * self._speeds.language)
        return np.repeat(of_pack[:, :, None], self._stages, axis=2)

    def _image_costs(self, pack: int) -> npt.NDArray[np.int64]:
        """Returns the cost of the images of each sample of a pack that has images."""
        if pack < 0:
            return np.zeros(0, np.int64)
        if pack not in self._known:
            table, samples = self._plan.table, self._plan.pack(pack).samples
            none, patches = np.zeros(len(samples), np.int64), table.num_patches[samples]
            costs = self._vision.sample_costs(none, none, patches, table.sum_patches_squared[samples])
            self._known[pack] = costs[costs > 0]
        return self._known[pack]
