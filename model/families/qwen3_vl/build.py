"""Builds a Qwen3-VL from an architecture and settings.

The process groups are those of :mod:`vlmdata.model.parallel.groups`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from vlmdata.model.families.qwen3_vl.architecture import Qwen3VLArchitecture
from vlmdata.model.families.qwen3_vl.model import Qwen3VL
from vlmdata.model.network import assembly, megatron_config
from vlmdata.model.network.decoder_layer import full_attention, layer_spec
from vlmdata.model.network.deepstack import DeepstackLayer
from vlmdata.model.network.settings import ModelSettings, check_settings


def build_model(architecture: Qwen3VLArchitecture, settings: ModelSettings, **stage: Any) -> Qwen3VL:
    """Builds this rank's part of a model; see :class:`vlmdata.model.families.base.Build`."""
    check_settings(settings, architecture)
    provider, config = assembly.provider_of(settings), language_config(architecture, settings)
    layer = layer_spec(config, provider, full_attention(provider), module=DeepstackLayer)
    model = partial(Qwen3VL, language_only=settings.language_only)
    layers = [layer] * architecture.language.layers
    return assembly.build_stage(architecture, settings, config, provider, layers, model, **stage)


def language_config(architecture: Qwen3VLArchitecture, settings: ModelSettings) -> TransformerConfig:
    """The decoder's ``TransformerConfig``."""
    return megatron_config.language_config(
        architecture,
        settings,
        # A checkpoint key for each layer, so that layers may have different data types, as published files do.
        hetereogenous_dist_checkpoint=True,
    )
