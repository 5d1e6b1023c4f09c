"""What can be told before torch and megatron-core are imported, which takes seconds."""

from __future__ import annotations

import os
from pathlib import Path

from model.presets import PRESETS
from model.training.config import ConfigError, DataConfig, TrainConfig


def require_known(config: TrainConfig) -> None:
    """Refuses a preset or a dataset that there is not.

    A process among several looks for datasets later, together with the others: where one node lacks a folder, all
    must end.

    Raises:
        ConfigError: If no data is named, or the preset is unknown.
        DatasetFormatError: If a folder is no finished dataset.
    """
    require_preset(config)
    require_data_named(config.data)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        return
    from vlmdata.format.manifest import Manifest

    for path in (*config.data.paths, *config.data.eval_paths):
        if "://" not in path:
            Manifest.read(Path(path))


def require_data_named(data: DataConfig) -> None:
    """Refuses a run without data.

    Raises:
        ConfigError: If no data is named.
    """
    if not data.paths:
        raise ConfigError("no data: name a dataset directory with --data, made by `vlmdata preprocess`")


def require_preset(config: TrainConfig) -> None:
    """Refuses a preset that there is not, where one is built.

    Raises:
        ConfigError: If it is unknown.
    """
    if config.model.hf is None and config.model.preset not in PRESETS:
        raise ConfigError(f"there is no preset {config.model.preset!r}; there are {', '.join(PRESETS)}")
