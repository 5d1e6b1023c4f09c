"""From a configuration to the parts of a run: device, architecture, model."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import torch

from model.architecture import Architecture
from model.network.build import ModelSettings, build_model
from model.network.qwen35_vl import Qwen35VL
from model.network.vision_attention import FlashAttention
from model.presets import PRESETS
from model.training.config import ConfigError, TrainConfig
from model.training.data import RankPlace, tokenizer_of
from model.training.preflight import require_preset

#: What the model's builder calls settings, and what the configuration does.
_OF_THE_RUN = {
    "tensor_parallel": "parallel.tp",
    "vision_tensor_parallel": "parallel.vision_tp",
    "sequence_parallel": "parallel.sp",
    "context_parallel": "parallel.cp",
    "pipeline_parallel": "parallel.pp",
    "expert_parallel": "parallel.ep",
    "vision_attention": "model.vision_attention",
    "fp8": "run.fp8",
}
_SETTING = re.compile(r"(?<![.\w])(" + "|".join(_OF_THE_RUN) + r")\b")


def device_of_this_process() -> torch.device:
    """The CUDA device that torchrun's local rank means, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def parameter_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    """fp32 or bf16."""
    precision = config.run.precision
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"
    return torch.bfloat16 if precision == "bf16" else torch.float32


def architecture_of(config: TrainConfig) -> Architecture:
    """The model that is asked for, able to embed every token of the data.

    A preset takes over the data's vocabulary where the preset is small; a published size keeps its own, which must
    have room for it, and a checkpoint's must be the very same ids.

    Raises:
        ConfigError: If the preset is unknown, or the vocabularies do not fit.
    """
    tokenizer = tokenizer_of(config)
    if config.model.hf is not None:
        try:
            made = Architecture.from_hf(_hf_config(config.model.hf), ignore=config.model.ignore_config_fields)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"model.hf {config.model.hf}: {error}") from error
        if made.image_token_id != tokenizer.image or made.language.vocab_size < tokenizer.vocab_size:
            raise ConfigError(
                f"{config.model.hf} has {made.language.vocab_size} ids and image token {made.image_token_id}, but the "
                f"data was made with tokenizer {tokenizer.name} of {tokenizer.vocab_size} ids and image token "
                f"{tokenizer.image}; preprocess it with --tokenizer {config.model.hf}"
            )
        return made
    require_preset(config)
    preset = PRESETS[config.model.preset]
    size = preset.language.vocab_size if preset.language.vocab_size >= tokenizer.vocab_size else tokenizer.vocab_size
    small = config.model.preset.startswith(("tiny", "proxy"))
    return preset.with_vocabulary(tokenizer, tokenizer.vocab_size if small else size)


def _hf_config(name: str) -> dict[str, object]:
    """The content of a ``config.json``: of a folder, a file, or a hub id."""
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        try:
            return dict(json.loads(path.read_text()))
        except ValueError as error:
            raise ConfigError(f"{path}: not JSON: {error}") from error
    from transformers import AutoConfig

    try:
        return dict(AutoConfig.from_pretrained(name).to_dict())
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(
            f"model.hf {name!r} is no folder with a config.json here, and the hub says: {first}"
        ) from error


def settings_of(config: TrainConfig, architecture: Architecture, device: torch.device) -> ModelSettings:
    """How the model is computed."""
    parallel, model = config.parallel, config.model
    backend = model.backend
    if backend == "auto":
        backend = "transformer_engine" if device.type == "cuda" else "torch"
    mtp = architecture.mtp_layers if model.mtp is None else int(model.mtp)
    return ModelSettings(
        tensor_parallel=parallel.tp,
        vision_tensor_parallel=parallel.vision_tp,
        sequence_parallel=parallel.sp,
        context_parallel=parallel.cp,
        pipeline_parallel=parallel.pp,
        expert_parallel=parallel.ep,
        backend=backend,
        params_dtype=parameter_dtype(config, device),
        mtp_layers=mtp,
        mtp_loss_scale=model.mtp_loss_scale,
        moe_aux_loss=model.moe_aux_loss,
        recompute=model.recompute,
        vision_recompute=model.vision_recompute,
        vision_attention=model.vision_attention,
        cp_comm_type=parallel.cp_comm,
        fused_cross_entropy=backend == "transformer_engine",
        gradient_accumulation_fusion=backend == "transformer_engine",
        fp8="hybrid" if config.run.fp8 else None,
        fp8_recipe=config.run.fp8_recipe,
    )


def computed_by(model: Qwen35VL, settings: ModelSettings, device: torch.device) -> str:
    """A line on what computes the model, which depends on the machine."""
    flash = any(isinstance(module, FlashAttention) for module in model.modules())
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    tower = ", FlashAttention 4 in the vision tower" if flash else ""
    fp8 = f", FP8 ({settings.fp8_recipe})" if settings.fp8 else ""
    return f"back end {settings.backend}{tower}, {str(settings.params_dtype).removeprefix('torch.')}{fp8}, on {where}"


def build(config: TrainConfig, architecture: Architecture, place: RankPlace, device: torch.device) -> Qwen35VL:
    """This rank's part of the model, on its device.

    Raises:
        ConfigError: If settings and architecture do not fit together.
    """
    try:
        model = build_model(
            architecture,
            settings_of(config, architecture, device),
            pre_process=place.first_stage,
            post_process=place.last_stage,
        )
    except (ValueError, ImportError) as error:
        raise ConfigError(_SETTING.sub(lambda name: _OF_THE_RUN[name[0]], str(error))) from error
    return model.to(device)
