"""Converts transformers' Qwen3-VL configs to :class:`Qwen3VLArchitecture` and back.

Sources: ``configuration_qwen3_vl.py`` and ``configuration_qwen3_vl_moe.py`` of transformers for names and defaults;
published ``config.json`` files for the older form of the rotary fields (``rope_scaling`` and ``rope_theta``).

Every field is one of four kinds: represented in the architecture, required to have the one value that this model
computes, known not to change the result, or unknown. Unknown fields raise an error, since they may change the result.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from model.architecture import MoeArchitecture
from model.families.hf_fields import (
    TEXT,
    TOP,
    VISION,
    KnownFields,
    is_tied,
    sections_of,
    text_to_hf,
    three,
    token_ids,
    top_to_hf,
    vision_from_hf,
    vision_to_hf,
)
from model.families.qwen3_vl.architecture import Qwen3VLArchitecture, Qwen3VLLanguageArchitecture

#: Values of ``model_type``.
MODEL_TYPES = _DENSE, _MOE = ("qwen3_vl", "qwen3_vl_moe")

_FIELDS = KnownFields(
    demanded={
        "": {"quantization_config": (None,)},
        "text_config": {
            "attention_bias": (False, None),
            "attention_dropout": (0, 0.0, None),
            "decoder_sparse_step": (1,),
            "hidden_act": ("silu",),
            "mlp_only_layers": ([], (), None),
            "norm_topk_prob": (True,),
            "quantization_config": (None,),
            "sliding_window": (None,),
        },
        "vision_config": {"hidden_act": ("gelu_pytorch_tanh",), "quantization_config": (None,)},
        "text_config.rope_parameters": {"rope_type": ("default",), "type": ("default",), "mrope_interleaved": (True,)},
        "vision_config.rope_parameters": {"rope_type": ("axial", "default")},
    },
    represented={
        "": TOP,
        "text_config": TEXT | {"num_local_experts", "rope_scaling"},
        "vision_config": VISION | {"deepstack_visual_indexes"},
        "text_config.rope_parameters": frozenset(["rope_theta", "mrope_section"]),
        "vision_config.rope_parameters": frozenset(["rope_theta"]),
    },
)


def from_hf(config: Mapping[str, Any] | Any, ignore: Collection[str] = ()) -> Qwen3VLArchitecture:
    """Reads the config of a Qwen3-VL or Qwen3-VL-MoE checkpoint.

    Args:
        config: The content of ``config.json``, or a transformers config object.
        ignore: Names of unknown fields (without their section) that do not change the result.

    Raises:
        ValueError: If the model is of another kind, a field has a value that this model does not compute, or
            fields are unknown.
    """
    sections = sections_of(config, MODEL_TYPES)
    given, text = sections[""], sections["text_config"]
    rope = dict(text.get("rope_scaling") or {}) | sections["text_config.rope_parameters"]
    for name, fields in (sections | {"text_config.rope_parameters": rope}).items():
        _FIELDS.check(name, fields, ignore)
    defaults = _class_defaults(given["model_type"])
    return Qwen3VLArchitecture(
        vision=vision_from_hf({**defaults["vision_config"], **sections["vision_config"]}),
        language=_language(defaults["text_config"], text, rope, moe=given["model_type"] == _MOE),
        tie_embeddings=is_tied(given, text),
        **token_ids(given, defaults),
    )


def to_hf(architecture: Qwen3VLArchitecture) -> dict[str, Any]:
    """Returns the content of a ``config.json`` from which :func:`from_hf` and transformers restore this model."""
    kind = _DENSE if architecture.language.moe is None else _MOE
    name = "Qwen3VLForConditionalGeneration" if kind == _DENSE else "Qwen3VLMoeForConditionalGeneration"
    text = text_to_hf(architecture, kind)
    if kind == _MOE:
        text |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    vision = vision_to_hf(architecture.vision, kind)
    vision["deepstack_visual_indexes"] = list(architecture.vision.deepstack_layers)
    return top_to_hf(architecture, kind, name) | {"text_config": text, "vision_config": vision}


def _class_defaults(kind: str) -> dict[str, Any]:
    """Returns transformers' defaults for fields that ``config.json`` omits."""
    if kind == _DENSE:
        from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig

        defaults: dict[str, Any] = Qwen3VLConfig().to_dict()
    else:
        from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeConfig

        defaults = Qwen3VLMoeConfig().to_dict()
        # transformers derives the width of a head from the given sizes, not from the default ones.
        defaults["text_config"].pop("head_dim", None)
    return defaults


def _language(
    defaults: Mapping[str, Any], given: Mapping[str, Any], rope: Mapping[str, Any], *, moe: bool
) -> Qwen3VLLanguageArchitecture:
    text = {**defaults, **given}
    heads = text["num_attention_heads"]
    experts = None
    if moe:
        named = ("num_experts", "num_local_experts")  # transformers has both names for one field
        counts = [fields[name] for fields in (given, defaults) for name in named if name in fields]
        experts = MoeArchitecture(
            num_experts=counts[0],
            num_experts_per_tok=text["num_experts_per_tok"],
            intermediate_size=text["moe_intermediate_size"],
            router_aux_loss_coef=text["router_aux_loss_coef"],
        )
    theta = (defaults.get("rope_parameters") or {}).get("rope_theta", 500_000.0)
    return Qwen3VLLanguageArchitecture(
        vocab_size=text["vocab_size"],
        hidden_size=text["hidden_size"],
        intermediate_size=0 if moe else text["intermediate_size"],
        layers=text["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=text["num_key_value_heads"] or heads,
        head_dim=text.get("head_dim") or text["hidden_size"] // heads,
        moe=experts,
        rope_theta=float(rope.get("rope_theta", text.get("rope_theta", theta))),
        mrope_section=three(rope.get("mrope_section", text.get("mrope_section", (24, 20, 20)))),
        rms_norm_eps=text["rms_norm_eps"],
        max_position_embeddings=text["max_position_embeddings"],
        initializer_range=text["initializer_range"],
    )
