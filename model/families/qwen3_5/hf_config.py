"""Converts transformers' Qwen3.5 configs to :class:`Qwen35Architecture` and back.

Sources: ``configuration_qwen3_5.py`` and ``configuration_qwen3_5_moe.py`` of transformers for names and defaults;
published ``config.json`` files for the fields that those classes do not declare (``mtp_num_hidden_layers``,
``attn_output_gate``).

Every field is one of four kinds: represented in the architecture, required to have the one value that this model
computes, known not to change the result, or unknown. Unknown fields raise an error, since they may change the result.
Later checkpoints of the same classes, such as Qwen3.6, are read if their fields are these.
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
from model.families.qwen3_5.architecture import (
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    Qwen35Architecture,
    Qwen35LanguageArchitecture,
)

#: Values of ``model_type``.
MODEL_TYPES = _DENSE, _MOE = ("qwen3_5", "qwen3_5_moe")

_FIELDS = KnownFields(
    demanded={
        "": {"quantization_config": (None,), "language_model_only": (False,)},
        "text_config": {
            "attention_bias": (False, None),
            "attention_dropout": (0, 0.0, None),
            "attn_output_gate": (True,),
            "hidden_act": ("silu",),
            "mamba_ssm_dtype": ("float32", None),
            "mtp_use_dedicated_embeddings": (False,),
            "output_gate_type": ("silu", "swish"),
            "quantization_config": (None,),
            "rope_scaling": (None,),
            "sliding_window": (None,),
        },
        "vision_config": {
            "deepstack_visual_indexes": ([], (), None),
            "hidden_act": ("gelu_pytorch_tanh",),
            "quantization_config": (None,),
        },
        "text_config.rope_parameters": {"rope_type": ("default",), "mrope_interleaved": (True,)},
        "vision_config.rope_parameters": {"rope_type": ("axial", "default")},
    },
    represented={
        "": TOP,
        "text_config": TEXT
        | {
            "layer_types",
            "full_attention_interval",
            "linear_num_key_heads",
            "linear_num_value_heads",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_conv_kernel_dim",
            "shared_expert_intermediate_size",
            "partial_rotary_factor",
            "mtp_num_hidden_layers",
        },
        "vision_config": VISION,
        "text_config.rope_parameters": frozenset(["rope_theta", "partial_rotary_factor", "mrope_section"]),
        "vision_config.rope_parameters": frozenset(["rope_theta"]),
    },
)


def from_hf(config: Mapping[str, Any] | Any, ignore: Collection[str] = ()) -> Qwen35Architecture:
    """Reads the config of a Qwen3.5 or Qwen3.5-MoE vision-language checkpoint.

    Args:
        config: The content of ``config.json``, or a transformers config object.
        ignore: Names of unknown fields (without their section) that do not change the result.

    Raises:
            ValueError: If the model is of another kind, a field has a value that this model does not compute, or
                fields are unknown.
    """
    sections = sections_of(config, MODEL_TYPES)
    for name, fields in sections.items():
        _FIELDS.check(name, fields, ignore)
    given, text = sections[""], sections["text_config"]
    defaults = _class_defaults(given["model_type"])
    return Qwen35Architecture(
        vision=vision_from_hf({**defaults["vision_config"], **sections["vision_config"]}),
        language=_language({**defaults["text_config"], **text}, moe=given["model_type"] == _MOE),
        tie_embeddings=is_tied(given, text),
        mtp_layers=int(text.get("mtp_num_hidden_layers") or 0),
        **token_ids(given, defaults),
    )


def to_hf(architecture: Qwen35Architecture) -> dict[str, Any]:
    """Returns the content of a ``config.json`` from which :func:`from_hf` and transformers restore this model."""
    language = architecture.language
    kind = _DENSE if language.moe is None else _MOE
    name = "Qwen3_5ForConditionalGeneration" if kind == _DENSE else "Qwen3_5MoeForConditionalGeneration"
    text = text_to_hf(architecture, kind) | {
        "layer_types": list(language.layer_types),
        "linear_num_key_heads": language.linear_num_key_heads,
        "linear_num_value_heads": language.linear_num_value_heads,
        "linear_key_head_dim": language.linear_key_head_dim,
        "linear_value_head_dim": language.linear_value_head_dim,
        "linear_conv_kernel_dim": language.linear_conv_kernel_dim,
        "attn_output_gate": True,
        "mtp_num_hidden_layers": architecture.mtp_layers,
        "mtp_use_dedicated_embeddings": False,
    }
    text["rope_parameters"]["partial_rotary_factor"] = language.partial_rotary_factor
    if language.moe is not None:
        text["shared_expert_intermediate_size"] = language.moe.shared_expert_intermediate_size
    vision = vision_to_hf(architecture.vision, kind)
    return top_to_hf(architecture, kind, name) | {"text_config": text, "vision_config": vision}


def _class_defaults(kind: str) -> dict[str, Any]:
    """Returns transformers' defaults for fields that ``config.json`` omits."""
    if kind == _DENSE:
        from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config

        defaults: dict[str, Any] = Qwen3_5Config().to_dict()
    else:
        from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeConfig

        defaults = Qwen3_5MoeConfig().to_dict()
    # The layer pattern follows from the number of layers; the default list would contradict it.
    defaults["text_config"].pop("layer_types", None)
    return defaults


def _language(text: dict[str, Any], moe: bool) -> Qwen35LanguageArchitecture:
    rope: dict[str, Any] = text.get("rope_parameters") or {}
    layers = text.get("layer_types")
    count = text["num_hidden_layers"]
    if layers is None:
        interval = text.get("full_attention_interval") or 4
        layers = [FULL_ATTENTION if (i + 1) % interval == 0 else LINEAR_ATTENTION for i in range(count)]
    if len(layers) != count:
        raise ValueError(f"text_config.layer_types has {len(layers)} entries for num_hidden_layers {count}")
    experts = None
    if moe:
        experts = MoeArchitecture(
            num_experts=text["num_experts"],
            num_experts_per_tok=text["num_experts_per_tok"],
            intermediate_size=text["moe_intermediate_size"],
            shared_expert_intermediate_size=text["shared_expert_intermediate_size"],
            router_aux_loss_coef=text["router_aux_loss_coef"],
        )
    return Qwen35LanguageArchitecture(
        vocab_size=text["vocab_size"],
        hidden_size=text["hidden_size"],
        intermediate_size=0 if moe else text["intermediate_size"],
        layer_types=tuple(layers),
        num_attention_heads=text["num_attention_heads"],
        num_key_value_heads=text["num_key_value_heads"],
        head_dim=text["head_dim"],
        linear_num_key_heads=text["linear_num_key_heads"],
        linear_num_value_heads=text["linear_num_value_heads"],
        linear_key_head_dim=text["linear_key_head_dim"],
        linear_value_head_dim=text["linear_value_head_dim"],
        linear_conv_kernel_dim=text["linear_conv_kernel_dim"],
        moe=experts,
        rope_theta=float(rope.get("rope_theta", text.get("rope_theta", 10_000_000.0))),
        partial_rotary_factor=float(rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))),
        mrope_section=three(rope.get("mrope_section", text.get("mrope_section", (11, 11, 10)))),
        rms_norm_eps=text["rms_norm_eps"],
        max_position_embeddings=text["max_position_embeddings"],
        initializer_range=text["initializer_range"],
    )
