"""Builds models from the parts that a family chooses: process groups, decoder, vision tower, routers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from vlmdata.families import family
from vlmdata.model.architecture import Architecture
from vlmdata.model.metrics import MetricSums
from vlmdata.model.network.decoder import Decoder
from vlmdata.model.network.megatron_config import vision_config
from vlmdata.model.network.provider import Provider, TorchProvider, transformer_engine_provider
from vlmdata.model.network.router import BalancedRouter, RouterState
from vlmdata.model.network.saved_model import SavedModel
from vlmdata.model.network.settings import ModelSettings, SettingError, vocabulary_rows
from vlmdata.model.network.vision import VisionTower


def process_groups(settings: ModelSettings) -> ProcessGroupCollection:
    """Returns the process groups of :mod:`vlmdata.model.parallel.groups`.

    Raises:
        ValueError: If their sizes differ from the settings, or experts are tensor parallel.
    """
    groups = ProcessGroupCollection.use_mpu_process_groups()
    if groups.expt_tp.size() > 1:
        raise ValueError(
            f"experts are tensor parallel over {groups.expt_tp.size()} ranks in these process groups, which is not "
            "supported: create the groups with vlmdata.model.parallel.groups.initialize, or with "
            "expert_tensor_parallel_size=1"
        )
    made = {
        "tensor_parallel": groups.tp.size(),
        "context_parallel": groups.cp.size(),
        "pipeline_parallel": groups.pp.size(),
        "expert_parallel": groups.ep.size(),
    }
    for name, size in made.items():
        if getattr(settings, name) != size:
            raise SettingError(
                f"«{name}» {getattr(settings, name)} differs from the process groups (groups: {size}); pass the same "
                "sizes to vlmdata.model.parallel.groups.initialize"
            )
    return groups


def provider_of(settings: ModelSettings, *packages: str) -> Provider:
    """Returns the building blocks of the back end.

    Raises:
        ImportError: If the back end is not installed.
    """
    if settings.backend == "torch":
        return TorchProvider(settings.storage)
    return transformer_engine_provider(*packages, compiled=settings.compile, storage=settings.storage)


def build_stage[M: SavedModel](
    architecture: Architecture,
    settings: ModelSettings,
    config: TransformerConfig,
    provider: Provider,
    layers: Sequence[ModuleSpec],
    model: Callable[..., M],
    *,
    decoder: Callable[..., Decoder] = Decoder,
    pre_process: bool = True,
    post_process: bool = True,
) -> M:
    """Builds a pipeline stage of a model with freshly initialised weights, on its device.

    Args:
        architecture: What to compute.
        settings: How to compute it; already checked.
        config: Configuration of the decoder.
        provider: The back end.
        layers: Specs of all decoder layers, of which this stage takes its own.
        model: Makes the model, as :class:`~vlmdata.model.network.vision_language.VisionLanguageModel`.
        decoder: Makes the decoder.
        pre_process: True for the first stage (vision tower, embedding).
        post_process: True for the last stage (output layer).

    Raises:
        SettingError: If the settings differ from the process groups.
    """
    groups, metrics = process_groups(settings), MetricSums()
    first = get_transformer_layer_offset(config)
    language = decoder(
        config,
        architecture,
        TransformerBlockSubmodules(
            layer_specs=list(layers[first : first + get_num_layers_to_build(config)]),
            layer_norm=provider.layer_norm(rms_norm=True),
        ),
        vocab_rows=vocabulary_rows(architecture.language.vocab_size, settings.tensor_parallel),
        metrics=metrics,
        pre_process=pre_process,
        post_process=post_process,
        pg_collection=groups,
    )
    vision = None
    if pre_process and not (settings.language_only or settings.separate_vision):
        vision = tower_of(architecture, settings, provider, *_vision_groups(settings, groups))
    state = _connected_routers(language, metrics)
    return finished(model(config, architecture, vision, language, metrics, state), settings)


def tower_of(
    architecture: Architecture,
    settings: ModelSettings,
    provider: Provider,
    groups: ProcessGroupCollection,
    sharing_group: Any,
) -> VisionTower:
    """Builds a vision tower.

    Args:
        architecture: Architecture of the whole model.
        settings: Its settings.
        provider: The back end.
        groups: Process groups of the tower.
        sharing_group: Ranks that hold the same weights and encode different images of a common set.
    """
    if provider.storage != "plain":  # only the language model is stored otherwise
        provider = copy.copy(provider)
        provider.storage = "plain"
    return VisionTower(
        vision_config(architecture, settings),
        architecture.vision,
        family(architecture.data_family),
        provider,
        groups,
        sharing_group,
        recompute=settings.vision_recompute,
        attention=settings.vision_attention,
    )


def _connected_routers(language: Any, metrics: MetricSums) -> RouterState | None:
    """Gives all routers of a decoder one state, and returns it; None without experts."""
    routers = [module for module in language.modules() if isinstance(module, BalancedRouter)]
    if language.config.num_moe_experts is None:
        return None
    state = RouterState(metrics=metrics)
    for router in routers:
        router.state = state
    return state


def finished[M: SavedModel](model: M, settings: ModelSettings) -> M:
    """Returns a built model with fused weight gradients, if set, on its device."""
    if settings.gradient_accumulation_fusion:  # Transformer Engine's layers add to the float32 ``main_grad``
        for module in model.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True
    # megatron-core creates some parameters (the shared expert's gate) on the CPU regardless of the configuration.
    return model if model.config.use_cpu_initialization else model.cuda()


def _vision_groups(settings: ModelSettings, groups: ProcessGroupCollection) -> tuple[ProcessGroupCollection, Any]:
    """Returns the tower's process groups and the group of ranks that share its images."""
    alone = groups.expt_tp  # experts are never tensor parallel here, so each rank is alone in its group
    if settings.vision_parallel == settings.tensor_parallel:
        return groups, alone
    of_tower = copy.copy(groups)
    of_tower.tp = alone
    return of_tower, groups.tp
