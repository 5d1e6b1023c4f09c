"""Builds a Qwen3-VL from an architecture and settings.

The process groups are those of :mod:`model.parallel.groups`.
"""

from __future__ import annotations

from megatron.core.transformer.transformer_config import TransformerConfig

from model.families.qwen3_vl.architecture import Qwen3VLArchitecture
from model.families.qwen3_vl.model import Qwen3VL
from model.families.qwen3_vl.sizes import check
from model.metrics import MetricSums
from model.network import assembly, megatron_config
from model.network.decoder import Decoder
from model.network.decoder_layer import full_attention, layer_spec
from model.network.deepstack import DeepstackLayer
from model.network.settings import ModelSettings, vocabulary_rows


def build_model(
    architecture: Qwen3VLArchitecture,
    settings: ModelSettings,
    *,
    pre_process: bool = True,
    post_process: bool = True,
) -> Qwen3VL:
    """Builds this rank's part of a model with freshly initialised weights.

    Args:
        architecture: What to compute.
        settings: How to compute it.
        pre_process: True for the first stage (vision tower, embedding).
        post_process: True for the last stage (output layer).

    Raises:
        SettingError: If the settings contradict each other, the architecture or the process groups.
        ImportError: If the back end is not installed.
    """
    check(settings, architecture)
    groups = assembly.process_groups(settings)
    provider = assembly.provider_of(settings)
    config = language_config(architecture, settings)
    layer = layer_spec(config, provider, full_attention(provider), DeepstackLayer)
    metrics = MetricSums()
    language = Decoder(
        config,
        architecture,
        assembly.block_of(config, provider, [layer] * architecture.language.layers),
        vocab_rows=vocabulary_rows(architecture.language.vocab_size, settings.tensor_parallel),
        metrics=metrics,
        pre_process=pre_process,
        post_process=post_process,
        pg_collection=groups,
    )
    vision = assembly.build_tower(architecture, settings, provider, groups) if pre_process else None
    state = assembly.connected_routers(language, metrics)
    return assembly.finished(
        Qwen3VL(config, architecture, vision, language, metrics, state, language_only=settings.language_only), settings
    )


def language_config(architecture: Qwen3VLArchitecture, settings: ModelSettings) -> TransformerConfig:
    """The decoder's ``TransformerConfig``."""
    return megatron_config.language_config(
        architecture,
        settings,
        # A checkpoint key for each layer, so that layers may have different data types, as published files do.
        hetereogenous_dist_checkpoint=True,
    )
