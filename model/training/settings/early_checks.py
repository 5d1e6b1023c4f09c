"""Checks a configuration before importing torch and megatron-core, which takes up to 20 seconds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vlmdata.families import family
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import JOINED
from vlmdata.loader.mixture import expanded, is_mixture
from vlmdata.locations import is_url
from vlmdata.model.architecture import Architecture
from vlmdata.model.families import preset, spec_of
from vlmdata.model.network.settings import SettingError
from vlmdata.model.parallel.layout import require_layout
from vlmdata.model.training.settings.config import ConfigError, DataConfig, TrainConfig
from vlmdata.model.training.settings.model_settings import in_the_runs_words, settings_of
from vlmdata.storage.versions import place_of_version


def check_early(config: TrainConfig) -> None:
    """Raises an error for problems that need no torch to detect: in data, preset, layout, or incompatible settings.

    With several processes, datasets are checked later by all ranks together: if one node lacks a folder, all must end.
    The settings of a checkpoint (``model.hf``) are checked when it is built, since transformers reads its
    ``config.json``.

    Raises:
        ConfigError: If a setting is invalid.
        DatasetFormatError: If a folder is not a finished dataset.
        UsageError: If a mixture file cannot be read.
    """
    architecture = preset_of(config)
    require_data_named(config.data)
    _require_folder("run.out", config.run.out)
    _require_layout(config)
    if architecture is not None:
        _require_settings(config, architecture)
    if mixtures := [path for path in config.data.eval_paths if is_mixture(path)]:
        raise ConfigError(
            f"data.eval_paths {mixtures[0]}: an evaluation uses each sample of a dataset once, without weights; give "
            "the datasets of this mixture file"
        )
    if os.environ.get("WORLD_SIZE", "1") != "1":
        return
    for path in (*expanded(config.data.paths), *config.data.eval_paths):
        if not is_url(str(path)):
            manifest = Manifest.read(Path(place_of_version(str(path))))
            if architecture is not None:
                require_data_family(architecture, manifest, str(path))


def require_data_named(data: DataConfig) -> None:
    """Raises an error for a run without data.

    Raises:
        ConfigError: If no data is given.
    """
    if not data.paths:
        raise ConfigError("no data: give a dataset directory with --data, written by `vlmdata preprocess`, or --config")


def _require_folder(setting: str, value: str) -> None:
    if not value:
        raise ConfigError(f'{setting} is empty, like "$OUT" if OUT is not set; "." is the current folder')
    if "://" in value:
        raise ConfigError(
            f"{setting} is {value!r}: a run's folder must be on a file system. Mount the storage, or copy the folder "
            "there after the run"
        )


def preset_of(config: TrainConfig) -> Architecture | None:
    """Returns the preset that the run builds; None with ``model.hf``.

    Raises:
        ConfigError: If the preset is unknown.
    """
    try:
        return None if config.model.hf is not None else preset(config.model.preset)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def require_data_family(architecture: Architecture, manifest: Manifest, data: str) -> None:
    """Raises an error for data with the patches, pixels, placeholders or positions of another model.

    The family must be that of the model. The constants with which images and videos were made, which the manifest
    records, must be those of this family and of the model's vision tower.

    Raises:
        ConfigError: If the model cannot read it.
    """
    found, wanted = manifest.model_family.name, architecture.data_family
    if found != wanted:
        raise ConfigError(
            f"{data} is for the model family {found}, but the model needs {wanted}: "
            f"preprocess it with --family {wanted}, or choose a model of the family {found}"
        )
    rules, vision = family(wanted), architecture.vision
    constants = {
        "patch_size": vision.patch_size,
        "merge_size": vision.spatial_merge_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "image_mean": list(rules.image_mean),
        "image_std": list(rules.image_std),
    }
    for recorded in _processors(manifest):
        for name, value in constants.items():
            if name in recorded and recorded[name] != value:
                raise ConfigError(
                    f"{data}: its images were made with {name} {recorded[name]}, but the model needs {value}. "
                    "Preprocess it again for this model, or choose the model for which it was made"
                )


def _processors(manifest: Manifest) -> list[Mapping[str, Any]]:
    """Returns the constants of images that a dataset records; a joined one records those of each part."""
    configs = [manifest.config, *manifest.config.get(JOINED, [])]
    return [each.get("fingerprints", {}).get("processor", {}) for each in configs]


def _require_layout(config: TrainConfig) -> None:
    """Raises an error if the layout or the global batch does not fit the number of processes."""
    parallel, world = config.parallel, int(os.environ.get("WORLD_SIZE", "1"))
    try:
        require_layout(world, **parallel.sizes)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if config.optimizer.offload and config.run.async_save:
        raise ConfigError(
            "optimizer.offload does not go together with run.async_save true: the process that writes in the "
            "background has no moments then. Leave run.async_save out"
        )
    if parallel.fsdp:
        _require_shardable(config)
    elif config.optimizer.moments != "fp32" or config.optimizer.offload:
        settings = config.optimizer
        name = f"moments={settings.moments}" if settings.moments != "fp32" else "offload=true"
        raise ConfigError(
            f"optimizer.{name} needs fully sharded parameters: add --set parallel.fsdp=true, which also works with one "
            "process"
        )
    replicas = (world - parallel.vision_gpus) // (parallel.tp * parallel.cp * parallel.pp)
    if config.data.global_batch % replicas:
        raise ConfigError(
            f"data.global_batch {config.data.global_batch} is not a multiple of the {replicas} data-parallel ranks: "
            f"choose a multiple of {replicas}"
        )


def _require_shardable(config: TrainConfig) -> None:
    """Raises an error for settings that do not go together with fully sharded parameters."""
    parallel = config.parallel
    reasons = {
        "parallel.pp": (
            parallel.pp > 1,
            "each micro-batch of a pipeline would gather a stage's weights again. Use --tp, --cp or --ep with it, or "
            "--pp without it",
        ),
        "parallel.vision_gpus": (
            parallel.vision_gpus > 0,
            "a rank of the tower alone may have no image to gather weights for. Leave it out: the tower is sharded "
            "over all ranks",
        ),
        "parallel.tp": (
            parallel.tp > 1 and not parallel.sp,
            "the delta net's output norm needs sequence parallelism then. Add --sp",
        ),
        "run.fp8": (
            config.run.fp8,
            "Transformer Engine would keep an FP8 copy of all weights on each rank. Train in bf16, or without "
            "parallel.fsdp",
        ),
        "lora.base": (
            config.lora.base != "plain",
            "weights in 4 bits are not gathered from parts. They take less memory anyway: leave out parallel.fsdp, and "
            "use --tp or --pp if one GPU is too small",
        ),
        "optimizer.distributed": (
            config.optimizer.distributed is not None,
            "it shards the optimizer state with the weights. Leave this setting out",
        ),
        "optimizer.overlap": (
            config.optimizer.overlap is not None,
            "gradients are always reduced during the backward pass then. Leave this setting out",
        ),
    }
    for name, (refused, reason) in reasons.items():
        if refused:
            group, _, key = name.partition(".")
            value = str(getattr(getattr(config, group), key)).lower()
            raise ConfigError(f"parallel.fsdp does not go together with {name} {value}: {reason}")


def _require_settings(config: TrainConfig, architecture: Architecture) -> None:
    """Raises an error for settings that neither GPU nor CPU supports. "auto" counts as GPU; detecting one is slow."""
    try:
        spec_of(architecture).check(settings_of(config, architecture, on_gpu=True), architecture)
    except SettingError as error:
        raise in_the_runs_words(error) from error
