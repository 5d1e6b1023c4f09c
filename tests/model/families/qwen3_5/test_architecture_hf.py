"""Architectures are read from transformers' configs and written back; what is not computed is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.model.helpers import small_architecture, transformers_config
from vlmdata.model.families import architecture_from_hf, architecture_to_hf, preset
from vlmdata.model.families.qwen3_5.presets import PRESETS

#: What published config.json files hold besides what transformers' classes declare (Qwen3.5-27B, 2026-02).
PUBLISHED_27B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 17408,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "output_gate_type": "swish",
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 248320,
    },
    "tie_word_embeddings": False,
    "transformers_version": "4.57.0.dev0",
    "video_token_id": 248057,
    "vision_config": {
        "deepstack_visual_indexes": [],
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 4304,
        "model_type": "qwen3_5",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 5120,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "vision_end_token_id": 248054,
    "vision_start_token_id": 248053,
}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_through_transformers_and_back(name: str) -> None:
    """Through the plain dict, and through transformers' own class, which fills in and renames fields."""
    architecture = PRESETS[name]
    assert architecture_from_hf(architecture_to_hf(architecture)) == architecture
    assert architecture_from_hf(transformers_config(architecture)) == architecture


@pytest.mark.parametrize("options", [{}, {"moe": True}, {"tied": True}, {"mtp": 0}])
def test_small_architectures_through_transformers_and_back(options: dict[str, Any]) -> None:
    architecture = small_architecture(**options)
    assert architecture_from_hf(transformers_config(architecture)) == architecture


def test_published_config() -> None:
    assert architecture_from_hf(PUBLISHED_27B) == PRESETS["27b"]


def test_a_later_checkpoint_of_the_same_class() -> None:
    """Qwen3.6-27B is ``Qwen3_5ForConditionalGeneration`` too; its file names more fields, with equal values."""
    config = copy.deepcopy(PUBLISHED_27B)
    config |= {"language_model_only": False, "transformers_version": "4.57.1"}
    config["text_config"] |= {
        "bos_token_id": 248044,
        "pad_token_id": None,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.25,
    }
    assert architecture_from_hf(config) == PRESETS["27b"]


def test_9b_and_35b_are_transformers_defaults() -> None:
    """The classes' defaults are these two checkpoints' sizes, but for the rotary base and what they do not declare."""
    from transformers.models.qwen3_5 import Qwen3_5Config
    from transformers.models.qwen3_5_moe import Qwen3_5MoeConfig

    for config, name in ((Qwen3_5Config(), "9b"), (Qwen3_5MoeConfig(), "35b-a3b")):
        fields = config.to_dict()
        fields["vision_config"]["out_hidden_size"] = fields["text_config"]["hidden_size"]
        fields["text_config"]["rope_parameters"] |= {"rope_theta": 1e7}
        fields["text_config"] |= {"mtp_num_hidden_layers": 1, "max_position_embeddings": 262_144}
        assert architecture_from_hf(fields) == PRESETS[name]


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("text_config", "attention_bias", True),
        ("text_config", "hidden_act", "gelu"),
        ("text_config", "attn_output_gate", False),
        ("text_config", "mtp_use_dedicated_embeddings", True),
        ("text_config", "sliding_window", 4096),
        ("text_config", "layer_scale", 0.5),
        ("vision_config", "deepstack_visual_indexes", [5, 11]),
        ("vision_config", "hidden_act", "relu"),
        ("vision_config", "window_size", 8),
        ("rope_parameters", "rope_type", "yarn"),
        ("rope_parameters", "mrope_interleaved", False),
        ("rope_parameters", "factor", 4.0),
        ("", "quantization_config", {"bits": 4}),
    ],
)
def test_what_is_not_computed_is_refused(section: str, field: str, value: Any) -> None:
    config = copy.deepcopy(PUBLISHED_27B)
    target = config["text_config"]["rope_parameters"] if section == "rope_parameters" else config
    target = target[section] if section.endswith("_config") else target
    target[field] = value
    with pytest.raises(ValueError, match=field):
        architecture_from_hf(config)


def test_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match="qwen3_5_text"):
        architecture_from_hf({"model_type": "qwen3_5_text", "hidden_size": 64})
    with pytest.raises(ValueError, match="unknown preset '7b'; choose one of tiny"):
        preset("7b")


def test_unknown_fields_may_be_declared_harmless() -> None:
    config = copy.deepcopy(PUBLISHED_27B)
    config["text_config"]["layer_scale"] = 0.5
    assert architecture_from_hf(config, ignore=["layer_scale"]) == PRESETS["27b"]


def test_vocabulary_of_a_dataset(tokenizer: Any) -> None:
    info = tokenizer.info
    architecture = PRESETS["tiny"].with_vocabulary(info)
    assert architecture.language.vocab_size == info.vocab_size
    assert architecture.image_token_id == info.image
    assert PRESETS["tiny"].with_vocabulary(info, 9000).language.vocab_size == 9000
    with pytest.raises(ValueError, match="too few"):
        PRESETS["tiny"].with_vocabulary(info, 100)
