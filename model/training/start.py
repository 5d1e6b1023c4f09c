"""What a run begins from: nothing, weights, or its own newest checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException

from model.architecture import Architecture
from model.training.agreement import on_all_ranks
from model.training.checkpoint import Checkpoints, checkpoints_in, reason, sharded_model
from model.training.config import ConfigError, TrainConfig, config_differences
from model.training.optimizer import Learner, unwrapped
from model.training.run_state import predicts
from model.weights.checksums import damaged_files, unchecked_files, without_checksum
from model.weights.convert import read_config
from vlmdata import StreamingLoader
from vlmdata.errors import VlmdataError

#: How the parameters of multi-token prediction are called.
_PREDICTOR = "language.predictor."


def find_start(config: TrainConfig, checkpoints: Checkpoints, resume: bool) -> Path | None:
    """The checkpoint to go on from, the same on all ranks; None for a fresh run.

    Raises:
        ConfigError: If a fresh run would meet an old one's checkpoints, or there is nothing to resume.
    """
    latest = checkpoints.agree_on_latest()
    if resume and latest is None:
        raise ConfigError(f"{config.run.out} holds no checkpoint to resume from; leave --resume out, or name its --out")
    if not resume and latest is not None:
        raise ConfigError(
            f"{config.run.out} holds the checkpoint {latest.name} of an earlier run: go on with --resume, or "
            "choose another --out"
        )
    return latest


def load_start(
    config: TrainConfig,
    architecture: Architecture,
    checkpoints: Checkpoints,
    found: Path | None,
    learner: Learner,
    loader: StreamingLoader,
) -> tuple[int, list[str]]:
    """Loads what a run begins from.

    Args:
        config: The run.
        architecture: Its model.
        checkpoints: Its checkpoints.
        found: What :func:`find_start` gave.
        learner: Model, optimizer and schedule.
        loader: Its position is restored.

    Returns:
        Steps done already, and lines on what is worth knowing.
    """
    if found is None:
        weights = config.model.weights
        return 0, [] if weights is None else load_weights(Path(weights), learner, config, architecture)
    state, notes = checkpoints.load(found, learner)
    loader.load_state_dict(state.loader)
    changes = [f"  {line}" for line in config_differences(state.config, config.to_dict())]
    return state.step, [f"resumed from {found}", *notes, *(["changed since:", *changes] if changes else [])]


def load_weights(path: Path, learner: Learner, config: TrainConfig, architecture: Architecture) -> list[str]:
    """Fills the model with weights that ``vlmdata convert`` made or that a run saved, for any layout.

    Args:
        path: A folder of either.
        learner: The model they go to.
        config: The run; whose multi-token prediction starts from random weights if the folder has none of it and
            ``model.mtp`` is true (rather than left to the architecture).
        architecture: Its model.

    Returns:
        Lines on what is worth knowing.

    Raises:
        ConfigError: If it is no such checkpoint, or of another model.
    """
    if not path.is_dir():
        raise ConfigError(f"model.weights {path} is no folder; make one with `vlmdata convert`, or name a checkpoint")
    if not (path / ".metadata").exists():
        raise ConfigError(_no_checkpoint(path))
    notes = on_all_ranks(partial(_check_files, path)) if config.run.verify else []
    model = unwrapped(learner.model[0])
    wanted = sharded_model(model)
    try:
        stored = dist_checkpointing.load_tensors_metadata(str(path))
        _require_same_sizes(path, stored, wanted, architecture)
        if predicts(config.model.mtp, architecture) and not any(name.startswith(_PREDICTOR) for name in stored):
            notes.append(_without_prediction(path, fresh=config.model.mtp is True))
            wanted = {name: entry for name, entry in wanted.items() if not name.startswith(_PREDICTOR)}
        loaded = dist_checkpointing.load({"model": wanted}, str(path))
    except VlmdataError:
        raise
    except (Exception, CheckpointException) as error:
        raise ConfigError(f"model.weights {path}: {_difference(path, architecture)}{reason(error)}") from error
    model.load_state_dict(loaded["model"], strict=False)
    learner.optimizer.reload_model_params()
    return notes


def _no_checkpoint(path: Path) -> str:
    if any(path.glob("*.safetensors")):
        return (
            f"model.weights {path} is a Hugging Face checkpoint: convert it first, "
            f"`vlmdata convert {path} --out DIR`, and name DIR"
        )
    found = [*checkpoints_in(path), *checkpoints_in(path / "checkpoints")]
    newest = f"{found[-1]} is one" if found else "`vlmdata convert` makes one of a Hugging Face checkpoint"
    return f"model.weights {path} is no distributed checkpoint; {newest}"


def _check_files(path: Path) -> list[str]:
    """This rank's share of the files against their checksums; a line if there are some without."""
    try:
        damaged, unchecked = damaged_files(path, dist.get_rank(), dist.get_world_size()), unchecked_files(path)
    except (OSError, ValueError) as error:
        damaged = [str(error)]
    if damaged:
        raise ConfigError(f"model.weights {path}: {'; '.join(damaged)}. Convert them again, or take another checkpoint")
    return [without_checksum(path, unchecked)] if unchecked else []


def _require_same_sizes(
    path: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any], architecture: Architecture
) -> None:
    """Tensors of other sizes are of another model, whatever else may be missing."""
    for entry in nested_values(dict(wanted)):
        theirs = stored.get(getattr(entry, "key", ""))
        if isinstance(entry, ShardedTensor) and theirs is not None and theirs.global_shape != entry.global_shape:
            raise ConfigError(
                f"model.weights {path}: {_difference(path, architecture)}{entry.key} is {tuple(theirs.global_shape)} "
                f"there and {tuple(entry.global_shape)} here. Name the model they are of with --preset or --hf"
            )


def _without_prediction(path: Path, fresh: bool) -> str:
    if fresh:
        return f"{path} has no weights of multi-token prediction: it starts from random ones"
    raise ConfigError(
        f"model.weights {path} has no weights of multi-token prediction ({_PREDICTOR}*), which this model has: train "
        "without it, --set model.mtp=false, or train it from random weights, --set model.mtp=true"
    )


def _difference(path: Path, architecture: Architecture) -> str:
    """What the weights' model has other than this one, if that can be told."""
    try:
        theirs = read_config(path)
    except VlmdataError:
        return ""
    lines = config_differences({"model": theirs}, {"model": architecture.to_hf()})
    return f"they are of another model ({'; '.join(lines)}): " if lines else ""
