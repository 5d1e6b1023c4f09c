"""Checkpoints: model and optimizer through megatron-core, so that any layout can load them, and where the run stood.

A checkpoint is a folder ``step-00000050`` under ``checkpoints/``. It is written under a temporary name and renamed when
every rank is done, so whatever carries the name is whole. It holds megatron-core's distributed checkpoint,
``run.json`` (step, loader state, layout, configuration), ``config.toml``, and each rank's random state.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from model.architecture import Architecture
from model.training.config import ConfigError, TrainConfig, config_differences
from model.training.data import RankPlace
from model.training.optimizer import Learner
from model.training.step import unwrapped
from model.weights.store import save_strategy

_NAME = re.compile(r"step-(\d{8})")
#: Sharding of the distributed optimizer's state that any layout can load.
_OPTIMIZER_FORMAT = "fully_reshardable"


@dataclass(frozen=True)
class RunState:
    """Where a run stood.

    Attributes:
        step: Optimizer steps done.
        loader: The loader's state.
        layout: Sizes of the parallel layout.
        config: The configuration, as :meth:`TrainConfig.to_dict`.
        architecture: The model, as a Hugging Face config.
    """

    step: int
    loader: dict[str, Any]
    layout: dict[str, int]
    config: dict[str, Any]
    architecture: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run.

    Args:
        config: The run.
        architecture: Its model.
        place: This process.
        async_save: Whether files are written while training goes on.
    """

    def __init__(self, config: TrainConfig, architecture: Architecture, place: RankPlace, async_save: bool):
        self._config, self._architecture, self._place = config, architecture, place
        self._folder = Path(config.run.out) / "checkpoints"
        self._queue = AsyncCallsQueue() if async_save else None

    def latest(self) -> Path | None:
        """The newest whole checkpoint."""
        found = checkpoints_in(self._folder)
        return found[-1] if found else None

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of a step is, or will be."""
        return self._folder / f"step-{step:08d}"

    def save(self, step: int, learner: Learner, loader: dict[str, Any]) -> None:
        """Writes a checkpoint; in the background if the run says so.

        Args:
            step: Optimizer steps done.
            learner: Model, optimizer and schedule.
            loader: The loader's state.
        """
        self.wait()
        final = self.path_of(step)
        temporary = self._folder / f".{final.name}.tmp"
        if self._place.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        torch.distributed.barrier()
        state = RunState(step, loader, self._layout(), self._config.to_dict(), self._architecture.to_hf())
        request = dist_checkpointing.save(
            self._sharded(learner, loading=False),
            str(temporary),
            sharded_strategy=save_strategy(),
            async_sharded_save=self._queue is not None,
            async_strategy="mcore",
            content_metadata=_content(),
        )
        if self._place.rank == 0:
            (temporary / "run.json").write_text(json.dumps(vars(state), indent=1) + "\n")
            (temporary / "config.toml").write_text(self._config.to_toml())
        torch.save(_random_state(), temporary / f"random-{self._place.rank:05d}.pt")
        finish = self._finish(temporary, final)
        if self._queue is None:
            finish()
            return
        request.add_finalize_fn(finish)
        self._queue.schedule_async_request(request)

    def poll(self) -> None:
        """Finishes a background save whose files are written; every rank calls it at the same steps."""
        if self._queue is not None:
            self._queue.maybe_finalize_async_calls(blocking=False)

    def wait(self) -> None:
        """Finishes a background save, waiting for it."""
        if self._queue is not None:
            self._queue.maybe_finalize_async_calls(blocking=True)

    def load(self, path: Path, learner: Learner) -> RunState:
        """Restores model, optimizer, schedule and, on the same layout, the random state.

        Raises:
            ConfigError: If the checkpoint is of another model.
        """
        state = read_state(path)
        ours = self._architecture.to_hf()
        if state.architecture != ours:
            lines = "; ".join(config_differences({"model": state.architecture}, {"model": ours}))
            raise ConfigError(f"{path} holds another model: {lines}")
        loaded = dist_checkpointing.load(self._sharded(learner, loading=True), str(path), strict="raise_unexpected")
        unwrapped(learner.model[0]).load_state_dict(loaded["model"], strict=False)
        learner.optimizer.load_state_dict(loaded["optimizer"])
        learner.schedule.load_state_dict(loaded["schedule"])
        if state.layout == self._layout():
            _set_random_state(torch.load(path / f"random-{self._place.rank:05d}.pt", weights_only=False))
        return state

    def _sharded(self, learner: Learner, loading: bool) -> dict[str, Any]:
        model = unwrapped(learner.model[0]).sharded_state_dict(metadata=_content())
        optimizer = learner.optimizer.sharded_state_dict(model, is_loading=loading, metadata=_content())
        return {"model": model, "optimizer": optimizer, "schedule": learner.schedule.state_dict()}

    def _layout(self) -> dict[str, int]:
        parallel = self._config.parallel
        return {"world": self._place.world, **{name: getattr(parallel, name) for name in ("tp", "cp", "pp", "ep")}}

    def _finish(self, temporary: Path, final: Path) -> Callable[[], None]:
        """Gives the checkpoint its name and removes old ones."""

        def finish() -> None:
            torch.distributed.barrier()
            if self._place.rank == 0:
                shutil.rmtree(final, ignore_errors=True)  # a run that was resumed before it writes the same step again
                os.rename(temporary, final)
                keep = self._config.run.keep
                for old in checkpoints_in(self._folder)[:-keep] if keep else []:
                    shutil.rmtree(old)
            torch.distributed.barrier()

        return finish


def checkpoints_in(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: path.name)


def read_state(path: Path) -> RunState:
    """Reads where a run stood.

    Raises:
        ConfigError: If the folder is no checkpoint.
    """
    try:
        return RunState(**json.loads((path / "run.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} is no checkpoint of a run: {error}") from error


def _content() -> dict[str, Any]:
    """What megatron-core must know to write and to read the optimizer's state."""
    return {
        "distrib_optim_sharding_type": _OPTIMIZER_FORMAT,
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _random_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 (the global generator is what libraries use)
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": get_cuda_rng_tracker().get_states(),
    }


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["tracker"])


def load_weights(path: Path, learner: Learner) -> None:
    """Fills the model with weights that ``vlmdata convert`` made, for any layout.

    Raises:
        ConfigError: If it is no such checkpoint, or of another model.
    """
    model = unwrapped(learner.model[0])
    try:
        loaded = dist_checkpointing.load({"model": model.sharded_state_dict(metadata=_content())}, str(path))
    except Exception as error:
        raise ConfigError(f"model.weights {path}: {error}") from error
    model.load_state_dict(loaded["model"], strict=False)
    learner.optimizer.reload_model_params()
