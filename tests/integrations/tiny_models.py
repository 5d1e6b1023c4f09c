"""Tiny models of transformers with random weights, large enough to matter, and the losses of samples by themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from tests.loader.synthetic import IMAGE_TOKEN, PAD, SECONDS_PER_PATCH, VIDEO_TOKEN
from vlmdata.families import REGISTRY, family
from vlmdata.format.schema import Sample

_TEXT: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "initializer_range": 0.1,
}
_ROPE = {"rope_type": "default", "rope_theta": 1000.0}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "head_dim": 64,
    "rope_parameters": _ROPE | {"mrope_section": [3, 3, 2], "mrope_interleaved": True, "partial_rotary_factor": 0.25},
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_THIRDS = {"rope_parameters": _ROPE | {"mrope_section": [6, 5, 5], "mrope_interleaved": True}}
_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "initializer_range": 0.1,
}
_DEEPSTACK = {"deepstack_visual_indexes": [0, 1]}
_WINDOWS = {
    "window_size": 56,
    "fullatt_block_indexes": [1],
    "patch_size": 14,
    "in_channels": 3,
    "tokens_per_second": 2,
}

#: By model type: names of the configuration and the model, then the text and vision configuration.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": ("Qwen2_5_VL", {"rope_parameters": _ROPE | {"mrope_section": [6, 5, 5]}}, _WINDOWS),
    "qwen3_vl": ("Qwen3VL", _THIRDS, _DEEPSTACK),
    "qwen3_vl_moe": ("Qwen3VLMoe", _THIRDS | _EXPERTS, _DEEPSTACK),
    "qwen3_5": ("Qwen3_5", _DELTA, {}),
    "qwen3_5_moe": ("Qwen3_5Moe", _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 48}, {}),
}

_GEMMA: dict[str, Any] = {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 6,
    "global_head_dim": 64,
    "sliding_window": 24,
    "final_logit_softcapping": 3.0,  # so low that it matters to random weights
    "hidden_size_per_layer_input": 0,
    "pad_token_id": PAD,
}
_SEES = {"use_bidirectional_attention": "vision", "attention_k_eq_v": True, "num_global_key_value_heads": 2}
_PER_LAYER = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 1024}
_SHARED = {"num_kv_shared_layers": 3, "use_double_wide_mlp": True}
_GEMMA_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48}
_PATCHES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.1,
}
_POOLED = _PATCHES | {"num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 64}

#: Models whose positions have one axis, by model type and variant: names, text and vision configuration. Gemma 4 as the
#: 31B, as E2B and E4B, and as the 26B with experts; InternVL with each decoder that it has.
ONE_AXIS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma4-dense": ("Gemma4", _GEMMA | _SEES, _POOLED | {"standardize": True}),
    "gemma4-small": ("Gemma4", _GEMMA | _PER_LAYER | _SHARED, _POOLED),
    "gemma4-experts": ("Gemma4", _GEMMA | _SEES | _GEMMA_EXPERTS, _POOLED),
    "internvl-qwen3": ("InternVL", {"model_type": "qwen3", "rope_parameters": _ROPE}, _PATCHES),
    "internvl-qwen2": ("InternVL", {"model_type": "qwen2", "rope_parameters": _ROPE, "num_hidden_layers": 2}, _PATCHES),
    "internvl-experts": (
        "InternVL",
        {"model_type": "qwen3_moe", "rope_parameters": _ROPE, "num_hidden_layers": 2} | _EXPERTS,
        _PATCHES,
    ),
}


def tiny_model(model_type: str, seed: int = 0, image_token: int = IMAGE_TOKEN, **text: Any) -> Any:
    """A model of four decoder layers and two vision blocks, in float32.

    Args:
        model_type: One of :data:`MODELS` or of :data:`ONE_AXIS`.
        seed: Of its weights.
        image_token: Id of image placeholders.
        **text: Changes of the text configuration.
    """
    import transformers

    if model_type in ONE_AXIS:
        return _with_one_axis(model_type, seed, image_token, text)
    name, more_text, more_vision = MODELS[model_type]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(
        text_config=_TEXT | more_text | text,
        vision_config=_VISION | more_vision,
        image_token_id=image_token,
        video_token_id=VIDEO_TOKEN,
        vision_start_token_id=3,
        vision_end_token_id=4,
    )
    return getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()


def _with_one_axis(model_type: str, seed: int, image_token: int, text: dict[str, Any]) -> Any:
    import transformers

    name, more_text, vision = ONE_AXIS[model_type]
    torch.manual_seed(seed)
    tokens = {"video_token_id": VIDEO_TOKEN, "audio_token_id": 6} if name == "Gemma4" else {}
    config = getattr(transformers, f"{name}Config")(
        text_config=_TEXT | more_text | text, vision_config=dict(vision), image_token_id=image_token, **tokens
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():  # tables of positions are equal at first
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
            if parameter_name.endswith("q_norm.weight") and name == "Gemma4":
                parameter.mul_(0.3)  # scores are not divided: softmax would choose one token, and rounding with it
    return model


def family_of(model_type: str) -> str:
    """The family of a model type or of a variant."""
    return next(name for name in REGISTRY if model_type.split("-")[0] in family(name).model_types)


def inputs_of_sample(model: Any, sample: Sample) -> dict[str, torch.Tensor]:
    """The arguments of a forward pass as the processor makes them: transformers computes the positions."""
    ids = torch.from_numpy(sample.input_ids[: sample.length].astype(np.int64))[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    rules = family(family_of(model.config.model_type))
    values = rules.pixel_values
    if len(rules.position_axes) == 1:
        if model.config.model_type == "gemma4":
            inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).long()
        if len(sample.items):
            grids = torch.tensor([item.grid for item in sample.items])
            inputs |= rules.image_inputs(values(torch.from_numpy(sample.patches.copy())), grids)
        return inputs
    kinds = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
    inputs["mm_token_type_ids"] = torch.zeros_like(ids)
    for number, (kind, (pixels, grids)) in enumerate(kinds.items(), start=1):
        inputs["mm_token_type_ids"][ids == getattr(model.config, f"{kind}_token_id")] = number
        ends = np.cumsum([item.rows for item in sample.items])
        own = [(item, sample.patches[end - item.rows : end]) for item, end in zip(sample.items, ends, strict=True)]
        own = [(item, stored) for item, stored in own if item.kind == kind]
        if own:
            inputs[grids] = torch.tensor([item.grid for item, _ in own])
            inputs[pixels] = torch.cat([values(torch.from_numpy(each.copy()), copies=i.copies) for i, each in own])
    if "video_grid_thw" in inputs and model.config.model_type == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = torch.full((len(inputs["video_grid_thw"]),), SECONDS_PER_PATCH)
    if not len(sample.items):
        del inputs["mm_token_type_ids"]
    return inputs


def losses_of_sample(model: Any, sample: Sample) -> torch.Tensor:
    """The loss at every token but the last, (length - 1,), 0 where the next one is no target."""
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None
    inputs = inputs_of_sample(model, sample)
    logits = model(**inputs, use_cache=False).logits[0]
    target = torch.from_numpy(sample.loss_mask[1 : sample.length].astype(bool))
    losses = cross_entropy(logits[:-1], inputs["input_ids"][0, 1:], reduction="none")
    return torch.where(target, losses, torch.zeros(()))
