"""Compiles a run's kernels while it starts. Needs no torch, because it comes before the imports that take longest."""

from __future__ import annotations

import json
import os
from pathlib import Path

from vlmdata.model.architecture import Architecture
from vlmdata.model.families import architecture_from_hf, preset, spec_of
from vlmdata.model.kernels.ahead import KernelsAhead, can_compile_ahead
from vlmdata.model.kernels.shapes import Kernels, TowerKernels
from vlmdata.model.network.settings import vocabulary_rows
from vlmdata.model.training.settings.config import TrainConfig
from vlmdata.model.training.settings.model_settings import settings_of


def compile_ahead(config: TrainConfig) -> KernelsAhead | None:
    """Starts to compile on the first process of a node.

    Returns:
        None on other processes, for runs without such kernels, and for a hub id, whose architecture is not known yet.
    """
    architecture = _architecture_without_torch(config)
    if architecture is None or os.environ.get("LOCAL_RANK", "0") != "0":
        return None
    if not can_compile_ahead():
        return None
    settings = settings_of(config, architecture, on_gpu=True)
    decoder = spec_of(architecture).kernels(architecture, settings, config.data.capacity)
    if decoder is None:
        return None
    vision, ranks = architecture.vision, settings.vision_parallel
    tower = TowerKernels(
        vision.num_heads // ranks, vision.head_dim, vision.hidden_size, vision.intermediate_size // ranks
    )
    kernels = Kernels(
        decoder,
        None if settings.language_only else tower,
        # Tensor-parallel ranks compute cross-entropy with kernels that the first step compiles.
        vocabulary=vocabulary_rows(architecture.language.vocab_size, 1) if settings.tensor_parallel == 1 else None,
        every=settings.tune_kernels,
    )
    return KernelsAhead(kernels.command())


def needs_compiler(config: TrainConfig) -> bool:
    """Whether torch compiles functions of megatron-core on GPUs. True if the architecture is not known yet."""
    architecture = _architecture_without_torch(config)
    if architecture is None or architecture.language.moe is not None:
        return True
    return config.model.compile or config.model.backend == "torch"


def _architecture_without_torch(config: TrainConfig) -> Architecture | None:
    if config.model.hf is None:
        return preset(config.model.preset)
    path = Path(config.model.hf)
    path = path / "config.json" if path.is_dir() else path
    try:
        return architecture_from_hf(json.loads(path.read_text()), ignore=config.model.ignore_config_fields)
    except (OSError, ValueError, TypeError):  # reported when the model is built
        return None
