"""Transformers' Qwen3.5 configs to a :class:`Qwen35Architecture` and back.

Sources: ``configuration_qwen3_5.py`` and ``configuration_qwen3_5_moe.py`` of transformers for names and defaults;
published ``config.json`` files for the fields that those classes do not declare (``mtp_num_hidden_layers``,
``attn_output_gate``).

Every field is one of four kinds: represented in the architecture, demanded to have the one value this model computes,
known not to change the result, or unknown. Unknown fields are refused, since they may change it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from model.architecture import MoeArchitecture, VisionArchitecture
from model.families.qwen3_5.architecture import (
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    Qwen35Architecture,
    Qwen35LanguageArchitecture,
)

#: Values of ``model_type``.
MODEL_TYPES = _DENSE, _MOE = ("qwen3_5", "qwen3_5_moe")

#: Fields that must hold one of these values where they are present.
_DEMANDED: dict[str, dict[str, tuple[Any, ...]]] = {
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
}

_REPRESENTED: dict[str, frozenset[str]] = {
    "": frozenset(
        [
            "text_config",
            "vision_config",
            "image_token_id",
            "video_token_id",
            "vision_start_token_id",
            "vision_end_token_id",
            "tie_word_embeddings",
            "model_type",
        ]
    ),
    "text_config": frozenset(
        [
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "layer_types",
            "full_attention_interval",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "linear_num_key_heads",
            "linear_num_value_heads",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_conv_kernel_dim",
            "num_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "router_aux_loss_coef",
            "rope_parameters",
            "rope_theta",
            "partial_rotary_factor",
            "mrope_section",
            "rms_norm_eps",
            "max_position_embeddings",
            "initializer_range",
            "tie_word_embeddings",
            "mtp_num_hidden_layers",
            "model_type",
        ]
    ),
    "vision_config": frozenset(
        [
            "depth",
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "out_hidden_size",
            "num_position_embeddings",
            "rope_parameters",
            "in_channels",
            "patch_size",
            "temporal_patch_size",
            "spatial_merge_size",
            "initializer_range",
            "model_type",
        ]
    ),
    "text_config.rope_parameters": frozenset(["rope_theta", "partial_rotary_factor", "mrope_section"]),
    "vision_config.rope_parameters": frozenset(["rope_theta"]),
}

#: Fields that do not change what the model computes: data types, caches, ids of other tokens, notes of tools.
_HARMLESS = frozenset(
    [
        "torch_dtype",
        "dtype",
        "use_cache",
        "transformers_version",
        "_name_or_path",
        "architectures",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "output_router_logits",
        "unsloth_fixed",
        "unsloth_fixed_mtp",
        "auto_map",
        "mlp_only_layers",
        "mrope_interleaved",
        "rope_type",
        "base_config_key",
    ]
)


def from_hf(config: Mapping[str, Any] | Any, ignore: Collection[str] = ()) -> Qwen35Architecture:
    """Reads the config of a Qwen3.5 or Qwen3.5-MoE vision-language checkpoint.

    Args:
        config: The content of ``config.json``, or a transformers config object.
        ignore: Names of unknown fields (without their section) that are known to be harmless.

    Raises:
        ValueError: If it is another kind of model, a field has a value this model does not compute, or fields are
            unknown.
    """
    given: dict[str, Any] = dict(config) if isinstance(config, Mapping) else config.to_dict()
    kind = given.get("model_type")
    if kind not in (_DENSE, _MOE) or not given.get("text_config"):
        raise ValueError(
            f"need the top-level config of a {_DENSE} or {_MOE} vision-language checkpoint (with text_config), "
            f"got model_type {kind!r}"
        )
    text: dict[str, Any] = dict(given["text_config"])
    vision: dict[str, Any] = dict(given.get("vision_config") or {})
    _check("", given, ignore)
    _check("text_config", text, ignore)
    _check("vision_config", vision, ignore)
    _check("text_config.rope_parameters", text.get("rope_parameters") or {}, ignore)
    _check("vision_config.rope_parameters", vision.get("rope_parameters") or {}, ignore)
    defaults = _class_defaults(kind)
    language = _language({**defaults["text_config"], **text}, moe=kind == _MOE)
    return Qwen35Architecture(
        vision=_vision({**defaults["vision_config"], **vision}),
        language=language,
        image_token_id=given.get("image_token_id", defaults["image_token_id"]),
        video_token_id=given.get("video_token_id", defaults["video_token_id"]),
        vision_start_token_id=given.get("vision_start_token_id", defaults["vision_start_token_id"]),
        vision_end_token_id=given.get("vision_end_token_id", defaults["vision_end_token_id"]),
        tie_embeddings=bool(given.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        mtp_layers=int(text.get("mtp_num_hidden_layers") or 0),
    )


def to_hf(architecture: Qwen35Architecture) -> dict[str, Any]:
    """The content of a ``config.json`` that :func:`from_hf` and transformers read back to this model."""
    language, vision = architecture.language, architecture.vision
    kind = _DENSE if language.moe is None else _MOE
    text: dict[str, Any] = {
        "model_type": f"{kind}_text",
        "vocab_size": language.vocab_size,
        "hidden_size": language.hidden_size,
        "num_hidden_layers": language.num_layers,
        "layer_types": list(language.layer_types),
        "num_attention_heads": language.num_attention_heads,
        "num_key_value_heads": language.num_key_value_heads,
        "head_dim": language.head_dim,
        "linear_num_key_heads": language.linear_num_key_heads,
        "linear_num_value_heads": language.linear_num_value_heads,
        "linear_key_head_dim": language.linear_key_head_dim,
        "linear_value_head_dim": language.linear_value_head_dim,
        "linear_conv_kernel_dim": language.linear_conv_kernel_dim,
        "rms_norm_eps": language.rms_norm_eps,
        "max_position_embeddings": language.max_position_embeddings,
        "initializer_range": language.initializer_range,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "mtp_num_hidden_layers": architecture.mtp_layers,
        "mtp_use_dedicated_embeddings": False,
        "tie_word_embeddings": architecture.tie_embeddings,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": language.rope_theta,
            "partial_rotary_factor": language.partial_rotary_factor,
            "mrope_section": list(language.mrope_section),
            "mrope_interleaved": True,
        },
    }
    if language.moe is None:
        text["intermediate_size"] = language.intermediate_size
    else:
        text |= {
            "num_experts": language.moe.num_experts,
            "num_experts_per_tok": language.moe.num_experts_per_tok,
            "moe_intermediate_size": language.moe.intermediate_size,
            "shared_expert_intermediate_size": language.moe.shared_expert_intermediate_size,
            "router_aux_loss_coef": language.moe.router_aux_loss_coef,
        }
    return {
        "model_type": kind,
        "architectures": [
            "Qwen3_5ForConditionalGeneration" if kind == _DENSE else "Qwen3_5MoeForConditionalGeneration"
        ],
        "image_token_id": architecture.image_token_id,
        "video_token_id": architecture.video_token_id,
        "vision_start_token_id": architecture.vision_start_token_id,
        "vision_end_token_id": architecture.vision_end_token_id,
        "tie_word_embeddings": architecture.tie_embeddings,
        "text_config": text,
        "vision_config": {
            "model_type": f"{kind}_vision",
            "depth": vision.depth,
            "hidden_size": vision.hidden_size,
            "intermediate_size": vision.intermediate_size,
            "num_heads": vision.num_heads,
            "out_hidden_size": vision.out_hidden_size,
            "num_position_embeddings": vision.num_position_embeddings,
            "in_channels": vision.in_channels,
            "patch_size": vision.patch_size,
            "temporal_patch_size": vision.temporal_patch_size,
            "spatial_merge_size": vision.spatial_merge_size,
            "initializer_range": vision.initializer_range,
            "hidden_act": "gelu_pytorch_tanh",
            "rope_parameters": {"rope_type": "axial", "rope_theta": vision.rope_theta},
        },
    }


def _class_defaults(kind: str) -> dict[str, Any]:
    """What transformers fills in for fields a ``config.json`` leaves out."""
    if kind == _DENSE:
        from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config

        defaults: dict[str, Any] = Qwen3_5Config().to_dict()
    else:
        from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeConfig

        defaults = Qwen3_5MoeConfig().to_dict()
    # The pattern of layers follows from their number, which the default list would contradict.
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
        mrope_section=_three(rope.get("mrope_section", text.get("mrope_section", (11, 11, 10)))),
        rms_norm_eps=text["rms_norm_eps"],
        max_position_embeddings=text["max_position_embeddings"],
        initializer_range=text["initializer_range"],
    )


def _vision(vision: dict[str, Any]) -> VisionArchitecture:
    rope: dict[str, Any] = vision.get("rope_parameters") or {}
    return VisionArchitecture(
        depth=vision["depth"],
        hidden_size=vision["hidden_size"],
        intermediate_size=vision["intermediate_size"],
        num_heads=vision["num_heads"],
        out_hidden_size=vision["out_hidden_size"],
        num_position_embeddings=vision["num_position_embeddings"],
        rope_theta=float(rope.get("rope_theta", 10_000.0)),
        in_channels=vision["in_channels"],
        patch_size=_side("patch_size", vision["patch_size"]),
        temporal_patch_size=_side("temporal_patch_size", vision["temporal_patch_size"]),
        spatial_merge_size=vision["spatial_merge_size"],
        initializer_range=vision["initializer_range"],
    )


def _three(section: Any) -> tuple[int, int, int]:
    t, h, w = section
    return int(t), int(h), int(w)


def _side(name: str, value: Any) -> int:
    """Transformers allows a pair of sides; only squares are computed here."""
    sides = set(value) if isinstance(value, (list, tuple)) else {value}
    if len(sides) != 1:
        raise ValueError(f"vision_config.{name} must be one number, got {value}")
    return int(sides.pop())


def _check(section: str, fields: Mapping[str, Any], ignore: Collection[str]) -> None:
    """Refuses values this model does not compute, and fields nobody has judged."""
    where = f"{section}." if section else ""
    for name, allowed in _DEMANDED[section].items():
        if name in fields and fields[name] not in allowed:
            raise ValueError(
                f"{where}{name} is {fields[name]!r}; this model computes {' or '.join(map(repr, allowed))} only"
            )
    known = _REPRESENTED[section] | set(_DEMANDED[section]) | _HARMLESS | set(ignore)
    if not section.endswith("rope_parameters"):
        from transformers import PretrainedConfig

        # Fields that every transformers config has (generation, output options) and no Qwen3.5 code reads.
        known |= set(PretrainedConfig().to_dict()) | {"id2label", "label2id", "problem_type", "is_encoder_decoder"}
    unknown = sorted(set(fields) - known)
    if unknown:
        each = " ".join(f"--ignore-config-field {name}" for name in unknown)
        listed = ", ".join(f'"{name}"' for name in unknown)
        raise ValueError(
            f"unknown fields in {section or 'the config'}: {', '.join(unknown)}; they may change the model's result. "
            f"If they do not: `vlmdata convert … {each}`, `train.py … --set 'model.ignore_config_fields=[{listed}]'`, "
            "or ignore= of model.families.architecture_from_hf"
        )
