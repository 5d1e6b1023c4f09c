"""Which Hugging Face tensors make up which parameter of a Qwen3.5-VL: the table of conversion and tests.

Names on the Hugging Face side are those of ``Qwen3_5ForConditionalGeneration`` / ``Qwen3_5MoeForConditionalGeneration``
and of the ``mtp.*`` tensors in published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from model.architecture import MoeArchitecture
from model.families.qwen3_5.architecture import LINEAR_ATTENTION, Qwen35Architecture, Qwen35LanguageArchitecture
from model.weights.mapping import ParameterMap, Source, fill, join, joined, only, parts, same, trim
from model.weights.vision_names import vision_maps

_LANGUAGE = "model.language_model."


def parameter_maps(
    architecture: Qwen35Architecture,
    *,
    mtp: bool = True,
    vocab_rows: int | None = None,
    checkpoint_names: Collection[str] = (),
) -> dict[str, ParameterMap]:
    """The table of a model.

    Args:
        architecture: Of the model.
        mtp: Whether the multi-token prediction layer, if the architecture has one, is part of it.
        vocab_rows: Rows of the embedding table (see ``vocabulary_rows``); the vocabulary's if None.
            Rows beyond the vocabulary are zero and left out of what is written for Hugging Face.
        checkpoint_names: Names of the tensors of the checkpoint that is read. transformers holds all experts of a layer
            in one tensor (``experts.gate_up_proj``), published checkpoints in some layers each by itself
            (``experts.0.gate_proj.weight``); a layer whose experts appear here one by one is mapped so, any other as
            transformers does.

    Returns:
        By canonical name, in the order of the layers. A tied output layer has no entry: it is the embedding.
    """
    language = architecture.language
    rows = language.vocab_size if vocab_rows is None else vocab_rows
    layers = _Layers(language, frozenset(checkpoint_names))
    maps = [
        *vision_maps(architecture.vision),
        _vocabulary_map("embedding.word_embeddings", "embed_tokens", language, rows),
    ]
    for number, kind in enumerate(language.layer_types):
        ours, theirs = f"language.decoder.layers.{number}.", f"{_LANGUAGE}layers.{number}."
        maps += layers.maps(ours, theirs, linear=kind == LINEAR_ATTENTION)
    maps.append(same("language.decoder.final_layernorm.weight", f"{_LANGUAGE}norm.weight", (language.hidden_size,)))
    if not architecture.tie_embeddings:
        maps.append(_vocabulary_map("output_layer", None, language, rows))
    if mtp and architecture.mtp_layers:
        maps += _mtp_maps(language, layers)
    return {entry.name: entry for entry in maps}


def _gated_qkv(groups: int, heads: int, width: int, tensors: Sequence[Tensor]) -> Tensor:
    """q_proj's rows are per head [query, gate]; megatron-core's per group [queries, gates, key, value]."""
    query, key, value = tensors
    both = query.unflatten(0, (groups, heads // groups, 2, width))
    key, value = key.unflatten(0, (groups, width)), value.unflatten(0, (groups, width))
    return torch.cat([both[:, :, 0].flatten(1, 2), both[:, :, 1].flatten(1, 2), key, value], 1).flatten(0, 1)


def _gated_qkv_back(groups: int, heads: int, width: int, parameter: Tensor) -> list[Tensor]:
    each = heads // groups * width
    query, gate, key, value = parameter.unflatten(0, (groups, -1)).split([each, each, width, width], 1)
    both = torch.stack([x.unflatten(1, (-1, width)) for x in (query, gate)], 2)
    return [both.flatten(0, 3), key.flatten(0, 1), value.flatten(0, 1)]


def _vocabulary_map(ours: str, theirs: str | None, language: Qwen35LanguageArchitecture, rows: int) -> ParameterMap:
    source = "lm_head.weight" if theirs is None else f"{_LANGUAGE}{theirs}.weight"
    shape = (language.vocab_size, language.hidden_size)
    return ParameterMap(
        f"language.{ours}.weight",
        (rows, language.hidden_size),
        (Source(source, shape),),
        partial(fill, rows),
        partial(trim, language.vocab_size),
        0,
    )


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
    """Maps of decoder layers."""

    language: Qwen35LanguageArchitecture
    checkpoint_names: frozenset[str]

    def maps(self, ours: str, theirs: str, *, linear: bool) -> list[ParameterMap]:
        """One layer, given the prefixes of both sides."""
        width = (self.language.hidden_size,)
        norms = [
            same(ours + "input_layernorm.weight", theirs + "input_layernorm.weight", width),
            same(ours + "pre_mlp_layernorm.weight", theirs + "post_attention_layernorm.weight", width),
        ]
        attention = self._delta_net if linear else self._attention
        moe = self.language.moe
        if moe is None:
            mlp = self._mlp(ours + "mlp.", theirs + "mlp.", self.language.intermediate_size)
        else:
            mlp = self._moe(ours + "mlp.", theirs + "mlp.", moe)
        mixer = "linear_attn." if linear else "self_attn."
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
        width = language.hidden_size
        sizes = (2 * heads * head, groups * head, groups * head)
        qkv = ParameterMap(
            ours + "linear_qkv.weight",
            (sum(sizes), width),
            tuple(
                Source(f"{theirs}{name}.weight", (rows, width))
                for name, rows in zip(("q_proj", "k_proj", "v_proj"), sizes, strict=True)
            ),
            partial(_gated_qkv, groups, heads, head),
            partial(_gated_qkv_back, groups, heads, head),
            0,
        )
        return [
            qkv,
            same(ours + "q_layernorm.weight", theirs + "q_norm.weight", (head,)),
            same(ours + "k_layernorm.weight", theirs + "k_norm.weight", (head,)),
            same(ours + "linear_proj.weight", theirs + "o_proj.weight", (width, heads * head), 1),
        ]

    def _mlp(self, ours: str, theirs: str, wide: int) -> list[ParameterMap]:
        width = self.language.hidden_size
        halves = [(f"{theirs}gate_proj.weight", wide), (f"{theirs}up_proj.weight", wide)]
        return [
            joined(ours + "linear_fc1.weight", halves, (width,), (wide, wide)),
            same(ours + "linear_fc2.weight", theirs + "down_proj.weight", (width, wide), 1),
        ]

    def _moe(self, ours: str, theirs: str, moe: MoeArchitecture) -> list[ParameterMap]:
        width = self.language.hidden_size
        maps = [same(ours + "router.weight", theirs + "gate.weight", (moe.num_experts, width))]
        for expert in range(moe.num_experts):
            maps += self._expert(ours, theirs, expert, moe)
        maps += self._mlp(ours + "shared_experts.", theirs + "shared_expert.", moe.shared_expert_intermediate_size)
        maps.append(same(ours + "shared_experts.gate_weight", theirs + "shared_expert_gate.weight", (1, width)))
        return maps

    def _expert(self, ours: str, theirs: str, expert: int, moe: MoeArchitecture) -> list[ParameterMap]:
        width, wide, count = self.language.hidden_size, moe.intermediate_size, moe.num_experts
        ours, into, out = f"{ours}experts.local_experts.{expert}.", (2 * wide, width), (width, wide)
        if f"{theirs}experts.0.gate_proj.weight" not in self.checkpoint_names:
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
