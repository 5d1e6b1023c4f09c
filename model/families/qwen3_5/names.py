"""The weight name table of Qwen3.5-VL: which Hugging Face tensors form which parameter.

Conversion and tests use it. The Hugging Face names are those of ``Qwen3_5ForConditionalGeneration`` and
``Qwen3_5MoeForConditionalGeneration``, and of the ``mtp.*`` tensors in published checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from vlmdata.model.families.hf_names import attention_layer, expert_of_whole, layer_maps, table
from vlmdata.model.families.qwen3_5.architecture import LINEAR_ATTENTION, Qwen35Architecture, Qwen35LanguageArchitecture
from vlmdata.model.weight_names.table import ParameterMap, Shape, joined, same


def parameter_maps(
    architecture: Qwen35Architecture,
    *,
    mtp: bool = True,
    vocab_rows: int | None = None,
    stored: Mapping[str, Shape] | None = None,
) -> dict[str, ParameterMap]:
    """Returns the table of a model; see :class:`vlmdata.model.families.base.ParameterMaps`.

    transformers stores all experts of a layer in one tensor (``experts.gate_up_proj``). Published checkpoints store the
    experts of some layers one by one (``experts.0.gate_proj.weight``). A layer whose experts ``stored`` lists one by
    one is mapped that way; any other layer is mapped as in transformers.
    """
    language = architecture.language
    experts = partial(_expert, language, stored or {})
    full = partial(attention_layer, language=language, experts=experts, gated=True)

    def delta_net(ours: str, theirs: str) -> list[ParameterMap]:
        mixer = _delta_net(ours + "self_attention.", theirs + "linear_attn.", language)
        return layer_maps(ours, theirs, language, mixer, experts)

    layers = [delta_net if kind == LINEAR_ATTENTION else full for kind in language.layer_types]
    further: list[ParameterMap] = []
    if mtp and architecture.mtp_layers:
        width, ours = language.hidden_size, "language.predictor."
        further = [
            same(ours + "enorm.weight", "mtp.pre_fc_norm_embedding.weight", (width,)),
            same(ours + "hnorm.weight", "mtp.pre_fc_norm_hidden.weight", (width,)),
            same(ours + "final_layernorm.weight", "mtp.norm.weight", (width,)),
            same(ours + "eh_proj.weight", "mtp.fc.weight", (width, 2 * width), 0),
            *full(ours + "layer.", "mtp.layers.0."),
        ]
    return table(architecture, vocab_rows, layers, further)


def _delta_net(ours: str, theirs: str, language: Qwen35LanguageArchitecture) -> list[ParameterMap]:
    heads, width = language.linear_num_value_heads, language.hidden_size
    keys = language.linear_num_key_heads * language.linear_key_head_dim
    values = heads * language.linear_value_head_dim
    mixed, taps = 2 * keys + values, language.linear_conv_kernel_dim
    into = {"in_proj_qkv": mixed, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    sources = [(f"{theirs}{name}.weight", rows) for name, rows in into.items()]
    return [
        joined(ours + "in_proj.weight", sources, (width,), (keys, keys, values, values, heads, heads)),
        same(ours + "conv1d.weight", theirs + "conv1d.weight", (mixed, 1, taps), 0, (keys, keys, values)),
        same(ours + "dt_bias", theirs + "dt_bias", (heads,), 0),
        same(ours + "A_log", theirs + "A_log", (heads,), 0),
        same(ours + "out_norm.weight", theirs + "norm.weight", (language.linear_value_head_dim,)),
        same(ours + "out_proj.weight", theirs + "out_proj.weight", (width, values), 1),
    ]


def _expert(
    language: Qwen35LanguageArchitecture, stored: Mapping[str, Shape], ours: str, theirs: str, expert: int
) -> list[ParameterMap]:
    moe = language.moe
    assert moe is not None
    if f"{theirs}0.gate_proj.weight" not in stored:
        return expert_of_whole(ours, theirs, expert, language.hidden_size, moe)
    halves = [(f"{theirs}{expert}.{half}_proj.weight", moe.intermediate_size) for half in ("gate", "up")]
    fc1 = joined(ours + "linear_fc1.weight", halves, (language.hidden_size,), ())
    shape = (language.hidden_size, moe.intermediate_size)
    fc2 = same(ours + "linear_fc2.weight", f"{theirs}{expert}.down_proj.weight", shape)
    return [replace(fc1, shard_dim=None), fc2]
