"""Kernels of Qwen3.5 that are compiled while a run starts."""

from __future__ import annotations

from model.families.qwen3_5.architecture import LINEAR_ATTENTION, Qwen35Architecture
from model.kernels.delta_net import DeltaNetShape
from model.network.settings import ModelSettings


def delta_net_shape(architecture: Qwen35Architecture, settings: ModelSettings, tokens: int) -> DeltaNetShape | None:
    """Returns the shape of the gated delta nets on a rank, or None if flash-linear-attention does not compute them.

    Args:
        architecture: The model.
        settings: Its layout, back end and precision.
        tokens: Tokens of a pack. A context-parallel rank has all of them, for some heads.
    """
    language = architecture.language
    if settings.backend != "transformer_engine" or settings.precision != "bf16":
        return None
    if LINEAR_ATTENTION not in language.layer_types:
        return None
    ranks = settings.tensor_parallel * settings.context_parallel
    return DeltaNetShape(
        tokens=tokens,
        key_heads=language.linear_num_key_heads // ranks,
        value_heads=language.linear_num_value_heads // ranks,
        key_width=language.linear_key_head_dim,
        value_width=language.linear_value_head_dim,
        taps=language.linear_conv_kernel_dim,
    )
