"""Where a run stood when its checkpoint was written, and whether another run can go on from there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from model.architecture import Architecture
from model.families import architecture_to_hf
from model.training.config import ConfigError, config_differences

#: What identifies a group of parameters among the others of its optimizer, whatever the run's settings.
_GROUP = ("is_expert_parallel", "is_decoupled_lr", "wd_mult", "lr_mult")
#: What a group holds that is no setting.
_NO_SETTING = ("params", "step")


@dataclass(frozen=True)
class RunState:
    """Where a run stood.

    Attributes:
        step: Optimizer steps done.
        loader: The loader's state.
        layout: Sizes of the parallel layout.
        config: The configuration, as :meth:`TrainConfig.to_dict`.
        architecture: The model, as a Hugging Face config.
        optimizer: The form of the optimizer's state, see :func:`optimizer_form`; None in checkpoints of old.
    """

    step: int
    loader: dict[str, Any]
    layout: dict[str, int]
    config: dict[str, Any]
    architecture: dict[str, Any]
    optimizer: dict[str, str] | None = None


def read_state(path: Path) -> RunState:
    """Reads where a run stood.

    Raises:
        ConfigError: If the folder is no checkpoint.
    """
    try:
        return RunState(**json.loads((path / "run.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} is not a checkpoint of a run: {error}") from error


def optimizer_form(optimizer: MegatronOptimizer) -> dict[str, str]:
    """What decides whether an optimizer can take another one's state.

    megatron-core's plain and distributed optimizers keep it under different names, in bf16 there are fp32 weights
    beside the model's, and Transformer Engine's Adam counts steps where torch's does not look.

    Returns:
        ``state`` ("plain" or "distributed"), ``weights`` ("bf16" or "fp32"), ``adam`` (the library it is from).
    """
    parts = _parts(optimizer)
    adam = next((type(each.optimizer).__module__ for each in parts if each.optimizer is not None), "none")
    return {
        "state": "distributed" if any(isinstance(each, DistributedOptimizer) for each in parts) else "plain",
        "weights": "bf16" if parts[0].config.bf16 else "fp32",
        "adam": adam.split(".")[0],
    }


def require_resumable(
    path: Path, state: RunState, config: dict[str, Any], architecture: Architecture, optimizer: MegatronOptimizer
) -> None:
    """Sees that a run can go on from a checkpoint, before anything is loaded.

    Args:
        path: The checkpoint.
        state: Its state.
        config: The run that is to go on, as :meth:`TrainConfig.to_dict`.
        architecture: Its model.
        optimizer: Its optimizer.

    Raises:
        ConfigError: Naming all that differs and cannot, and the remedy.
    """
    ours = architecture_to_hf(architecture)
    if state.architecture != ours:
        lines = "; ".join(config_differences({"model": state.architecture}, {"model": ours}))
        raise ConfigError(f"{path} holds another model: {lines}")
    old, new = state.config.get("model", {}), config["model"]
    differences = []
    if sorted(old.get("freeze", [])) != sorted(new["freeze"]):
        differences.append(f"model.freeze: {sorted(old.get('freeze', []))} -> {sorted(new['freeze'])}")
    trained = [predicts(each.get("mtp"), architecture) for each in (old, new)]
    if trained[0] != trained[1]:
        differences.append(f"model.mtp: {trained[0]} -> {trained[1]}".lower())
    spread = [state.layout["ep"], config["parallel"]["ep"]]
    if architecture.language.moe is not None and (spread[0] > 1) != (spread[1] > 1):
        # Experts that are spread have an optimizer of their own.
        differences.append(f"parallel.ep: {spread[0]} -> {spread[1]}")
    before, after = state.optimizer or _form_of_old(path), optimizer_form(optimizer)
    differences += [
        f"optimizer {name}: {before[name]} -> {after[name]}" for name in before if before[name] != after[name]
    ]
    if differences:
        raise ConfigError(
            f"{path} cannot be resumed, as its optimizer state does not fit: {'; '.join(differences)}. Resume as it "
            f"was made, or start a new run from its weights: without --resume, with --weights {path} and another --out"
        )


def keep_settings(loaded: dict[Any, Any], optimizer: MegatronOptimizer) -> None:
    """Puts a run's settings in the place of those that a checkpoint was written with.

    megatron-core finds the checkpoint's groups of parameters by their settings, learning rates among them, and takes
    over the others (betas, epsilon). Everything in a group is a setting but its parameters and the number of steps.

    Args:
        loaded: The optimizer's state as megatron-core loaded it; changed in place.
        optimizer: The run's optimizer.
    """
    parts = _parts(optimizer)
    # The state of a chain of several is by number; of one it is that one's.
    states = [loaded] if len(parts) == 1 else [loaded[number] for number in range(len(parts))]
    for part, state in zip(parts, states, strict=True):
        groups = state["param_groups"] if "param_groups" in state else state["optimizer"]["param_groups"]
        live = {_identity(group): group for group in part.param_groups}
        for group in groups:
            settings = live.get(_identity(group), {})
            group.update({name: value for name, value in settings.items() if name not in _NO_SETTING})


def _parts(optimizer: MegatronOptimizer) -> list[Any]:
    return optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def _identity(group: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(group.get(name) for name in _GROUP)


def predicts(mtp: bool | None, architecture: Architecture) -> bool:
    """Whether multi-token prediction is trained: as ``model.mtp`` says, or else as the architecture has it."""
    return architecture.mtp_layers > 0 if mtp is None else mtp


def _form_of_old(path: Path) -> dict[str, str]:
    """The form of a checkpoint that does not tell it, as far as its content does."""
    state = dist_checkpointing.load_common_state_dict(str(path)).get("optimizer", {})
    state = state.get(0, state)
    if "param_state_sharding_type" in state:
        return {"state": "distributed"}
    weights = "bf16" if "fp32_from_fp16_params" in state else "fp32"
    inner = state["optimizer"] if weights == "bf16" else state
    torchs = {"adam": "torch"} if "common_step" in inner.get("state", {}) else {}
    return {"state": "plain", "weights": weights, **torchs}
