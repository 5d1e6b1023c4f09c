"""Architectures are read from transformers' configs and written back; what is not computed is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.model.helpers import small_architecture, transformers_config
from vlmdata.model.families import architecture_from_hf, architecture_to_hf
from vlmdata.model.families.qwen3_vl.presets import PRESETS

#: The published config.json of Qwen3-VL-4B-Instruct (2025-10): rotary fields in their older form.
PUBLISHED_4B: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 151655,
    "model_type": "qwen3_vl",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "dtype": "bfloat16",
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "initializer_range": 0.02,
        "intermediate_size": 9728,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": 151936,
    },
    "tie_word_embeddings": True,
    "transformers_version": "4.57.0.dev0",
    "video_token_id": 151656,
    "vision_config": {
        "deepstack_visual_indexes": [5, 11, 17],
        "depth": 24,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1024,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 4096,
        "model_type": "qwen3_vl",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2560,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_through_transformers_and_back(name: str) -> None:
    """Through the plain dict, and through transformers' own class, which fills in and renames fields."""
    architecture = PRESETS[name]
    assert architecture_from_hf(architecture_to_hf(architecture)) == architecture
    assert architecture_from_hf(transformers_config(architecture)) == architecture


@pytest.mark.parametrize("options", [{}, {"moe": True}, {"tied": True}, {"deepstack": ()}])
def test_small_architectures_through_transformers_and_back(options: dict[str, Any]) -> None:
    architecture = small_architecture("qwen3_vl", **options)
    assert architecture_from_hf(transformers_config(architecture)) == architecture


def test_published_config() -> None:
    assert architecture_from_hf(PUBLISHED_4B) == PRESETS["qwen3-vl-4b"]


def test_what_is_omitted_is_transformers_default() -> None:
    """Nothing but the model's type: both sides compute the classes' own defaults."""
    from transformers import Qwen3VLMoeConfig

    fields = {"model_type": "qwen3_vl_moe", "text_config": {"hidden_size": 512}, "vision_config": {}}
    fields["vision_config"]["out_hidden_size"] = 512  # type: ignore[index]
    section = {"mrope_section": [6, 5, 5], "rope_type": "default"}  # of 32 columns a head
    fields["text_config"]["rope_scaling"] = section  # type: ignore[index]
    made, theirs = architecture_from_hf(fields), Qwen3VLMoeConfig(**fields).text_config
    language = made.language
    assert language.moe is not None
    assert (language.head_dim, language.num_layers) == (theirs.head_dim, theirs.num_hidden_layers)
    assert language.moe.num_experts == theirs.num_experts
    assert language.rope_theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("text_config", "attention_bias", True),
        ("text_config", "hidden_act", "gelu"),
        ("text_config", "sliding_window", 4096),
        ("text_config", "layer_scale", 0.5),
        ("text_config", "decoder_sparse_step", 2),
        ("text_config", "mlp_only_layers", [0]),
        ("text_config", "norm_topk_prob", False),
        ("vision_config", "deepstack_visual_indexes", [11, 5]),
        ("vision_config", "deepstack_visual_indexes", [24]),
        ("vision_config", "hidden_act", "relu"),
        ("vision_config", "window_size", 8),
        ("rope_scaling", "rope_type", "yarn"),
        ("rope_scaling", "mrope_interleaved", False),
        ("rope_scaling", "factor", 4.0),
        ("", "quantization_config", {"bits": 4}),
    ],
)
def test_what_is_not_computed_is_refused(section: str, field: str, value: Any) -> None:
    config = copy.deepcopy(PUBLISHED_4B)
    target = config["text_config"]["rope_scaling"] if section == "rope_scaling" else config
    target = target[section] if section.endswith("_config") else target
    target[field] = value
    with pytest.raises(ValueError, match=field.removesuffix("_visual_indexes")):
        architecture_from_hf(config)


def test_more_features_than_layers_are_refused() -> None:
    config = architecture_to_hf(small_architecture("qwen3_vl"))
    config["text_config"]["num_hidden_layers"] = 2
    with pytest.raises(ValueError, match="names 3 blocks for 2 decoder layers"):
        architecture_from_hf(config)
