"""Converts transformers' Qwen3.5 configs to :class:`Qwen35Architecture` and back.

Later checkpoints of the same classes, such as Qwen3.6, are read if their fields are these.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from vlmdata.model.families.hf_fields import Config, ConfigFormat
from vlmdata.model.families.qwen3_5.architecture import (
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    Qwen35Architecture,
    Qwen35LanguageArchitecture,
)

#: Fields of the gated delta net, with the same names here and in transformers.
_DELTA_NET = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
FORMAT = ConfigFormat(
    dense="qwen3_5",
    moe="qwen3_5_moe",
    name="Qwen3_5",
    demanded={
        "": {"language_model_only": (False,)},
        "text_config": {
            "attn_output_gate": (True,),
            "mamba_ssm_dtype": ("float32", None),
            "mtp_use_dedicated_embeddings": (False,),
            "output_gate_type": ("silu", "swish"),
            "rope_scaling": (None,),
        },
        "vision_config": {"deepstack_visual_indexes": ([], (), None)},
    },
    represented={
        "text_config": frozenset(
            [
                *_DELTA_NET,
                "layer_types",
                "full_attention_interval",
                "shared_expert_intermediate_size",
                "partial_rotary_factor",
                "mtp_num_hidden_layers",
            ]
        ),
        "text_config.rope_parameters": frozenset(["partial_rotary_factor"]),
    },
    # The layer pattern follows from the number of layers; the default list would contradict it.
    not_default=("layer_types",),
)


def from_hf(config: Mapping[str, Any] | Any, ignore: Collection[str] = ()) -> Qwen35Architecture:
    """Reads the config of a Qwen3.5 or Qwen3.5-MoE vision-language checkpoint; see :meth:`ConfigFormat.read`."""
    found = FORMAT.read(config, ignore)
    text = found.text
    rope: dict[str, Any] = text.get("rope_parameters") or {}
    shared_expert = text["shared_expert_intermediate_size"] if found.moe else 0
    # Without rotary fields in the config, transformers' defaults apply, not those of published checkpoints.
    theta = 10_000_000.0 if found.rope else rope.get("rope_theta", 10_000_000.0)
    language = Qwen35LanguageArchitecture(
        **found.language(theta, (11, 11, 10), shared_expert=shared_expert),
        **{name: text[name] for name in _DELTA_NET},
        layer_types=_layer_types(found),
        partial_rotary_factor=float(rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))),
    )
    mtp = int(text.get("mtp_num_hidden_layers") or 0)
    return Qwen35Architecture(language=language, mtp_layers=mtp, **found.shared)


def to_hf(architecture: Qwen35Architecture) -> dict[str, Any]:
    """Returns the content of a ``config.json`` from which :func:`from_hf` and transformers restore this model."""
    language = architecture.language
    text = {name: getattr(language, name) for name in _DELTA_NET} | {
        "layer_types": list(language.layer_types),
        "attn_output_gate": True,
        "mtp_num_hidden_layers": architecture.mtp_layers,
        "mtp_use_dedicated_embeddings": False,
    }
    if language.moe is not None:
        text["shared_expert_intermediate_size"] = language.moe.shared_expert_intermediate_size
    written = FORMAT.write(architecture, text, {})
    written["text_config"]["rope_parameters"]["partial_rotary_factor"] = language.partial_rotary_factor
    return written


def _layer_types(found: Config) -> tuple[str, ...]:
    layers, count = found.text.get("layer_types"), found.text["num_hidden_layers"]
    if layers is None:
        interval = found.text.get("full_attention_interval") or 4
        layers = [FULL_ATTENTION if (i + 1) % interval == 0 else LINEAR_ATTENTION for i in range(count)]
    if len(layers) != count:
        raise ValueError(f"text_config.layer_types has {len(layers)} entries for num_hidden_layers {count}")
    return tuple(layers)
