"""Initial weights of a new run: from a Hugging Face checkpoint, from a distributed checkpoint, or random."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException

from vlmdata.errors import VlmdataError
from vlmdata.model.architecture import Architecture
from vlmdata.model.families import architecture_to_hf
from vlmdata.model.network.quantized import assign, is_quantized
from vlmdata.model.network.wrapping import is_of_wrapper
from vlmdata.model.training.checkpoints.checkpoint import reason
from vlmdata.model.training.checkpoints.model_state import sharded_model
from vlmdata.model.training.checkpoints.run_state import predicts
from vlmdata.model.training.checkpoints.sharded_state import pieces_of, sharded_weights
from vlmdata.model.training.data import RankPlace
from vlmdata.model.training.optimizer.learner import Learner, unwrapped
from vlmdata.model.training.processes.agreement import by_leaders, decided, on_all_ranks
from vlmdata.model.training.settings.config import NO_WEIGHTS, ConfigError, TrainConfig, config_differences
from vlmdata.model.weights.adapter import adapted_in
from vlmdata.model.weights.checksums import require_sound, without_checksum
from vlmdata.model.weights.convert import read_architecture
from vlmdata.model.weights.hf_files import HfTensors, WeightsError
from vlmdata.model.weights.hf_load import fill_from_folder, holds_prediction
from vlmdata.model.weights.places import checkpoints_in, is_distributed

#: Name prefix of multi-token prediction parameters.
_PREDICTOR = "language.predictor."
#: Files to download for a hub id: weights, and the files that `vlmdata convert --like` copies.
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt")


def find_weights(config: TrainConfig) -> Path | None:
    """Returns the folder of a new run's weights, before a model is built; None for random weights. A collective.

    ``model.weights`` decides. If unset, the weights are those of ``model.hf``. For a hub id, one process per node
    downloads them. A ConfigError if ``model.hf`` has no weights and random ones are not requested, or the folder does
    not exist.
    """
    model = config.model
    if model.weights == NO_WEIGHTS or (model.weights is None and model.hf is None):
        return None
    if model.weights is not None:
        return on_all_ranks(partial(_folder_of_weights, Path(model.weights)))
    assert model.hf is not None
    name = model.hf
    # Rank 0 decides, so that ranks with different working folders agree.
    if not decided(lambda: Path(name).exists()):
        by_leaders(partial(_downloaded, name))
        return on_all_ranks(lambda: _with_weights(name, _downloaded(name, again=True)))
    return on_all_ranks(lambda: _with_weights(name, Path(name)))


def _folder_of_weights(path: Path) -> Path:
    if not path.is_dir():
        raise ConfigError(
            f"model.weights {path} is not a folder; give a Hugging Face checkpoint, a run's checkpoint or the output "
            f"of `vlmdata convert`, or --weights {NO_WEIGHTS} for random weights"
        )
    if not _holds_weights(path):
        found = [*checkpoints_in(path), *checkpoints_in(path / "checkpoints")]
        newest = f"{found[-1]} is one" if found else "it contains no *.safetensors either"
        raise ConfigError(f"model.weights {path} is not a distributed checkpoint; {newest}")
    if adapted_in(path) is not None:
        raise ConfigError(
            f"model.weights {path} holds adapters, not a model's weights. Convert it with `vlmdata convert` and give "
            "the result with --lora-weights, or with --merge and give the result with --weights"
        )
    return path


def _with_weights(name: str, folder: Path) -> Path:
    """Returns the folder of ``model.hf`` if it contains weights."""
    if folder.is_dir() and _holds_weights(folder):
        return folder
    what = "is a config.json, which has no weights" if folder.is_file() else "has no weights (*.safetensors)"
    raise ConfigError(
        f"model.hf {name} {what}: --weights {NO_WEIGHTS} trains from random weights, --weights FOLDER from those in "
        "another folder"
    )


def _holds_weights(folder: Path) -> bool:
    return (folder / ".metadata").exists() or any(folder.glob("*.safetensors"))


def _downloaded(name: str, again: bool = False) -> Path:
    """Returns the folder of a hub id's files. ``again`` only looks for those that a process of this node downloaded."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES), local_files_only=again))
    except Exception as error:  # hub, HTTP, full disk
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"model.hf {name}: its weights could not be downloaded: {first}. Download them with `hf download {name} "
            "--local-dir DIR` and give --hf DIR"
        ) from error


def load_weights(
    path: Path, learner: Learner, config: TrainConfig, architecture: Architecture, place: RankPlace
) -> list[str]:
    """Loads weights into the model, for any layout: Hugging Face ``*.safetensors``, or a distributed checkpoint.

    If the folder has no multi-token prediction weights and ``model.mtp`` is true (rather than unset), multi-token
    prediction starts from random weights. Returns notes for the user about the source of the weights. A ConfigError if
    the weights are damaged, or of another model.
    """
    load = _load_distributed if is_distributed(path) else partial(_load_hf, place=place)
    notes = load(path, learner, config, architecture)
    learner.optimizer.reload_model_params()
    return notes + _other_settings(path, config, architecture)


def _other_settings(path: Path, config: TrainConfig, architecture: Architecture) -> list[str]:
    """Returns a line if the weights' model computes differently, such as with other rotary frequencies.

    Its tensors fit, or loading would have failed. Missing multi-token prediction has a line of its own.
    """
    if config.model.weights is None:  # those of the model
        return []
    differences = _differences(path, architecture, config.model.ignore_config_fields)
    lines = [line for line in differences if "mtp" not in line]
    if not lines:
        return []
    return [
        f"the weights in {path} are of a model with other settings ({'; '.join(lines)}); this run uses those of "
        "--preset or --hf. To train the weights' model, select it with --hf"
    ]


def _load_hf(
    path: Path, learner: Learner, config: TrainConfig, architecture: Architecture, place: RankPlace
) -> list[str]:
    def fill() -> list[str]:
        try:
            predicting = predicts(config.model.mtp, architecture)
            lacking = predicting and not holds_prediction(HfTensors(path))
            notes = [_without_prediction(path, fresh=config.model.mtp is True)] if lacking else []
            tower, own = place.vision_rank is not None, config.parallel.vision_tp
            read = fill_from_folder(
                unwrapped(learner.model[0]),
                path,
                architecture,
                tensor_rank=place.tp_rank,
                tensor_parallel=(own or 1) if tower else config.parallel.tp,
                vision_parallel=None if tower else own,
                predicts=predicting and not lacking and not tower,
            )
        except (WeightsError, OSError) as error:
            if other := _difference(path, architecture, config.model.ignore_config_fields):
                other = other.removesuffix(": ")
                raise ConfigError(f"model.weights {path}: {other}. Select their model with --preset or --hf") from error
            raise ConfigError(f"the weights in {path} cannot be loaded: {error}") from error
        return [f"weights: Hugging Face checkpoint {path}, {read / 1e9:,.3f} GB", *notes]

    return on_all_ranks(fill)


def _load_distributed(path: Path, learner: Learner, config: TrainConfig, architecture: Architecture) -> list[str]:
    notes = [f"weights: checkpoint {path}"]
    notes += on_all_ranks(partial(_check_files, path)) if config.run.verify else []
    model = unwrapped(learner.model[0])
    sharded = learner.sharded
    if sharded is None:
        wanted = sharded_model(model, whole=True)
    else:
        wanted = sharded_weights(sharded, pieces_of(sharded, whole=True), saved=False)
    # Adapters keep their initial values.
    wanted = {name: entry for name, entry in wanted.items() if not is_of_wrapper(entry.key)}
    try:
        stored = dist_checkpointing.load_tensors_metadata(str(path))
        _require_same_sizes(path, stored, wanted, architecture)
        if predicts(config.model.mtp, architecture) and not any(name.startswith(_PREDICTOR) for name in stored):
            notes.append(_without_prediction(path, fresh=config.model.mtp is True))
            wanted = {name: entry for name, entry in wanted.items() if not name.startswith(_PREDICTOR)}
        quantized = {name: each for name, each in model.named_parameters() if is_quantized(each) and name in wanted}
        for name, parameter in quantized.items():  # read whole into host memory
            wanted[name].data = torch.empty_like(parameter, device="cpu")
        loaded = dist_checkpointing.load({"model": wanted}, str(path))
        for name, parameter in quantized.items():
            assign(parameter, loaded["model"].pop(name))
    except VlmdataError:
        raise
    except (Exception, CheckpointException) as error:
        raise ConfigError(f"model.weights {path}: {_difference(path, architecture)}{reason(error)}") from error
    if sharded is None:  # otherwise they are read in place
        model.load_state_dict(loaded["model"], strict=False)
    return notes


def _check_files(path: Path) -> list[str]:
    """Checks this rank's share of the files against their checksums. Returns a line if some have none."""
    try:
        return without_checksum(path, require_sound(path, dist.get_rank(), dist.get_world_size()))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.weights {path}: {error}. Convert them again, or use another checkpoint") from error


def _require_same_sizes(
    path: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any], architecture: Architecture
) -> None:
    """Raises an error if tensor sizes differ, which means another model."""
    for entry in nested_values(dict(wanted)):
        theirs = stored.get(getattr(entry, "key", ""))
        if isinstance(entry, ShardedTensor) and theirs is not None and theirs.global_shape != entry.global_shape:
            raise ConfigError(
                f"model.weights {path}: {_difference(path, architecture)}{entry.key} is {tuple(theirs.global_shape)} "
                f"there and {tuple(entry.global_shape)} here. Select their model with --preset or --hf"
            )


def _without_prediction(path: Path, fresh: bool) -> str:
    if fresh:
        return f"{path} has no multi-token prediction weights: they start from random values"
    raise ConfigError(
        f"{path} has no multi-token prediction weights, which this model needs: train without it, --set "
        "model.mtp=false, or from random weights, --set model.mtp=true"
    )


def _difference(path: Path, architecture: Architecture, ignore: Collection[str] = ()) -> str:
    """Describes how the weights' model differs from this one, if known."""
    lines = _differences(path, architecture, ignore)
    return f"they are of another model ({'; '.join(lines)}): " if lines else ""


def _differences(path: Path, architecture: Architecture, ignore: Collection[str] = ()) -> list[str]:
    try:
        theirs = read_architecture(path, ignore)
    except VlmdataError:
        return []
    return config_differences({"model": architecture_to_hf(theirs)}, {"model": architecture_to_hf(architecture)})
