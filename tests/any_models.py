"""Tiny models of transformers that take images and text, of any kind, with random weights."""

from __future__ import annotations

from typing import Any

import torch

_TEXT: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
    "initializer_range": 0.1,
}
_SIGLIP = _VISION | {"model_type": "siglip_vision_model", "vision_use_head": False}
_BLOCKS: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 4,
    "out_hidden_size": 64,
    "patch_size": 14,
    "image_size": 56,
}
_SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}

#: By model type: the text, vision and other values of the configuration.
ANY_MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llava": ({"model_type": "llama"}, _VISION | {"model_type": "clip_vision_model", "projection_dim": 32}, {}),
    "idefics3": ({"model_type": "llama"}, _VISION, {"scale_factor": 2}),
    "smolvlm": ({"model_type": "llama"}, _VISION, {"scale_factor": 2}),
    "mistral3": (
        {"model_type": "mistral"},
        _VISION | {"image_size": 336, "head_dim": 8, "model_type": "pixtral"},
        {"spatial_merge_size": 2, "vision_feature_layer": -1},
    ),
    "gemma3": (
        _SLIDING | {"query_pre_attn_scalar": 16},
        _SIGLIP,
        {"mm_tokens_per_image": 16},
    ),
    "paligemma": ({"model_type": "gemma"}, _SIGLIP | {"projection_dim": 64}, {"projection_dim": 64}),
    "cohere2_vision": (
        _SLIDING | {"model_type": "cohere2"},
        _SIGLIP,
        {"downsample_factor": 2, "alignment_intermediate_size": 64},
    ),
    "aya_vision": (
        _SLIDING | {"model_type": "cohere2"},
        _SIGLIP,
        {"downsample_factor": 2, "vision_feature_layer": -1},
    ),
    "lfm2_vl": (
        {"layer_types": ["conv", "full_attention"], "block_ff_dim": 128, "block_auto_adjust_ff_dim": False},
        _VISION | {"patch_size": 8, "num_patches": 64, "model_type": "siglip2_vision_model", "vision_use_head": False},
        {"downsample_factor": 2, "projector_hidden_size": 64},
    ),
    "glm4v": ({"rope_parameters": _SECTIONS | {"partial_rotary_factor": 1.0}}, _BLOCKS, {}),
    "llama4": (
        {
            "num_local_experts": 2,
            "intermediate_size_mlp": 128,
            "attention_chunk_size": 16,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "moe_layers": [],
        },
        {
            "hidden_size": 32,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 56,
            "patch_size": 14,
            "vision_output_dim": 64,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
            "pixel_shuffle_ratio": 0.5,
            "vision_feature_select_strategy": "default",
        },
        {},
    ),
    "mllama": (
        {"cross_attention_layers": [1], "head_dim": None},
        {"hidden_size": 32, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 4, "image_size": 56},
        {},
    ),
}


def any_model(model_type: str) -> Any:
    """A model of two layers in float32."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    text, vision, others = ANY_MODELS[model_type]
    kind = type(AutoConfig.for_model(model_type))
    base = kind()

    def part(own: Any, values: dict[str, Any]) -> Any:
        values = dict(values)
        named = values.pop("model_type", None)
        return (type(own) if named is None else type(AutoConfig.for_model(named)))(**values)

    values = {name: value for name, value in (_TEXT | text).items() if value is not None}
    config = kind(text_config=part(base.text_config, values), vision_config=part(base.vision_config, vision), **others)
    for name in ("image_token_id", "image_token_index"):
        if hasattr(config, name):
            setattr(config, name, 7)
    for number, name in enumerate(("video_token_id", "image_start_token_id", "image_end_token_id"), start=8):
        if hasattr(config, name):
            setattr(config, name, number)
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config).float().eval()
