"""The weight name table of Qwen3.5-VL: which Hugging Face tensors form which parameter.

Conversion and tests use it. The Hugging Face names are those of ``Qwen3_5ForConditionalGeneration`` and
``Qwen3_5MoeForConditionalGeneration``, and of the ``mtp.*`` tensors in published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from model.architecture import MoeArchitecture
from model.families.qwen3_5.architecture import LINEAR_ATTENTION, Qwen35Architecture, Qwen35LanguageArchitecture
from model.weights.language_names import (
    LANGUAGE,
    attention_maps,
    embedding_map,
    head_maps,
    mlp_maps,
    norm_maps,
    router_map,
)
from model.weights.mapping import ParameterMap, Shape, Source, join, joined, only, parts, same
from model.weights.vision_names import vision_maps


def parameter_maps(
    architecture: Qwen35Architecture,
    *,
    mtp: bool = True,
    vocab_rows: int | None = None,
    stored: Mapping[str, Shape] | None = None,
) -> dict[str, ParameterMap]:
    """Returns the table of a model.

    Args:
        architecture: The model's architecture.
        mtp: Whether to include the multi-token prediction layer, if the architecture has one.
        vocab_rows: Rows of the embedding table (see ``vocabulary_rows``); None means the vocabulary size.
            Rows beyond the vocabulary are zero and are not written to Hugging Face files.
        stored: Shapes of the tensors of the checkpoint to read, by name. transformers stores all experts of a layer
            in one tensor (``experts.gate_up_proj``). Published checkpoints store the experts of some layers one by one
            (``experts.0.gate_proj.weight``). A layer whose experts are listed here one by one is mapped that way;
            any other layer is mapped as in transformers.

    Returns:
        Maps by canonical name, in layer order. A tied output layer has no entry, since it is the embedding.
    """
    language = architecture.language
    rows = language.vocab_size if vocab_rows is None else vocab_rows
    layers = _Layers(language, frozenset(stored or ()))
    maps = [
        *vision_maps(architecture.vision),
        embedding_map(language, rows),
    ]
    for number, kind in enumerate(language.layer_types):
        ours, theirs = f"language.decoder.layers.{number}.", f"{LANGUAGE}layers.{number}."
        maps += layers.maps(ours, theirs, linear=kind == LINEAR_ATTENTION)
    maps += head_maps(language, rows, tied=architecture.tie_embeddings)
    if mtp and architecture.mtp_layers:
        maps += _mtp_maps(language, layers)
    return {entry.name: entry for entry in maps}


def _gated_qkv(groups: int, heads: int, width: int, tensors: Sequence[Tensor]) -> Tensor:
    """Rows of q_proj are [query, gate] per head; megatron-core's are [queries, gates, key, value] per group."""
    query, key, value = tensors
    both = query.unflatten(0, (groups, heads // groups, 2, width))
    key, value = key.unflatten(0, (groups, width)), value.unflatten(0, (groups, width))
    return torch.cat([both[:, :, 0].flatten(1, 2), both[:, :, 1].flatten(1, 2), key, value], 1).flatten(0, 1)


def _gated_qkv_back(groups: int, heads: int, width: int, parameter: Tensor) -> list[Tensor]:
    each = heads // groups * width
    query, gate, key, value = parameter.unflatten(0, (groups, -1)).split([each, each, width, width], 1)
    both = torch.stack([x.unflatten(1, (-1, width)) for x in (query, gate)], 2)
    return [both.flatten(0, 3), key.flatten(0, 1), value.flatten(0, 1)]


def _mtp_maps(language: Qwen35LanguageArchitecture, layers: _Layers) -> list[ParameterMap]:
    width, ours = language.hidden_size, "language.predictor."
    return [
        same(ours + "enorm.weight", "mtp.pre_fc_norm_embedding.weight", (width,)),
        same(ours + "hnorm.weight", "mtp.pre_fc_norm_hidden.weight", (width,)),
        same(ours + "final_layernorm.weight", "mtp.norm.weight", (width,)),
        same(ours + "eh_proj.weight", "mtp.fc.weight", (width, 2 * width), 0),
        *layers.maps(ours + "layer.", "mtp.layers.0.", linear=False),
    ]


@dataclass(frozen=True)
class _Layers:
    """Makes the maps of decoder layers."""

    language: Qwen35LanguageArchitecture
    stored: frozenset[str]

    def maps(self, ours: str, theirs: str, *, linear: bool) -> list[ParameterMap]:
        """Maps one layer, given its prefix on each side."""
        attention = self._delta_net if linear else self._attention
        moe = self.language.moe
        if moe is None:
            mlp = mlp_maps(ours + "mlp.", theirs + "mlp.", self.language.hidden_size, self.language.intermediate_size)
        else:
            mlp = self._moe(ours + "mlp.", theirs + "mlp.", moe)
        mixer = "linear_attn." if linear else "self_attn."
        norms = norm_maps(ours, theirs, self.language)
        return [*norms, *attention(ours + "self_attention.", theirs + mixer), *mlp]

    def _delta_net(self, ours: str, theirs: str) -> list[ParameterMap]:
        language = self.language
        heads, width = language.linear_num_value_heads, language.hidden_size
        keys = language.linear_num_key_heads * language.linear_key_head_dim
        values = heads * language.linear_value_head_dim
        mixed = 2 * keys + values
        into = [("in_proj_qkv", mixed), ("in_proj_z", values), ("in_proj_b", heads), ("in_proj_a", heads)]
        return [
            joined(
                ours + "in_proj.weight",
                [(f"{theirs}{name}.weight", rows) for name, rows in into],
                (width,),
                (keys, keys, values, values, heads, heads),
            ),
            same(
                ours + "conv1d.weight",
                theirs + "conv1d.weight",
                (mixed, 1, language.linear_conv_kernel_dim),
                0,
                (keys, keys, values),
            ),
            same(ours + "dt_bias", theirs + "dt_bias", (heads,), 0),
            same(ours + "A_log", theirs + "A_log", (heads,), 0),
            same(ours + "out_norm.weight", theirs + "norm.weight", (language.linear_value_head_dim,)),
            same(ours + "out_proj.weight", theirs + "out_proj.weight", (width, values), 1),
        ]

    def _attention(self, ours: str, theirs: str) -> list[ParameterMap]:
        language = self.language
        heads, groups, head = language.num_attention_heads, language.num_key_value_heads, language.head_dim
        to_mcore, to_hf = partial(_gated_qkv, groups, heads, head), partial(_gated_qkv_back, groups, heads, head)
        return attention_maps(ours, theirs, language, 2 * heads * head, to_mcore, to_hf)

    def _moe(self, ours: str, theirs: str, moe: MoeArchitecture) -> list[ParameterMap]:
        width = self.language.hidden_size
        maps = [router_map(ours, theirs, self.language, moe)]
        for expert in range(moe.num_experts):
            maps += self._expert(ours, theirs, expert, moe)
        shared = moe.shared_expert_intermediate_size
        maps += mlp_maps(ours + "shared_experts.", theirs + "shared_expert.", width, shared)
        maps.append(same(ours + "shared_experts.gate_weight", theirs + "shared_expert_gate.weight", (1, width)))
        return maps

    def _expert(self, ours: str, theirs: str, expert: int, moe: MoeArchitecture) -> list[ParameterMap]:
        width, wide, count = self.language.hidden_size, moe.intermediate_size, moe.num_experts
        ours, into, out = f"{ours}experts.local_experts.{expert}.", (2 * wide, width), (width, wide)
        if f"{theirs}experts.0.gate_proj.weight" not in self.stored:
            first = (Source(theirs + "experts.gate_up_proj", (count, *into), expert),)
            second = Source(theirs + "experts.down_proj", (count, *out), expert)
            split: Callable[[Tensor], list[Tensor]] = lambda x: [x]  # noqa: E731
        else:
            names = (f"{theirs}experts.{expert}.{half}_proj.weight" for half in ("gate", "up"))
            first = tuple(Source(name, (wide, width)) for name in names)  # type: ignore[assignment]
            second = Source(f"{theirs}experts.{expert}.down_proj.weight", out)
            split = partial(parts, (wide, wide))
        return [
            ParameterMap(ours + "linear_fc1.weight", into, first, join, split, expert=expert),
            ParameterMap(ours + "linear_fc2.weight", out, (second,), only, lambda x: [x], expert=expert),
        ]
