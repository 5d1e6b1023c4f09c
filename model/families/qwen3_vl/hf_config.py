"""Converts transformers' Qwen3-VL configs to :class:`Qwen3VLArchitecture` and back.

Published ``config.json`` files have the older form of the rotary fields (``rope_scaling`` and ``rope_theta``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from vlmdata.model.families.hf_fields import ConfigFormat
from vlmdata.model.families.qwen3_vl.architecture import Qwen3VLArchitecture, Qwen3VLLanguageArchitecture

FORMAT = ConfigFormat(
    dense="qwen3_vl",
    moe="qwen3_vl_moe",
    name="Qwen3VL",
    demanded={
        "text_config": {"decoder_sparse_step": (1,), "mlp_only_layers": ([], (), None), "norm_topk_prob": (True,)},
        "text_config.rope_parameters": {"type": ("default",)},
    },
    represented={
        "text_config": frozenset(["num_local_experts", "rope_scaling"]),
        "vision_config": frozenset(["deepstack_visual_indexes"]),
    },
)


def from_hf(config: Mapping[str, Any] | Any, ignore: Collection[str] = ()) -> Qwen3VLArchitecture:
    """Reads the config of a Qwen3-VL or Qwen3-VL-MoE checkpoint; see :meth:`ConfigFormat.read`."""
    found = FORMAT.read(config, ignore)
    named = ("num_experts", "num_local_experts")  # transformers has both names for one field
    counts = [fields[name] for fields in (found.given, found.defaults) for name in named if name in fields]
    theta = (found.defaults.get("rope_parameters") or {}).get("rope_theta", 500_000.0)
    fields = found.language(theta, (24, 20, 20), experts=counts[0] if found.moe else None)
    if found.moe and not found.given.get("head_dim"):
        # transformers derives the width of a head from the given sizes, not from the default ones.
        fields["head_dim"] = found.text["hidden_size"] // found.text["num_attention_heads"]
    language = Qwen3VLLanguageArchitecture(layers=found.text["num_hidden_layers"], **fields)
    return Qwen3VLArchitecture(language=language, **found.shared)


def to_hf(architecture: Qwen3VLArchitecture) -> dict[str, Any]:
    """Returns the content of a ``config.json`` from which :func:`from_hf` and transformers restore this model."""
    moe = architecture.language.moe is not None
    text = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True} if moe else {}
    deepstack = {"deepstack_visual_indexes": list(architecture.vision.deepstack_layers)}
    return FORMAT.write(architecture, text, deepstack)
