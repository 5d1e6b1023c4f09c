"""What a sample costs to train on: a FLOP estimate that balances packs across ranks.

    cost(sample) = per_token * s + per_token_squared * s^2 + per_patch * p + per_patch_squared * sum over images of
    p_i^2

with s the aligned token length and p the vision patches. The coefficients follow from the model's dimensions
(:func:`cost_model_from_dims`). Everything is an integer: floating-point sums may differ in the last bit between
machines, and ranks that break a tie differently would train on different packs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Costs are summed over whole steps; in units of 2**20 FLOP those sums stay far from the end of int64.
_UNIT_BITS = 20
# Intra-chunk length of the chunked gated delta rule (flash-linear-attention's kernels).
_DELTA_CHUNK = 64


@dataclass(frozen=True, slots=True)
class CostModel:
    """FLOP per training step and sample, by what they grow with.

    Attributes:
        per_token: FLOP per token: projections, feed-forward, gated delta net, output layer.
        per_token_squared: FLOP per squared token: causal attention of the full-attention layers.
        per_patch: FLOP per vision patch: vision blocks, patch embedding, merger.
        per_patch_squared: FLOP per squared patch of one vision attention span (an image).
    """

    per_token: int
    per_token_squared: int
    per_patch: int
    per_patch_squared: int

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} is {value!r}; costs are integers, at least 0 (they must be exact)")

    def sample_costs(
        self,
        tokens: npt.NDArray[np.integer],
        patches: npt.NDArray[np.integer],
        patches_squared: npt.NDArray[np.integer],
    ) -> npt.NDArray[np.int64]:
        """Cost of each sample.

        Args:
            tokens: (n,) aligned token lengths.
            patches: (n,) vision patches.
            patches_squared: (n,) sums over the sample's images of squared patches.

        Returns:
            int64 (n,) in units of 2**20 FLOP, rounded down.

        Raises:
            ValueError: If a cost would not fit 63 bits.
        """
        if not len(tokens):
            return np.zeros(0, np.int64)
        self._check_range(int(tokens.max()), int(patches.max()), int(patches_squared.max()))
        length = tokens.astype(np.int64)
        cost = (self.per_token_squared * length + self.per_token) * length
        cost += self.per_patch * patches.astype(np.int64)
        cost += self.per_patch_squared * patches_squared.astype(np.int64)
        cost >>= _UNIT_BITS
        return cost

    def _check_range(self, tokens: int, patches: int, patches_squared: int) -> None:
        bound = (self.per_token_squared * tokens + self.per_token) * tokens
        bound += self.per_patch * patches + self.per_patch_squared * patches_squared
        if bound >= 1 << 63:
            raise ValueError(
                f"a sample of {tokens} tokens and {patches} patches may cost {bound:.1e} FLOP, more than int64 holds; "
                "scale the cost model's coefficients down"
            )


@dataclass(frozen=True, slots=True)
class ModelDims:
    """Dimensions of a Qwen3.5-VL model that the cost depends on; names as in transformers' configs.

    Attributes:
        hidden_size: Language hidden size.
        num_hidden_layers: Language layers; every ``full_attention_interval``-th has full attention, the others a gated
            delta net.
        intermediate_size: Feed-forward size (of an MoE layer: what one token activates, shared expert included).
        num_attention_heads: Query heads.
        num_key_value_heads: Key-value heads.
        head_dim: Attention head size.
        linear_num_key_heads: Gated delta net key heads.
        linear_num_value_heads: Gated delta net value heads.
        vision_depth: Vision blocks.
        vision_hidden_size: Vision hidden size.
        vision_intermediate_size: Vision feed-forward size.
        linear_key_head_dim: Gated delta net key head size.
        linear_value_head_dim: Gated delta net value head size.
        linear_conv_kernel_dim: Short convolution length.
        full_attention_interval: See ``num_hidden_layers``.
        vocab_size: Rows of the output layer.
        patch_values: Values of a vision patch as it enters the embedding (3 x 2 x 16 x 16).
        spatial_merge_size: Patches per side that merge into one token.
    """

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    vision_depth: int
    vision_hidden_size: int
    vision_intermediate_size: int
    head_dim: int = 256
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    full_attention_interval: int = 4
    vocab_size: int = 248_320
    patch_values: int = 1536
    spatial_merge_size: int = 2


def cost_model_from_dims(dims: ModelDims, train_vision: bool = True) -> CostModel:
    """Coefficients of one training step (forward and backward) from a model's dimensions.

    A matrix product of n tokens by an (a, b) weight takes 2 n a b FLOP forward and twice that backward. Norms,
    activations, rotary embedding, softmax and the short convolution's neighbours are left out: under 1 % of the whole.

    Args:
        dims: The model.
        train_vision: False if the vision encoder is frozen: it then runs forward only.

    Returns:
        The cost model.
    """
    full_layers = dims.num_hidden_layers // dims.full_attention_interval
    linear_layers = dims.num_hidden_layers - full_layers
    # The query projection is doubled: Qwen3.5 attention gates its output per head and channel.
    query = dims.num_attention_heads * dims.head_dim
    attention = dims.hidden_size * (2 * query + 2 * dims.num_key_value_heads * dims.head_dim + query)
    feed_forward = 3 * dims.hidden_size * dims.intermediate_size
    weights = (
        full_layers * attention
        + linear_layers * _delta_net_weights(dims)
        + dims.num_hidden_layers * feed_forward
        + dims.hidden_size * dims.vocab_size
    )
    per_token = 2 * weights + linear_layers * _delta_rule_flops(dims)
    # Q K^T and A V: 2 * 2 * head_dim FLOP per head and pair; causal attention has s^2 / 2 pairs.
    per_token_squared = full_layers * 2 * query
    merged = dims.vision_hidden_size * dims.spatial_merge_size**2
    # Vision attention is not causal: all p^2 pairs, hidden_size = heads * head_dim.
    per_patch_squared = dims.vision_depth * 4 * dims.vision_hidden_size
    vision_block = 4 * dims.vision_hidden_size**2 + 2 * dims.vision_hidden_size * dims.vision_intermediate_size
    vision_weights = dims.vision_depth * vision_block + dims.patch_values * dims.vision_hidden_size
    merger = merged * (merged + dims.hidden_size) // dims.spatial_merge_size**2
    vision_passes = 3 if train_vision else 1
    return CostModel(
        per_token=3 * per_token,
        per_token_squared=3 * per_token_squared,
        per_patch=vision_passes * 2 * (vision_weights + merger),
        per_patch_squared=vision_passes * per_patch_squared,
    )


def _delta_net_weights(dims: ModelDims) -> int:
    """Weights that one token meets in a gated delta net layer."""
    key = dims.linear_num_key_heads * dims.linear_key_head_dim
    value = dims.linear_num_value_heads * dims.linear_value_head_dim
    projections = dims.hidden_size * (2 * key + 2 * value + 2 * dims.linear_num_value_heads)  # q, k, v, z, a, b
    convolution = (2 * key + value) * dims.linear_conv_kernel_dim
    return projections + convolution + value * dims.hidden_size


def _delta_rule_flops(dims: ModelDims) -> int:
    """Forward FLOP per token of the chunked gated delta rule in one layer (an estimate; a few percent of the layer).

    Per value head: read, update and query a (key, value) state, 2 FLOP per entry each; within a chunk of 64 tokens
    about K K^T, Q K^T, the triangular solve and A V.
    """
    state = dims.linear_key_head_dim * dims.linear_value_head_dim
    within = _DELTA_CHUNK * (2 * dims.linear_key_head_dim + 2 * dims.linear_value_head_dim)
    return dims.linear_num_value_heads * (6 * state + within)


# Language sizes: transformers' Qwen3_5TextConfig defaults (9b) and the published configurations; vision sizes:
# DESIGN.md, section 4. The tests check them against the parameter counts of the checkpoints.
DIMS = {
    "0.8b": ModelDims(1024, 24, 3584, 8, 2, 16, 16, 12, 768, 3072),
    "2b": ModelDims(2048, 24, 6144, 8, 2, 16, 16, 24, 1024, 4096),
    "4b": ModelDims(2560, 32, 9216, 16, 4, 16, 32, 24, 1024, 4096),
    "9b": ModelDims(4096, 32, 12288, 16, 4, 16, 32, 27, 1152, 4304),
}


def cost_model(preset: str, train_vision: bool = True) -> CostModel:
    """The cost model of a preset.

    Args:
        preset: "0.8b", "2b", "4b" or "9b".
        train_vision: As for :func:`cost_model_from_dims`.

    Returns:
        The cost model.

    Raises:
        ValueError: If there is no such preset.
    """
    if preset not in DIMS:
        raise ValueError(f"no cost model for {preset!r}; there are {', '.join(DIMS)}")
    return cost_model_from_dims(DIMS[preset], train_vision)
