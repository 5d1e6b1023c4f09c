"""The starting point of a run: random weights, given weights, or its own newest checkpoint."""

from __future__ import annotations

from pathlib import Path

from vlmdata import StreamingLoader
from vlmdata.model.architecture import Architecture
from vlmdata.model.training.checkpoints.base import base_digest
from vlmdata.model.training.checkpoints.checkpoint import Checkpoints
from vlmdata.model.training.checkpoints.run_state import changes_since
from vlmdata.model.training.checkpoints.weights import find_weights, load_weights
from vlmdata.model.training.data import RankPlace
from vlmdata.model.training.optimizer.learner import Learner
from vlmdata.model.training.processes.agreement import together
from vlmdata.model.training.settings.config import ConfigError, TrainConfig


def find_start(config: TrainConfig, checkpoints: Checkpoints, resume: bool) -> tuple[Path | None, Path | None]:
    """Finds the starting point of a run before its model is built; the same on all ranks.

    Returns the checkpoint of this run to resume from, None for a new run, and the folder of the weights to load before
    it: those of a new run, or those that adapters belong to; None for random ones, or for the checkpoint's. A
    ConfigError if a new run's folder contains checkpoints, there is nothing to resume, or ``model.hf`` has no
    weights.
    """
    latest = checkpoints.agree_on_latest()
    if resume and latest is None:
        raise ConfigError(
            f"{config.run.out} contains no checkpoint to resume from; omit --resume, or give the run's --out"
        )
    if not resume and latest is not None:
        raise ConfigError(
            f"{config.run.out} contains the checkpoint {latest.name} of an earlier run: continue with --resume, or "
            "choose another --out"
        )
    # A checkpoint with adapters does not hold the weights that they belong to.
    return latest, find_weights(config) if latest is None or config.lora.rank is not None else None


def load_start(
    config: TrainConfig,
    architecture: Architecture,
    place: RankPlace,
    checkpoints: Checkpoints,
    start: tuple[Path | None, Path | None],
    learner: Learner,
    loader: StreamingLoader,
) -> tuple[int, list[str]]:
    """Loads a start of :func:`find_start`. Returns the number of steps already completed, and notes for the user."""
    checkpoint, weights = start
    said: list[str] = []
    if weights is not None:
        said = load_weights(weights, learner, config, architecture, place)
    elif checkpoint is None or config.lora.rank is not None:
        said = [f"weights: random, from seed {config.run.seed}"]
    if config.lora.rank is not None:
        checkpoints.base = base_digest(learner)
        if checkpoint is None and config.lora.weights is not None:
            said.append(f"adapters: {config.lora.weights}")
    if checkpoint is None:
        return 0, said
    state, notes = checkpoints.load(checkpoint, learner)
    with together():
        checkpoints.load_data(checkpoint, state, loader)
    changes = [f"  {line}" for line in changes_since(state, config.to_dict())]
    said += [f"resumed from {checkpoint}", *notes, *(["changed since:", *changes] if changes else [])]
    return state.step, said
