"""Reads and writes transformers' ``config.json``, as far as families share it. Needs no torch.

Sources: transformers' configuration classes for names and defaults, and published ``config.json`` files for fields that
those classes do not declare.

Every field is one of four kinds: represented in the architecture, required to have the one value that the model
computes, known not to change the result, or unknown. Unknown fields raise an error, since they may change the result.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from vlmdata.model.architecture import Architecture, MoeArchitecture, VisionArchitecture

#: Fields with one name and meaning here and in transformers: ids of special tokens, ``text_config``, ``vision_config``.
_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
_TEXT = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "rms_norm_eps",
    "max_position_embeddings",
    "initializer_range",
)
_VISION = (
    "depth",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "out_hidden_size",
    "num_position_embeddings",
    "in_channels",
    "patch_size",
    "temporal_patch_size",
    "spatial_merge_size",
    "initializer_range",
)
#: By section, fields that architectures of all families represent.
_REPRESENTED = {
    "": frozenset([*_IDS, "text_config", "vision_config", "tie_word_embeddings", "model_type"]),
    "text_config": frozenset(
        [
            *_TEXT,
            "intermediate_size",
            "num_hidden_layers",
            "num_key_value_heads",
            "head_dim",
            "num_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "router_aux_loss_coef",
            "rope_parameters",
            "rope_theta",
            "mrope_section",
            "tie_word_embeddings",
            "model_type",
        ]
    ),
    "vision_config": frozenset([*_VISION, "rope_parameters", "model_type"]),
    "text_config.rope_parameters": frozenset(["rope_theta", "mrope_section"]),
    "vision_config.rope_parameters": frozenset(["rope_theta"]),
}
#: By section, fields that must hold one of some values for every family, if present.
_DEMANDED: Mapping[str, dict[str, tuple[Any, ...]]] = {
    "": {"quantization_config": (None,)},
    "text_config": {
        "attention_bias": (False, None),
        "attention_dropout": (0, 0.0, None),
        "hidden_act": ("silu",),
        "quantization_config": (None,),
        "sliding_window": (None,),
    },
    "vision_config": {"hidden_act": ("gelu_pytorch_tanh",), "quantization_config": (None,)},
    "text_config.rope_parameters": {"rope_type": ("default",), "mrope_interleaved": (True,)},
    "vision_config.rope_parameters": {"rope_type": ("axial", "default")},
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


@dataclass(frozen=True)
class Config:
    """A checked config.

    Attributes:
        moe: Whether the model has experts.
        text: Its ``text_config``, with transformers' defaults for what it omits.
        given: Its ``text_config`` alone.
        defaults: The defaults of ``text_config``.
        rope: The rotary fields that it gives.
        shared: Arguments of the architecture, except ``language``.
    """

    moe: bool
    text: Mapping[str, Any]
    given: Mapping[str, Any]
    defaults: Mapping[str, Any]
    rope: Mapping[str, Any]
    shared: Mapping[str, Any]

    def language(
        self, theta: float, mrope: tuple[int, int, int], experts: int | None = None, shared_expert: int = 0
    ) -> dict[str, Any]:
        """Returns arguments of the decoder's architecture that all families have.

        Args:
            theta: Base of the rotary embedding of a config that gives none.
            mrope: Its sections of frequencies.
            experts: Number of experts; None means ``num_experts``.
            shared_expert: Width of the shared expert.
        """
        text, moe, heads = self.text, None, self.text["num_attention_heads"]
        if self.moe:
            moe = MoeArchitecture(
                num_experts=text["num_experts"] if experts is None else experts,
                num_experts_per_tok=text["num_experts_per_tok"],
                intermediate_size=text["moe_intermediate_size"],
                shared_expert_intermediate_size=shared_expert,
                router_aux_loss_coef=text["router_aux_loss_coef"],
            )
        t, h, w = self.rope.get("mrope_section", text.get("mrope_section", mrope))
        return {name: text[name] for name in _TEXT} | {
            "intermediate_size": 0 if self.moe else text["intermediate_size"],
            "num_key_value_heads": text["num_key_value_heads"] or heads,
            "head_dim": text.get("head_dim") or text["hidden_size"] // heads,
            "moe": moe,
            "rope_theta": float(self.rope.get("rope_theta", text.get("rope_theta", theta))),
            "mrope_section": (int(t), int(h), int(w)),
        }


@dataclass(frozen=True)
class ConfigFormat:
    """The ``config.json`` of a family.

    Attributes:
        dense: ``model_type`` of its dense models.
        moe: ``model_type`` of its models with experts.
        name: Name of its dense class in transformers, without ``ForConditionalGeneration``; those with experts add Moe.
        demanded: By section, further fields that must hold one of some values if present.
        represented: By section, further fields that its architecture represents.
        not_default: Fields of ``text_config`` that follow from others, so that transformers' default would be wrong.
    """

    dense: str
    moe: str
    name: str
    demanded: Mapping[str, Mapping[str, tuple[Any, ...]]] = field(default_factory=dict)
    represented: Mapping[str, frozenset[str]] = field(default_factory=dict)
    not_default: tuple[str, ...] = ()

    @property
    def kinds(self) -> tuple[str, str]:
        """Both values of ``model_type``."""
        return self.dense, self.moe

    def read(self, config: Mapping[str, Any] | Any, ignore: Collection[str]) -> Config:
        """Checks a config and reads what families share.

        Args:
            config: The content of ``config.json``, or a transformers config object.
            ignore: Names of unknown fields (without their section) that do not change the result.

        Raises:
            ValueError: If the model is of another kind, a field has a value that the model does not compute, or
                fields are unknown.
        """
        given: dict[str, Any] = dict(config) if isinstance(config, Mapping) else config.to_dict()
        kind = given.get("model_type")
        if kind not in self.kinds or not given.get("text_config"):
            raise ValueError(
                f"need the top-level config of a {' or '.join(self.kinds)} vision-language checkpoint (with "
                f"text_config), got model_type {kind!r}"
            )
        text, vision = dict(given["text_config"]), dict(given.get("vision_config") or {})
        rope = dict(text.get("rope_parameters") or {})
        if "rope_scaling" in self.represented.get("text_config", ()):  # an older name of the same fields
            rope = dict(text.get("rope_scaling") or {}) | rope
        sections = {
            "": given,
            "text_config": text,
            "vision_config": vision,
            "text_config.rope_parameters": rope,
            "vision_config.rope_parameters": dict(vision.get("rope_parameters") or {}),
        }
        for name, fields in sections.items():
            self._check(name, fields, ignore)
        from transformers import CONFIG_MAPPING

        defaults: dict[str, Any] = CONFIG_MAPPING[kind]().to_dict()
        of_text = {name: value for name, value in defaults["text_config"].items() if name not in self.not_default}
        shared = {name: given.get(name, defaults[name]) for name in _IDS} | {
            "vision": _vision_from_hf(defaults["vision_config"] | vision),
            "tie_embeddings": bool(given.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        }
        return Config(kind == self.moe, of_text | text, text, of_text, rope, shared)

    def write(self, architecture: Architecture, text: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the content of a ``config.json``.

        Args:
            architecture: The model.
            text: Fields of ``text_config`` that only this family has.
            vision: The same of ``vision_config``.
        """
        moe = architecture.language.moe is not None
        kind, name = (self.moe, f"{self.name}Moe") if moe else (self.dense, self.name)
        return {
            "model_type": kind,
            "architectures": [f"{name}ForConditionalGeneration"],
            **{each: getattr(architecture, each) for each in _IDS},
            "tie_word_embeddings": architecture.tie_embeddings,
            "text_config": _text_to_hf(architecture, kind) | dict(text),
            "vision_config": _vision_to_hf(architecture.vision, kind) | dict(vision),
        }

    def _check(self, section: str, fields: Mapping[str, Any], ignore: Collection[str]) -> None:
        """Raises an error for unknown fields and for values that the family does not compute."""
        where = f"{section}." if section else ""
        demanded = _DEMANDED[section] | dict(self.demanded.get(section, {}))
        for name, allowed in demanded.items():
            if name in fields and fields[name] not in allowed:
                raise ValueError(
                    f"{where}{name} is {fields[name]!r}; this model computes {' or '.join(map(repr, allowed))} only"
                )
        known = (
            _REPRESENTED[section] | self.represented.get(section, frozenset()) | set(demanded) | _HARMLESS | set(ignore)
        )
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
                f"result. If not, use `vlmdata convert … {each}`, `vlmdata train … --set "
                f"'model.ignore_config_fields=[{listed}]'`, or ignore= of vlmdata.model.families.architecture_from_hf"
            )


def _vision_from_hf(vision: Mapping[str, Any]) -> VisionArchitecture:
    rope: dict[str, Any] = vision.get("rope_parameters") or {}
    sides = {name: _side(name, vision[name]) for name in ("patch_size", "temporal_patch_size")}
    return VisionArchitecture(
        **{name: vision[name] for name in _VISION} | sides,
        rope_theta=float(rope.get("rope_theta", 10_000.0)),
        deepstack_layers=tuple(vision.get("deepstack_visual_indexes") or ()),
    )


def _vision_to_hf(vision: VisionArchitecture, kind: str) -> dict[str, Any]:
    return {
        "model_type": f"{kind}_vision",
        **{name: getattr(vision, name) for name in _VISION},
        "hidden_act": "gelu_pytorch_tanh",
        "rope_parameters": {"rope_type": "axial", "rope_theta": vision.rope_theta},
    }


def _text_to_hf(architecture: Architecture, kind: str) -> dict[str, Any]:
    language = architecture.language
    text: dict[str, Any] = {
        "model_type": f"{kind}_text",
        **{name: getattr(language, name) for name in _TEXT},
        "num_hidden_layers": language.num_layers,
        "num_key_value_heads": language.num_key_value_heads,
        "head_dim": language.head_dim,
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


def _side(name: str, value: Any) -> int:
    """Returns the side of a square. transformers also allows two different sides, which this model does not compute."""
    sides = set(value) if isinstance(value, (list, tuple)) else {value}
    if len(sides) != 1:
        raise ValueError(f"vision_config.{name} must be one number, got {value}")
    return int(sides.pop())
