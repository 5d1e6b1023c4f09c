"""Reads and writes the parts of a transformers ``config.json`` that families share. Needs no torch.

A field is represented by the architecture, demanded to have a certain value, known to be harmless, or refused: it might
change what the model computes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from model.architecture import Architecture, VisionArchitecture

#: Fields at the top level that an architecture represents.
TOP = frozenset(
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
)
#: Fields of ``text_config`` that an architecture of any family represents.
TEXT = frozenset(
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "router_aux_loss_coef",
        "rope_parameters",
        "rope_theta",
        "mrope_section",
        "rms_norm_eps",
        "max_position_embeddings",
        "initializer_range",
        "tie_word_embeddings",
        "model_type",
    ]
)
#: Fields of ``vision_config`` that an architecture represents.
VISION = frozenset(
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
)

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


@dataclass(frozen=True)
class KnownFields:
    """The fields of a family's config.

    Attributes:
        demanded: By section, fields that must hold one of some values if present.
        represented: By section, fields that the architecture represents.
    """

    demanded: Mapping[str, Mapping[str, tuple[Any, ...]]]
    represented: Mapping[str, frozenset[str]]

    def check(self, section: str, fields: Mapping[str, Any], ignore: Collection[str]) -> None:
        """Raises an error for unknown fields and for values that the family does not compute.

        Args:
            section: Section, such as ``text_config``; "" for the top level.
            fields: Its content.
            ignore: Names of unknown fields to ignore.

        Raises:
            ValueError: Naming the field, its value and what to do.
        """
        where = f"{section}." if section else ""
        demanded = self.demanded.get(section, {})
        for name, allowed in demanded.items():
            if name in fields and fields[name] not in allowed:
                raise ValueError(
                    f"{where}{name} is {fields[name]!r}; this model computes {' or '.join(map(repr, allowed))} only"
                )
        known = self.represented[section] | set(demanded) | _HARMLESS | set(ignore)
        if not section.endswith(("rope_parameters", "rope_scaling")):
            from transformers import PretrainedConfig

            # Fields of every transformers config (generation, output options) that no model code reads.
            known |= set(PretrainedConfig().to_dict()) | {"id2label", "label2id", "problem_type", "is_encoder_decoder"}
        unknown = sorted(set(fields) - known)
        if unknown:
            each = " ".join(f"--ignore-config-field {name}" for name in unknown)
            listed = ", ".join(f'"{name}"' for name in unknown)
            raise ValueError(
                f"unknown fields in {section or 'the config'}: {', '.join(unknown)}; they may change the model's "
                f"result. If not, use `vlmdata convert … {each}`, `train.py … --set "
                f"'model.ignore_config_fields=[{listed}]'`, or ignore= of model.families.architecture_from_hf"
            )


def sections_of(config: Mapping[str, Any] | Any, kinds: Collection[str]) -> dict[str, dict[str, Any]]:
    """Returns the sections of a config: the top level as "", ``text_config``, ``vision_config`` and their rotary parts.

    Args:
        config: The content of ``config.json``, or a transformers config object.
        kinds: Accepted values of ``model_type``.

    Raises:
        ValueError: If it is the config of another model, or of a part of one.
    """
    given: dict[str, Any] = dict(config) if isinstance(config, Mapping) else config.to_dict()
    kind = given.get("model_type")
    if kind not in kinds or not given.get("text_config"):
        raise ValueError(
            f"need the top-level config of a {' or '.join(kinds)} vision-language checkpoint (with text_config), "
            f"got model_type {kind!r}"
        )
    text, vision = dict(given["text_config"]), dict(given.get("vision_config") or {})
    return {
        "": given,
        "text_config": text,
        "vision_config": vision,
        "text_config.rope_parameters": dict(text.get("rope_parameters") or {}),
        "vision_config.rope_parameters": dict(vision.get("rope_parameters") or {}),
    }


def token_ids(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, int]:
    """Returns the ids of special tokens, with transformers' defaults for fields that ``config.json`` omits."""
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return {name: given.get(name, defaults[name]) for name in names}


def is_tied(given: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    """Returns whether the output layer is the embedding table, from the top level or else ``text_config``."""
    return bool(given.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))


def vision_from_hf(vision: Mapping[str, Any]) -> VisionArchitecture:
    """Reads a whole ``vision_config``."""
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
        deepstack_layers=tuple(vision.get("deepstack_visual_indexes") or ()),
    )


def vision_to_hf(vision: VisionArchitecture, kind: str) -> dict[str, Any]:
    """Returns a ``vision_config`` without ``deepstack_visual_indexes``, which some families lack."""
    return {
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
    }


def text_to_hf(architecture: Architecture, kind: str) -> dict[str, Any]:
    """Returns the fields of ``text_config`` that all families have."""
    language = architecture.language
    text: dict[str, Any] = {
        "model_type": f"{kind}_text",
        "vocab_size": language.vocab_size,
        "hidden_size": language.hidden_size,
        "num_hidden_layers": language.num_layers,
        "num_attention_heads": language.num_attention_heads,
        "num_key_value_heads": language.num_key_value_heads,
        "head_dim": language.head_dim,
        "rms_norm_eps": language.rms_norm_eps,
        "max_position_embeddings": language.max_position_embeddings,
        "initializer_range": language.initializer_range,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": architecture.tie_embeddings,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": language.rope_theta,
            "mrope_section": list(language.mrope_section),
            "mrope_interleaved": True,
        },
    }
    if language.moe is None:
        return text | {"intermediate_size": language.intermediate_size}
    return text | {
        "num_experts": language.moe.num_experts,
        "num_experts_per_tok": language.moe.num_experts_per_tok,
        "moe_intermediate_size": language.moe.intermediate_size,
        "router_aux_loss_coef": language.moe.router_aux_loss_coef,
    }


def top_to_hf(architecture: Architecture, kind: str, name: str) -> dict[str, Any]:
    """Returns the top level of a ``config.json`` without its sections.

    Args:
        architecture: The model.
        kind: Its ``model_type``.
        name: Its class in transformers.
    """
    return {
        "model_type": kind,
        "architectures": [name],
        "image_token_id": architecture.image_token_id,
        "video_token_id": architecture.video_token_id,
        "vision_start_token_id": architecture.vision_start_token_id,
        "vision_end_token_id": architecture.vision_end_token_id,
        "tie_word_embeddings": architecture.tie_embeddings,
    }


def three(section: Any) -> tuple[int, int, int]:
    """Returns an ``mrope_section`` as a tuple."""
    t, h, w = section
    return int(t), int(h), int(w)


def _side(name: str, value: Any) -> int:
    """Returns the side of a square. transformers also allows two different sides, which this model does not compute."""
    sides = set(value) if isinstance(value, (list, tuple)) else {value}
    if len(sides) != 1:
        raise ValueError(f"vision_config.{name} must be one number, got {value}")
    return int(sides.pop())
