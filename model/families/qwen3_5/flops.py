"""The FLOP formula of a Qwen3.5-VL, beside what :mod:`model.flops` says of all models.

Per sample of s true tokens, forward:

- per token: every matrix a token passes (full attention with its gate, gated delta net, dense layers or the routed and
  shared experts it is sent to, router), the convolution, and the delta rule in its recurrent form (read, correct,
  write: 6 d_k d_v per value head);
- per squared token: causal attention, 2 heads d s^2 per full-attention layer (half of 4 heads d s^2);
- multi-token prediction: its projection, one full-attention layer with feed-forward, and the output layer again.
"""

from __future__ import annotations

from model.families.qwen3_5.architecture import FULL_ATTENTION, Qwen35Architecture, Qwen35LanguageArchitecture
from model.flops import StepFlops, blocks_per_patch, merger_per_patch


def step_flops(model: Qwen35Architecture, mtp: bool = True, frozen: tuple[str, ...] = ()) -> StepFlops:
    """The formula of an architecture.

    Args:
        model: The architecture.
        mtp: Whether multi-token prediction is trained.
        frozen: Parts that are not trained: of "vision", "merger", "language".
    """
    language, vision = model.language, model.vision
    tokens = sum(_layer_per_token(language, kind) for kind in language.layer_types)
    squared = language.layer_types.count(FULL_ATTENTION) * _attention_per_token_squared(language)
    output = 2 * language.hidden_size * language.vocab_size
    heads = 1
    if mtp and model.mtp_layers:
        layers = model.mtp_layers
        projection = 2 * 2 * language.hidden_size * language.hidden_size
        tokens += layers * (projection + _layer_per_token(language, FULL_ATTENTION))
        heads += layers
        squared += layers * _attention_per_token_squared(language)
    trains_vision = "vision" not in frozen
    trains_images = trains_vision or "merger" not in frozen
    of_language = 3 if "language" not in frozen else 2 if trains_images else 1
    of_vision = 3 if trains_vision else 1
    of_merger = 3 if "merger" not in frozen else 2 if trains_vision else 1
    patches = of_vision * blocks_per_patch(vision) + of_merger * merger_per_patch(vision)
    return StepFlops(
        per_token=of_language * tokens,
        per_token_squared=of_language * squared,
        per_patch=patches,
        per_patch_squared=of_vision * vision.depth * 4 * vision.hidden_size,
        per_target=of_language * heads * output,
    )


def _layer_per_token(language: Qwen35LanguageArchitecture, kind: str) -> int:
    mixer = _attention_per_token(language) if kind == FULL_ATTENTION else _delta_net_per_token(language)
    return mixer + _feed_forward_per_token(language)


def _attention_per_token(language: Qwen35LanguageArchitecture) -> int:
    queries = language.num_attention_heads * language.head_dim
    keys = language.num_key_value_heads * language.head_dim
    return 2 * language.hidden_size * (2 * queries + 2 * keys + queries)  # q and gate, k and v, output


def _attention_per_token_squared(language: Qwen35LanguageArchitecture) -> int:
    return 2 * language.num_attention_heads * language.head_dim


def _delta_net_per_token(language: Qwen35LanguageArchitecture) -> int:
    keys = language.linear_num_key_heads * language.linear_key_head_dim
    heads = language.linear_num_value_heads
    values = heads * language.linear_value_head_dim
    projections = 2 * language.hidden_size * (2 * keys + 2 * values + 2 * heads + values)
    convolution = 2 * language.linear_conv_kernel_dim * (2 * keys + values)
    return projections + convolution + 6 * heads * language.linear_key_head_dim * language.linear_value_head_dim


def _feed_forward_per_token(language: Qwen35LanguageArchitecture) -> int:
    width, moe = language.hidden_size, language.moe
    if moe is None:
        return 6 * width * language.intermediate_size
    experts = moe.num_experts_per_tok * moe.intermediate_size + moe.shared_expert_intermediate_size
    return 6 * width * experts + 2 * width * (moe.num_experts + 1)  # router, and the shared expert's gate
