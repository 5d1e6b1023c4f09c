"""Kernels of Qwen3.5 that are compiled while a run starts."""

from __future__ import annotations

from model.families.qwen3_5.architecture import LINEAR_ATTENTION, Qwen35Architecture, Qwen35LanguageArchitecture
from model.kernels.shapes import AttentionShape, DecoderKernels, DeltaNetShape
from model.network.settings import ModelSettings


def decoder_kernels(architecture: Qwen35Architecture, settings: ModelSettings, tokens: int) -> DecoderKernels | None:
    """Returns the kernels of the decoder on a rank, or None if flash-linear-attention does not compute delta nets."""
    language = architecture.language
    if settings.backend != "transformer_engine" or settings.precision != "bf16":
        return None
    if LINEAR_ATTENTION not in language.layer_types:
        return None
    ranks = settings.tensor_parallel * settings.context_parallel
    delta_net = DeltaNetShape(
        tokens=tokens,
        key_heads=language.linear_num_key_heads // ranks,
        value_heads=language.linear_num_value_heads // ranks,
        key_width=language.linear_key_head_dim,
        value_width=language.linear_value_head_dim,
        taps=language.linear_conv_kernel_dim,
    )
    return DecoderKernels(delta_net, None if settings.compile else _attention_shape(language, settings))


def _attention_shape(language: Qwen35LanguageArchitecture, settings: ModelSettings) -> AttentionShape:
    ranks = settings.tensor_parallel
    groups = language.num_key_value_heads // ranks
    return AttentionShape(
        groups=groups,
        queries=language.num_attention_heads // ranks // max(1, groups),
        width=language.head_dim,
        rotated=language.rotary_dim,
        gated=True,
        zero_centered=True,
        feed_forward=language.intermediate_size // ranks if language.moe is None else None,
    )
