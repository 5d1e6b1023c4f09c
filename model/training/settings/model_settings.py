"""Translates a run's configuration to model settings, and their names back in messages. Needs no torch."""

from __future__ import annotations

import dataclasses
from typing import Literal

from vlmdata.model.architecture import Architecture
from vlmdata.model.network.settings import ModelOptions, ModelSettings, SettingError
from vlmdata.model.training.settings.config import ConfigError, TrainConfig, flattened

#: Fields of :class:`ModelSettings`, by their settings in a run's configuration: those that are equal, and the others.
_EQUAL = {each.name: f"model.{each.name}" for each in dataclasses.fields(ModelOptions)} | {
    "tensor_parallel": "parallel.tp",
    "vision_tensor_parallel": "parallel.vision_tp",
    "sequence_parallel": "parallel.sp",
    "context_parallel": "parallel.cp",
    "pipeline_parallel": "parallel.pp",
    "expert_parallel": "parallel.ep",
    "cp_comm_type": "parallel.cp_comm",
    "fp8_recipe": "run.fp8_recipe",
    "storage": "lora.base",
}
_OTHERS = {
    "separate_vision": "parallel.vision_gpus",
    "backend": "model.backend",
    "precision": "run.precision",
    "mtp_layers": "model.mtp",
    "fp8": "run.fp8",
}


def precision_of(config: TrainConfig, on_gpu: bool) -> Literal["fp32", "bf16"]:
    """Returns the data type of parameters, with "auto" resolved."""
    wanted = config.run.precision
    if wanted == "auto":
        return "bf16" if on_gpu else "fp32"
    return wanted


def settings_of(config: TrainConfig, architecture: Architecture, on_gpu: bool) -> ModelSettings:
    """Returns the model settings, with "auto" resolved."""
    model, all_settings = config.model, dict(flattened(dataclasses.asdict(config)))
    backend = model.backend
    if backend == "auto":
        backend = "transformer_engine" if on_gpu else "torch"
    engine = backend == "transformer_engine"
    return ModelSettings(
        **{name: all_settings[setting] for name, setting in _EQUAL.items()},
        separate_vision=config.parallel.vision_gpus > 0,
        backend=backend,
        precision=precision_of(config, on_gpu),
        mtp_layers=architecture.mtp_layers if model.mtp is None else int(model.mtp),
        fused_cross_entropy=engine,
        # Fully sharded weights have no gradient buffers to add to.
        gradient_accumulation_fusion=engine and not config.parallel.fsdp,
        fp8="hybrid" if config.run.fp8 else None,
    )


def in_the_runs_words(error: SettingError) -> ConfigError:
    """Returns the error with the setting names of the run's configuration."""
    return ConfigError(error.renamed(_EQUAL | _OTHERS))
