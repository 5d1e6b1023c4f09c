"""The loss over whole evaluation sets: forward passes only, in the run's own layout.

Every sample counts once. The loss is sum(weight x loss) / sum(weight) over all targets, so it does not depend on
packing or layout. Packs are spread evenly over data-parallel ranks and padded with empty ones, so that all ranks make
the same number of forward passes.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vlmdata import StreamingLoader
from vlmdata.loader.data import require_one_tokenizer
from vlmdata.model.architecture import Architecture
from vlmdata.model.training.checkpoints.learner_state import gather_weights
from vlmdata.model.training.data import RankPlace, open_loader
from vlmdata.model.training.optimizer.learner import Learner, unwrapped
from vlmdata.model.training.settings.config import ConfigError, TrainConfig
from vlmdata.model.training.step import run_passes
from vlmdata.model.training.vision_side import VisionSide
from vlmdata.wording import counted

#: Largest number of loader processes per rank for evaluation data. They exist for one evaluation.
_WORKERS = 2


@dataclass(frozen=True)
class Evaluation:
    """Results of an evaluation, over all ranks.

    Attributes:
        step: Optimizer steps completed before it.
        loss: Weighted mean cross-entropy over the targets of all sets, in nats.
        losses: Loss of each set, by name.
        mtp_loss: Mean loss of multi-token prediction over all sets; None without it.
        targets: Number of targets in all sets.
        samples: Number of samples in all sets.
        seconds: Wall time.
    """

    step: int
    loss: float
    losses: dict[str, float]
    mtp_loss: float | None
    targets: int
    samples: int
    seconds: float

    @property
    def metrics(self) -> dict[str, float]:
        """Returns numbers by name. With several sets, ``loss/NAME`` is the loss of each."""
        values = {"loss": self.loss}
        if len(self.losses) > 1:
            values |= {f"loss/{name}": loss for name, loss in self.losses.items()}
        if self.mtp_loss is not None:
            values["mtp_loss"] = self.mtp_loss
        return values | {"targets": self.targets, "samples": self.samples, "seconds": self.seconds}

    def line(self, steps: int) -> str:
        """Formats one console line."""
        parts = [f"eval {self.step:>{len(str(steps))}}/{steps}", f"loss {self.loss:.4f}"]
        if len(self.losses) > 1:
            parts += [f"{name} {loss:.4f}" for name, loss in self.losses.items()]
        if self.mtp_loss is not None:
            parts.append(f"mtp {self.mtp_loss:.4f}")
        counts = (counted(self.targets, "target"), counted(self.samples, "sample"))
        return "  ".join([*parts, *counts, f"{self.seconds:.2f} s"])


def open_evaluation_sets(
    config: TrainConfig,
    place: RankPlace,
    architecture: Architecture,
    device: torch.device,
    training: StreamingLoader,
) -> dict[str, StreamingLoader]:
    """Opens the datasets of ``data.eval_paths``. Returns this rank's loader of each, by its name in logs.

    They are packed like the training data, but without balance and blend. Each pass over one is epoch 0.

    Raises:
        ConfigError: If a sample fits no pack.
        ConfigMismatchError: If a set has another tokenizer than the training data.
        DatasetFormatError: If a dataset is missing or unfinished.
    """
    sets = {}
    for path, name in zip(config.data.eval_paths, set_names(config.data.eval_paths), strict=True):
        changed: dict[str, Any] = {
            "paths": (path,),
            "blend": (),
            "global_batch": place.dp_size,
            "balance": False,
            "on_damage": "raise",  # losses over other samples would not compare
            "workers": min(config.data.workers, _WORKERS),
        }
        data = dataclasses.replace(config.data, **changed)
        try:
            sets[name] = open_loader(dataclasses.replace(config, data=data), place, architecture, device)
        except ConfigError as error:
            raise ConfigError(f"data.eval_paths {path}: {error}") from error
        require_one_tokenizer([*training.datasets, *sets[name].datasets])
    return sets


def set_names(paths: Sequence[str]) -> list[str]:
    """Returns names of the datasets: the shortest path endings that are unique."""
    parts = [path.rstrip("/").split("/") for path in paths]
    longest = max(map(len, parts), default=1)
    names = (["/".join(part[-length:]) for part in parts] for length in range(1, longest + 1))
    return next(found for found in names if len(set(found)) == len(paths))


def also_trained_on(sets: Mapping[str, StreamingLoader], training: StreamingLoader) -> list[str]:
    """Returns a warning for each evaluation set that is also training data."""
    trained = {dataset.manifest.fingerprint for dataset in training.datasets}
    return [
        f"warning: the evaluation set {name} is also training data: its loss says nothing about other data"
        for name, loader in sets.items()
        if loader.datasets[0].manifest.fingerprint in trained
    ]


class Evaluator:
    """Evaluates a model during training without changing it."""

    def __init__(
        self,
        sets: Mapping[str, StreamingLoader],
        learner: Learner,
        place: RankPlace,
        config: TrainConfig,
        device: torch.device,
        stop_requested: Callable[[], bool] = lambda: False,
        vision: VisionSide | None = None,
    ):
        self._vision = vision
        self._sets, self._learner, self._place = sets, learner, place
        self._device, self._stop_requested = device, stop_requested
        self._capacity = config.data.capacity
        self._most = config.data.global_batch // place.dp_size
        self._starts = [loader.state_dict() for loader in sets.values()]

    def __call__(self, step: int) -> Evaluation | None:
        """Passes over all sets once. A collective.

        Args:
            step: Optimizer steps completed.

        Returns:
            The results; None if a rank was asked to stop before the end.
        """
        begun = time.perf_counter()
        gather_weights(self._learner)
        model = self._learner.model[0]
        model.eval()
        try:
            with torch.no_grad():
                table = self._pass_over_all()
        finally:
            model.train()
        network = unwrapped(model)
        # Also after an interrupted evaluation: its counts do not belong to the next step.
        extra = network.metrics.pop(network.metric_names, device=self._device)
        if table is None:
            return None
        total = [sum(column) for column in zip(*table, strict=True)]
        return Evaluation(
            step=step,
            loss=_mean(*total[:2]),
            losses={name: _mean(*row[:2]) for name, row in zip(self._sets, table, strict=True)},
            mtp_loss=extra.get("mtp_loss"),
            targets=int(total[2]),
            samples=sum(len(loader.datasets[0]) for loader in self._sets.values()),
            seconds=time.perf_counter() - begun,
        )

    def _pass_over_all(self) -> list[list[float]] | None:
        """Returns the sums of losses, weights and targets for each set; None if a rank was asked to stop."""
        table = []
        for loader, start in zip(self._sets.values(), self._starts, strict=True):
            found = self._pass_over(loader)
            loader.load_state_dict(start)  # ends its workers
            if found is None:
                return None
            table.append(found.tolist())
        return table

    def _pass_over(self, loader: StreamingLoader) -> torch.Tensor | None:
        """Sums losses, weights and targets over all ranks, float64 (3,); None if a rank was asked to stop."""
        total = torch.zeros(3, dtype=torch.float64, device=self._device)
        steps, done, batches = loader.steps(0), 0, iter(loader)
        while done < steps:
            count = min(steps - done, self._most)  # each micro-batch is a step of this loader
            images = [] if self._vision is None else [p for i in range(done, done + count) for p in loader.images(0, i)]
            found = run_passes(self._learner, self._vision, batches, images, count, self._capacity, forward_only=True)
            if self._place.speaks:
                total += found.sum(0)
            done += count
            stop = torch.tensor([float(self._stop_requested())], device=self._device)
            torch.distributed.all_reduce(stop, op=torch.distributed.ReduceOp.MAX)
            if stop.item():
                return None
        torch.distributed.all_reduce(total)
        return total


def _mean(total: float, weight: float) -> float:
    return total / weight if weight else math.nan
