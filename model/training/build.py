"""Builds the parts of a run from its configuration: device, architecture, model."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vlmdata.model.architecture import Architecture
from vlmdata.model.families import adopts_vocabulary, architecture_from_hf, spec_of
from vlmdata.model.lora.attach import Plan, attach, fill, plan_of
from vlmdata.model.lora.peft_files import read_adapter
from vlmdata.model.network.grouped import layers_out_of_line
from vlmdata.model.network.quantized import held_by, is_quantized
from vlmdata.model.network.settings import ModelSettings, SettingError
from vlmdata.model.network.vision_attention import FlashAttention
from vlmdata.model.training.data import RankPlace, manifest_of
from vlmdata.model.training.settings.config import ConfigError, TrainConfig
from vlmdata.model.training.settings.early_checks import preset_of, require_data_family
from vlmdata.model.training.settings.model_settings import in_the_runs_words, precision_of, settings_of
from vlmdata.model.weights.convert import read_architecture
from vlmdata.wording import counted

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule


def device_of_this_process() -> torch.device:
    """Returns the CUDA device of torchrun's local rank, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def parameter_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    """Returns the data type of parameters."""
    return torch.bfloat16 if precision_of(config, device.type == "cuda") == "bf16" else torch.float32


def architecture_of(config: TrainConfig, resumed: Path | None = None) -> Architecture:
    """Returns the configured architecture, with an embedding for every token of the data.

    A small preset adopts the data's vocabulary. A published size keeps its own vocabulary, which must be at least as
    large. A checkpoint must have the same ids as the data.

    Args:
        config: The run.
        resumed: Checkpoint of the run to resume from. It tells the architecture if ``model.hf`` is gone.

    Raises:
        ConfigError: If the preset is unknown, the data is for another model family, or the vocabularies do not
            fit.
    """
    manifest = manifest_of(config)
    tokenizer = manifest.tokenizer
    if config.model.hf is not None:
        made = _architecture_of_hf(config.model.hf, config.model.ignore_config_fields, resumed)
        require_data_family(made, manifest, config.data.paths[0])
        if made.image_token_id != tokenizer.image or made.language.vocab_size < tokenizer.vocab_size:
            raise ConfigError(
                f"{config.model.hf} has {made.language.vocab_size} ids and image token {made.image_token_id}, but the "
                f"data was made with tokenizer {tokenizer.name} of {tokenizer.vocab_size} ids and image token "
                f"{tokenizer.image}; preprocess it with --tokenizer {config.model.hf}"
            )
        return made
    chosen = preset_of(config)
    assert chosen is not None
    require_data_family(chosen, manifest, config.data.paths[0])
    size = max(chosen.language.vocab_size, tokenizer.vocab_size)
    return chosen.with_vocabulary(tokenizer, tokenizer.vocab_size if adopts_vocabulary(config.model.preset) else size)


def _architecture_of_hf(name: str, ignore: Collection[str], resumed: Path | None) -> Architecture:
    try:
        found = _hf_config(name)
    except ConfigError:
        if resumed is None or not (resumed / "run.json").is_file():
            raise
        return read_architecture(resumed)
    try:
        return architecture_from_hf(found, ignore=ignore)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"model.hf {name}: {error}") from error


def _hf_config(name: str) -> dict[str, object]:
    """Reads the content of ``config.json``, given a folder, a file or a hub id."""
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ConfigError(f"model.hf {name!r}: the folder has no config.json")
    if path.is_file():
        try:
            return dict(json.loads(path.read_text()))
        except ValueError as error:
            raise ConfigError(f"{path}: not JSON: {error}") from error
    from transformers import AutoConfig

    try:
        return dict(AutoConfig.from_pretrained(name, trust_remote_code=False).to_dict())
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise ConfigError(
            f"model.hf {name!r} is not a local folder with a config.json, and the hub reports: {first}"
        ) from error


def computed_by(model: MegatronModule, settings: ModelSettings, device: torch.device) -> str:
    """Formats a line about what computes the model on this machine."""
    flash = any(isinstance(module, FlashAttention) for module in model.modules())
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    tower = ", FlashAttention 4 in the vision tower" if flash else ""
    fp8 = f", FP8 ({settings.fp8_recipe})" if settings.fp8 else ""
    apart = layers_out_of_line(model)
    experts = (
        f"; {counted(apart, 'layer')} of experts multiplied expert by expert, which is slower: with this number of "
        "replicas, padding in the gradient buffers separates the weights"
        if apart
        else ""
    )
    dtype = str(settings.params_dtype).removeprefix("torch.")
    return f"back end {settings.backend}{tower}, {dtype}{fp8}, on {where}{experts}"


def frozen_storage(model: MegatronModule) -> str:
    """Formats a line about how this rank stores its frozen weights, and their bytes."""
    sums: dict[str, list[int]] = {}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            kind = "NF4" if is_quantized(parameter) else str(parameter.dtype).removeprefix("torch.")
            found = sums.setdefault(kind, [0, 0])
            found[0] += 1
            found[1] += sum(tensor.nbytes for tensor in held_by(parameter))
    parts = [f"{counted(count, 'tensor')} in {kind}, {size / 1e9:,.3f} GB" for kind, (count, size) in sums.items()]
    return f"frozen weights of rank 0: {'; '.join(parts) or 'none'}"


def adapt(config: TrainConfig, architecture: Architecture, model: MegatronModule, resumed: bool = False) -> Plan | None:
    """Gives this rank's part of a model the adapters of the run, and freezes its weights. None without LoRA.

    A new run starts from ``lora.weights``, if set.

    Raises:
        LoraError: If a target fits nothing, or ``lora.weights`` is another adapter.
    """
    options, mtp = config.lora, config.model.mtp is not False and architecture.mtp_layers > 0
    if options.rank is None:
        return None
    plan = plan_of(architecture, options, mtp=mtp, language_only=config.model.language_only)
    attach(model, plan, config.run.seed)
    if options.weights is not None and not resumed:
        fill(model, read_adapter(Path(options.weights), plan.sites, options))
    return plan


def build(config: TrainConfig, architecture: Architecture, place: RankPlace, device: torch.device) -> MegatronModule:
    """Builds this rank's part of the model on its device.

    Raises:
        ConfigError: If settings and architecture are incompatible.
    """
    try:
        settings = settings_of(config, architecture, device.type == "cuda")
        if place.vision_rank is not None:
            from vlmdata.model.network.vision_model import build_vision_model

            spec_of(architecture).check(settings, architecture)
            model: MegatronModule = build_vision_model(architecture, settings)
        else:
            model = spec_of(architecture).build(
                architecture, settings, pre_process=place.first_stage, post_process=place.last_stage
            )
    except SettingError as error:
        raise in_the_runs_words(error) from error
    except (ValueError, ImportError) as error:
        raise ConfigError(str(error)) from error
    return model.to(device)
