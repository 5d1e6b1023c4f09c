"""The position of a run at a checkpoint, and the check that a run can resume from it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.optimizer import Adam, ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from vlmdata import StreamingLoader
from vlmdata.model.architecture import Architecture
from vlmdata.model.families import architecture_to_hf
from vlmdata.model.training.checkpoints.folder import step_of
from vlmdata.model.training.optimizer.learner import Learner
from vlmdata.model.training.settings.config import DECIDE_WHAT_IS_TRAINED, ConfigError, TrainConfig, config_differences
from vlmdata.model.weights.checksums import require_unchanged, with_checksum

#: Fields that identify a parameter group of an optimizer, independent of the run's settings.
_GROUP = ("is_expert_parallel", "is_decoupled_lr", "wd_mult", "lr_mult")
#: Fields of a group that are not settings.
_NO_SETTING = ("params", "step")


@dataclass(frozen=True)
class RunState:
    """The position of a run at a checkpoint."""

    step: int  # optimizer steps completed
    loader: dict[str, Any]  # the loader's state
    layout: dict[str, int]  # sizes of the parallel layout
    config: dict[str, Any]  # the configuration, as :meth:`TrainConfig.to_dict`
    architecture: dict[str, Any]  # the model, as a Hugging Face config
    #: Form of the optimizer's state, see :func:`optimizer_form`; None in old checkpoints.
    optimizer: dict[str, str] | None = None
    #: Digest of the weights that adapters belong to; None without adapters.
    base: str | None = None
    #: Checksum of the other values; None in old checkpoints.
    checksum: str | None = None

    def write(self, folder: Path) -> None:
        """Writes ``run.json``, with its checksum."""
        values = {name: value for name, value in vars(self).items() if name != "checksum"}
        (folder / "run.json").write_text(json.dumps(with_checksum(values), indent=1) + "\n")


def read_state(path: Path) -> RunState:
    """Reads the run state of a checkpoint; a ValueError if its run.json is missing, damaged or of another folder."""
    try:
        values = json.loads((path / "run.json").read_text())
        require_unchanged(values)
        state = RunState(**values)
    except OSError as error:
        raise ValueError(f"run.json cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"run.json does not describe a run: {error}") from error
    if state.step != step_of(path):
        raise ValueError(f"run.json is of step {state.step}, but the folder of step {step_of(path)}")
    return state


def require_planned(state: RunState, loader: StreamingLoader) -> None:
    """Checks that the steps of the data up to a loaded position are those of the run; a ValueError if they are not.

    A checkpoint without a checksum may have other numbers than were written. Plans all epochs up to there.
    """
    at = loader.position
    # Each epoch has a step, so a damaged number is not planned.
    made = loader.plans.steps_before(at.epoch) + at.step if at.epoch <= state.step else None
    if made != state.step or at.micro_batch:
        place = ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(at).items())
        raise ValueError(f"run.json is of step {state.step}, but its loader is at {place}, which is another step")


def changes_since(state: RunState, config: dict[str, Any]) -> list[str]:
    """Lists the settings that changed since a checkpoint, as ``optimizer.lr: 0.001 -> 0.0001``.

    Newer settings have no entry in the checkpoint. They count as unset there, because they had no effect then.
    """
    old = {name: group | state.config.get(name, {}) for name, group in TrainConfig().to_dict().items()}
    return config_differences(old, config)


def optimizer_form(learner: Learner) -> dict[str, str]:
    """Returns what decides whether an optimizer can load the state of another.

    That is ``state`` ("plain" or "distributed"): megatron-core stores these under different names. ``weights``: with
    "bf16" there are fp32 weights in addition to the model's. ``adam``, the library of the optimizer: Transformer
    Engine's Adam stores its step count where torch's does not look.
    """
    parts = learner.optimizer.chained_optimizers
    adam = next((type(each.optimizer).__module__ for each in parts if each.optimizer is not None), "none")
    if learner.sharded is not None:
        # The form of the other layouts, which take their Adam from megatron-core's choice.
        return {**learner.sharded.form, "adam": Adam.__module__.split(".")[0]}
    return {
        "state": "distributed" if any(isinstance(each, DistributedOptimizer) for each in parts) else "plain",
        "weights": "bf16" if parts[0].config.bf16 else "fp32",
        "adam": adam.split(".")[0],
    }


def require_resumable(
    path: Path, state: RunState, config: dict[str, Any], architecture: Architecture, learner: Learner
) -> None:
    """Checks, before anything is loaded, that a run can resume from a checkpoint. A ConfigError names all differences.

    A fully sharded learner loads any form of state with weights of the same precision.
    """
    ours = architecture_to_hf(architecture)
    if state.architecture != ours:
        lines = "; ".join(config_differences({"model": state.architecture}, {"model": ours}))
        raise ConfigError(
            f"{path} contains another model: {lines}. Resume with the model of {path / 'config.toml'}, or start a new "
            "run with another --out"
        )
    stored = [each.get("lora", {}).get("base", "plain") for each in (state.config, config)]
    if stored[0] != stored[1]:
        raise ConfigError(
            f"{path} holds adapters of a base with lora.base {stored[0]}, but this run has lora.base {stored[1]}: "
            f"resume with --set lora.base={stored[0]}, or write the adapters with `vlmdata convert` and start a new "
            "run from them with --lora-weights and another --out"
        )
    before, now = (_decisive(each, architecture) for each in (state.config, config))
    settings: dict[str, list[Any]] = {name: [str(each[name]).lower() for each in (before, now)] for name in now}
    layouts = state.layout, config["parallel"]
    spread = [max(layout["tp"], layout["ep"]) > 1 for layout in layouts]
    if architecture.language.moe is not None and spread[0] != spread[1]:
        # megatron-core gives experts an optimizer of their own if their ranks differ from those of the other layers:
        # with expert parallelism, and with tensor parallelism, which divides no expert.
        settings |= {f"parallel.{name}": [layout[name] for layout in layouts] for name in ("tp", "ep")}
    form, here = form_of(path, state), optimizer_form(learner)
    decisive = ("weights",) if learner.sharded is not None else tuple(form)
    settings |= {f"optimizer {name}": [form[name], here[name]] for name in decisive if name in form}
    differences = [f"{name}: {was} -> {is_now}" for name, (was, is_now) in settings.items() if was != is_now]
    if differences:
        raise ConfigError(
            f"{path} cannot be resumed, because its optimizer state does not fit: {'; '.join(differences)}. Resume "
            f"with the old settings, or {_new_run(path, state, any(line.startswith('lora.') for line in differences))}"
        )


def _new_run(path: Path, state: RunState, other_adapters: bool = False) -> str:
    """Describes how a new run starts from a checkpoint. Its adapters start one with adapters of the same form only."""
    lora = state.config.get("lora", {})
    if lora.get("rank") is None:
        return f"start a new run from its weights: without --resume, with --weights {path} and another --out"
    if not other_adapters:
        return (
            f"start a new run from its adapters: write them with `vlmdata convert {path} --out DIR`, and give "
            "--lora-weights DIR and another --out, without --resume"
        )
    if lora.get("base", "plain") != "plain":
        return f"start a new run with another --out (adapters of a base in {lora['base']} cannot be merged into it)"
    return (
        f"start a new run from its weights: merge the adapters into them with `vlmdata convert {path} --merge --out "
        "DIR`, and give --weights DIR and another --out, without --resume"
    )


def _decisive(config: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Returns the settings that decide which parameters are trained. What a checkpoint lacks has its default."""
    found: dict[str, Any] = {}
    for name in DECIDE_WHAT_IS_TRAINED:
        group, _, key = name.partition(".")
        value = config.get(group, {}).get(key, getattr(getattr(TrainConfig(), group), key))
        found[name] = sorted(value) if isinstance(value, list | tuple) else value
    return found | {"model.mtp": predicts(found["model.mtp"], architecture)}


def unsuitable(path: Path, state: RunState, why: str, changes: Sequence[str]) -> ConfigError:
    """Returns the error for a checkpoint whose files are sound, but which does not fit the run."""
    changed = f"Changed since: {'; '.join(changes)}. " if changes else "No setting has changed. "
    return ConfigError(
        f"{path} cannot be loaded by this run: {why}. Its files equal their checksums, so settings or versions of "
        f"libraries do not fit. {changed}Resume as it was begun, with --config {path / 'config.toml'} --resume, or "
        f"{_new_run(path, state)}"
    )


def form_of(path: Path, state: RunState) -> dict[str, str]:
    """Returns the form of a checkpoint's optimizer state."""
    return state.optimizer or _form_of_old(path)


def keep_settings(loaded: dict[Any, Any], optimizer: ChainedOptimizer) -> None:
    """Replaces a checkpoint's optimizer settings by the run's, in the state that megatron-core loaded.

    megatron-core finds the checkpoint's parameter groups by their settings, learning rates among them, and takes the
    other settings (betas, epsilon) from the checkpoint. All fields of a group except parameters and step are settings.
    """
    parts = optimizer.chained_optimizers
    # A chain of several optimizers has states by number; a single one has its state directly.
    states = [loaded] if len(parts) == 1 else [loaded[number] for number in range(len(parts))]
    for part, state in zip(parts, states, strict=True):
        groups = state["param_groups"] if "param_groups" in state else state["optimizer"]["param_groups"]
        live = {_identity(group): group for group in part.param_groups}
        for group in groups:
            settings = live.get(_identity(group), {})
            group.update({name: value for name, value in settings.items() if name not in _NO_SETTING})


def _identity(group: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(group.get(name) for name in _GROUP)


def predicts(mtp: bool | None, architecture: Architecture) -> bool:
    """True if multi-token prediction is trained: set by ``model.mtp``, or else by the architecture."""
    return architecture.mtp_layers > 0 if mtp is None else mtp


def _form_of_old(path: Path) -> dict[str, str]:
    """Returns the form of an old checkpoint that does not record it, as far as its content shows."""
    state = dist_checkpointing.load_common_state_dict(str(path)).get("optimizer", {})
    state = state.get(0, state)
    if "param_state_sharding_type" in state:
        return {"state": "distributed"}
    weights = "bf16" if "fp32_from_fp16_params" in state else "fp32"
    inner = state["optimizer"] if weights == "bf16" else state
    torchs = {"adam": "torch"} if "common_step" in inner.get("state", {}) else {}
    return {"state": "plain", "weights": weights, **torchs}
