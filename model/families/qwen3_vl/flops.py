"""FLOP formula of Qwen3-VL, in addition to the terms of :mod:`model.flops` that all models share.

Per sample of s true tokens, forward:

- per token: every matrix that a token passes (attention, dense layers or the token's experts, router);
- per squared token: causal attention, 2 heads d s^2 per layer (half of 4 heads d s^2).

Adding image features to hidden states is not counted, like other sums.
"""

from __future__ import annotations

from model.families.qwen3_vl.architecture import Qwen3VLArchitecture
from model.flops import (
    StepFlops,
    Trained,
    attention_per_token,
    attention_per_token_squared,
    feed_forward_per_token,
    vision_per_patch,
    vision_per_patch_squared,
)


def step_flops(model: Qwen3VLArchitecture, mtp: bool = False, frozen: tuple[str, ...] = ()) -> StepFlops:
    """Returns the FLOP coefficients of an architecture.

    Args:
        model: The architecture.
        mtp: Ignored; the family has no multi-token prediction.
        frozen: Parts that are not trained: any of "vision", "merger", "language".
    """
    language, trained = model.language, Trained.without(frozen)
    layer = attention_per_token(language, gate=False) + feed_forward_per_token(language)
    return StepFlops(
        per_token=trained.language_weights * language.layers * layer,
        per_token_squared=trained.language_mixing * language.layers * attention_per_token_squared(language),
        per_patch=vision_per_patch(model.vision, trained),
        per_patch_squared=vision_per_patch_squared(model.vision, trained),
        per_target=trained.language_weights * 2 * language.hidden_size * language.vocab_size,
    )
