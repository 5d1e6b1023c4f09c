"""Runs in various layouts, one after another in the same processes: starting processes takes longer than a run."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.model.training.conftest import SETTINGS, without_collecting_at_the_start
from tests.model.workers import meet_again


@dataclass(frozen=True)
class Run:
    """A run among others.

    Attributes:
        name: Its folder.
        world: Processes that make it, the first of those that make all runs.
        settings: Settings other than :data:`SETTINGS`.
        source: Name of an earlier run that it continues, if any.
        step: Step of the source after which it continues.
    """

    name: str
    world: int
    settings: dict[str, Any] = field(default_factory=dict)
    source: str | None = None
    step: int = 1


def train_all(folder: Path, data: Path, runs: Sequence[Run]) -> dict[str, str]:
    """Makes the runs, each in a folder of its own.

    Args:
        folder: Where their folders are.
        data: Dataset of those that name none.
        runs: The runs; one that continues another comes after it.

    Returns:
        For each run of this process: the message with which it was refused or stopped, or nothing.
    """
    import torch.distributed as dist

    from vlmdata.model.parallel import groups
    from vlmdata.model.training.loop import train
    from vlmdata.model.training.processes.failure import NotFiniteError
    from vlmdata.model.training.settings.config import ConfigError
    from vlmdata.model.training.settings.config_loading import load_config

    said = {}
    for run in runs:
        if not meet_again(run.world):
            continue
        given = SETTINGS | {"data.paths": [str(data)], "run.out": str(folder / run.name)} | run.settings
        config = load_config(None, list(given.items()))
        parallel = config.parallel
        if run.source is not None and dist.get_rank() == 0:
            _checkpoint_alone(folder / run.source, folder / run.name, run.step)
        dist.barrier()
        groups.initialize(
            backend="gloo",
            tensor=parallel.tp,
            context=parallel.cp,
            pipeline=parallel.pp,
            expert=parallel.ep,
            vision=parallel.vision_gpus,
            vision_tensor=parallel.vision_tp or 1,
        )
        said[run.name] = ""
        try:
            with without_collecting_at_the_start():
                train(config, torch.device("cpu"), run.source is not None)
        except (ConfigError, NotFiniteError) as error:
            said[run.name] = str(error)
        except Exception as error:
            error.add_note(f"in the run {run.name!r}")
            raise
    return said


def _checkpoint_alone(source: Path, out: Path, step: int) -> None:
    """Copies a run's checkpoint and not its log, so that what the copy's log has is its own."""
    name = f"step-{step:08d}"
    shutil.copytree(source / "checkpoints" / name, out / "checkpoints" / name)
