"""FLOP formula of Qwen3.5-VL, in addition to the terms of :mod:`model.flops` that all models share.

Per sample of s true tokens, forward:

- per token: every matrix that a token passes (full attention with its gate, gated delta net, dense layers or the
  token's routed and shared experts, router), the convolution, and the delta rule in its recurrent form (read, correct,
  write: 6 d_k d_v per value head);
- per squared token: causal attention, 2 heads d s^2 per full-attention layer (half of 4 heads d s^2);
- multi-token prediction: its projection, one full-attention layer with feed-forward, and the output layer again.
"""

from __future__ import annotations

from model.families.qwen3_5.architecture import FULL_ATTENTION, Qwen35Architecture, Qwen35LanguageArchitecture
from model.flops import (
    StepFlops,
    Trained,
    attention_per_token,
    attention_per_token_squared,
    feed_forward_per_token,
    vision_per_patch,
    vision_per_patch_squared,
)


def step_flops(model: Qwen35Architecture, mtp: bool = True, frozen: tuple[str, ...] = ()) -> StepFlops:
    """Returns the FLOP coefficients of an architecture.

    Args:
        model: The architecture.
        mtp: Whether multi-token prediction is trained.
        frozen: Parts that are not trained: any of "vision", "merger", "language".
    """
    language, trained = model.language, Trained.without(frozen)
    full = language.layer_types.count(FULL_ATTENTION)
    linear = len(language.layer_types) - full
    layers = len(language.layer_types)
    projections = full * attention_per_token(language, gate=True) + linear * _delta_net_per_token(language)
    outputs = 1
    if mtp and model.mtp_layers:
        outputs += model.mtp_layers
        full += model.mtp_layers
        layers += model.mtp_layers
        joining = 2 * 2 * language.hidden_size * language.hidden_size
        projections += model.mtp_layers * (joining + attention_per_token(language, gate=True))
    weights = projections + layers * feed_forward_per_token(language)
    mixing = linear * _delta_rule_per_token(language)
    return StepFlops(
        per_token=trained.language_weights * weights + trained.language_mixing * mixing,
        per_token_squared=trained.language_mixing * full * attention_per_token_squared(language),
        per_patch=vision_per_patch(model.vision, trained),
        per_patch_squared=vision_per_patch_squared(model.vision, trained),
        per_target=trained.language_weights * outputs * 2 * language.hidden_size * language.vocab_size,
    )


def _delta_net_per_token(language: Qwen35LanguageArchitecture) -> int:
    keys = language.linear_num_key_heads * language.linear_key_head_dim
    heads = language.linear_num_value_heads
    values = heads * language.linear_value_head_dim
    projections = 2 * language.hidden_size * (2 * keys + 2 * values + 2 * heads + values)
    convolution = 2 * language.linear_conv_kernel_dim * (2 * keys + values)
    return projections + convolution


def _delta_rule_per_token(language: Qwen35LanguageArchitecture) -> int:
    return 6 * language.linear_num_value_heads * language.linear_key_head_dim * language.linear_value_head_dim
