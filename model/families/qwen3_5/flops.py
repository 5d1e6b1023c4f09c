"""FLOP formula of Qwen3.5-VL, in addition to the terms of :mod:`model.flops` that all models share.

Per sample of s true tokens, forward:

- per token: the projections and the convolution of gated delta nets, and the delta rule in its recurrent form (read,
  correct, write: 6 d_k d_v per value head);
- multi-token prediction: its projection, one full-attention layer with feed-forward, and the output layer again.
"""

from __future__ import annotations

from model import flops
from model.families.qwen3_5.architecture import FULL_ATTENTION, Qwen35Architecture, Qwen35LanguageArchitecture


def step_flops(model: Qwen35Architecture, mtp: bool = True, frozen: tuple[str, ...] = ()) -> flops.StepFlops:
    """Returns the FLOP coefficients of an architecture; see :class:`model.families.base.ModelSpec`."""
    language, predicting = model.language, model.mtp_layers if mtp else 0
    full = language.layer_types.count(FULL_ATTENTION)
    linear = language.num_layers - full
    joining = predicting * 2 * 2 * language.hidden_size * language.hidden_size
    return flops.step_flops(
        model,
        frozen,
        full_layers=full + predicting,
        gate=True,
        feed_forward_layers=language.num_layers + predicting,
        outputs=1 + predicting,
        own_projections=joining + linear * _delta_net_per_token(language),
        own_mixing=linear * _delta_rule_per_token(language),
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
