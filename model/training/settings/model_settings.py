"""Translates a run's configuration to model settings, and their names back in messages. Needs no torch."""

from __future__ import annotations

from typing import Literal

from model.architecture import Architecture
from model.network.settings import ModelSettings, SettingError
from model.training.settings.config import ConfigError, TrainConfig

#: Fields of :class:`ModelSettings`, by their settings in a run's configuration.
_OF_THE_RUN = {
    "tensor_parallel": "parallel.tp",
    "vision_tensor_parallel": "parallel.vision_tp",
    "separate_vision": "parallel.vision_gpus",
    "language_only": "model.language_only",
    "sequence_parallel": "parallel.sp",
    "context_parallel": "parallel.cp",
    "pipeline_parallel": "parallel.pp",
    "expert_parallel": "parallel.ep",
    "recompute": "model.recompute",
    "backend": "model.backend",
    "precision": "run.precision",
    "mtp_layers": "model.mtp",
    "vision_attention": "model.vision_attention",
    "fp8": "run.fp8",
    "fp8_recipe": "run.fp8_recipe",
}


def precision_of(config: TrainConfig, on_gpu: bool) -> Literal["fp32", "bf16"]:
    """Returns the data type of parameters, with "auto" resolved."""
    wanted = config.run.precision
    if wanted == "auto":
        return "bf16" if on_gpu else "fp32"
    return wanted


def settings_of(config: TrainConfig, architecture: Architecture, on_gpu: bool) -> ModelSettings:
    """Returns the model settings, with "auto" resolved."""
    parallel, model = config.parallel, config.model
    backend = model.backend
    if backend == "auto":
        backend = "transformer_engine" if on_gpu else "torch"
    mtp = architecture.mtp_layers if model.mtp is None else int(model.mtp)
    return ModelSettings(
        tensor_parallel=parallel.tp,
        vision_tensor_parallel=parallel.vision_tp,
        separate_vision=parallel.vision_gpus > 0,
        sequence_parallel=parallel.sp,
        context_parallel=parallel.cp,
        pipeline_parallel=parallel.pp,
        expert_parallel=parallel.ep,
        backend=backend,
        precision=precision_of(config, on_gpu),
        language_only=model.language_only,
        mtp_layers=mtp,
        mtp_loss_scale=model.mtp_loss_scale,
        moe_aux_loss=model.moe_aux_loss,
        recompute=model.recompute,
        vision_recompute=model.vision_recompute,
        vision_attention=model.vision_attention,
        cp_comm_type=parallel.cp_comm,
        fused_cross_entropy=backend == "transformer_engine",
        # Fully sharded weights have no gradient buffers to add to.
        gradient_accumulation_fusion=backend == "transformer_engine" and not parallel.fsdp,
        fp8="hybrid" if config.run.fp8 else None,
        fp8_recipe=config.run.fp8_recipe,
        compile=model.compile,
        tune_kernels=model.tune_kernels,
    )


def in_the_runs_words(error: SettingError) -> ConfigError:
    """Returns the error with the setting names of the run's configuration."""
    return ConfigError(error.renamed(_OF_THE_RUN))
