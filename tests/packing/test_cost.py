import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmdata.packing import CostModel, ModelDims, cost_model, cost_model_from_dims
from vlmdata.packing.cost import DIMS

LANGUAGE_NAMES = (
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


def parameters(dims: ModelDims) -> tuple[int, int]:
    """Weights of the (language, vision) part, embeddings once; norms and biases left out."""
    full = dims.num_hidden_layers // 4
    key = dims.linear_num_key_heads * dims.linear_key_head_dim
    value = dims.linear_num_value_heads * dims.linear_value_head_dim
    query = dims.num_attention_heads * dims.head_dim
    attention = dims.hidden_size * (3 * query + 2 * dims.num_key_value_heads * dims.head_dim)
    delta = dims.hidden_size * (2 * key + 3 * value + 2 * dims.linear_num_value_heads)
    language = (
        full * attention
        + (dims.num_hidden_layers - full) * delta
        + dims.num_hidden_layers * 3 * dims.hidden_size * dims.intermediate_size
        + dims.vocab_size * dims.hidden_size
    )
    width, merged = dims.vision_hidden_size, 4 * dims.vision_hidden_size
    vision = dims.vision_depth * (4 * width**2 + 2 * width * dims.vision_intermediate_size)
    return language, vision + 1536 * width + 48 * 48 * width + merged * (merged + dims.hidden_size)


@pytest.mark.parametrize(
    ("preset", "language", "vision"),
    # Billions: what the checkpoints hold (embeddings tied up to 4b; 9b counted with its separate output layer below).
    [("0.8b", 0.75, 0.10), ("2b", 1.88, 0.33), ("4b", 4.21, 0.33), ("9b", 7.94, 0.46)],
)
def test_dimensions_give_the_published_sizes(preset: str, language: float, vision: float) -> None:
    got_language, got_vision = parameters(DIMS[preset])
    assert got_language / 1e9 == pytest.approx(language, rel=0.01)
    assert got_vision / 1e9 == pytest.approx(vision, rel=0.03)


@pytest.mark.slow
def test_9b_is_the_default_of_transformers() -> None:
    configuration = pytest.importorskip("transformers.models.qwen3_5.configuration_qwen3_5")
    text, vision = configuration.Qwen3_5TextConfig(), configuration.Qwen3_5VisionConfig()
    dims = DIMS["9b"]
    for name in LANGUAGE_NAMES:
        assert getattr(dims, name) == getattr(text, name), name
    full = [kind == "full_attention" for kind in text.layer_types]
    assert full == [(layer + 1) % dims.full_attention_interval == 0 for layer in range(dims.num_hidden_layers)]
    assert (dims.vision_depth, dims.vision_hidden_size) == (vision.depth, vision.hidden_size)
    assert dims.vision_intermediate_size == vision.intermediate_size
    assert dims.spatial_merge_size == vision.spatial_merge_size
    assert dims.patch_values == vision.in_channels * vision.temporal_patch_size * vision.patch_size**2


@pytest.mark.parametrize("preset", list(DIMS))
def test_tokens_cost_six_flop_per_weight(preset: str) -> None:
    # The usual rule; the delta rule's own arithmetic comes on top and is small.
    weights = parameters(DIMS[preset])[0]
    assert 1.0 < cost_model(preset).per_token / (6 * weights) < 1.1


def test_attention_by_hand() -> None:
    # 9b: 8 full layers, 16 heads of 256. Causal Q K^T and A V: 2 * 2 * 256 / 2 FLOP per head and pair; times 3.
    model = cost_model("9b")
    assert model.per_token_squared == 3 * 8 * 16 * 2 * 256
    # Vision: 27 layers, width 1152, all pairs: 4 * 1152; times 3.
    assert model.per_patch_squared == 3 * 27 * 4 * 1152


def test_frozen_vision_runs_forward_only() -> None:
    trained, frozen = cost_model("2b"), cost_model("2b", train_vision=False)
    assert trained.per_patch == 3 * frozen.per_patch
    assert trained.per_patch_squared == 3 * frozen.per_patch_squared
    assert trained.per_token == frozen.per_token


@given(st.integers(1, 262_144), st.integers(0, 65_536), st.integers(0, 2**32))
def test_sample_cost_is_the_exact_formula(tokens: int, patches: int, squared: int) -> None:
    model = cost_model("9b")
    flop = model.per_token * tokens + model.per_token_squared * tokens**2
    flop += model.per_patch * patches + model.per_patch_squared * squared
    got = model.sample_costs(np.array([tokens], np.int32), np.array([patches], np.int32), np.array([squared], np.int64))
    assert got.dtype == np.int64
    assert got.tolist() == [flop >> 20]


def test_costs_beyond_int64_are_refused() -> None:
    model = CostModel(0, 1 << 40, 0, 0)
    with pytest.raises(ValueError, match="more than int64 holds"):
        model.sample_costs(np.array([1 << 20]), np.array([0]), np.array([0]))


def test_bad_models_are_refused() -> None:
    with pytest.raises(ValueError, match=r"per_token is 1\.5"):
        CostModel(1.5, 0, 0, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="per_patch is -1"):
        CostModel(0, 0, -1, 0)
    with pytest.raises(ValueError, match=r"no cost model for '70b'; there are 0\.8b, 2b, 4b, 9b"):
        cost_model("70b")


def test_dims_reach_the_model() -> None:
    small = ModelDims(64, 4, 128, 2, 1, 2, 4, 2, 32, 64, vocab_size=512)
    assert cost_model_from_dims(small).per_token < cost_model("0.8b").per_token / 100
