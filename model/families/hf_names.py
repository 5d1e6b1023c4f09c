"""The weight name table of a decoder, as far as families share it.

The canonical names are those of :mod:`vlmdata.model.weight_names.table`. The Hugging Face names are those of
``Qwen3VLTextModel`` and ``Qwen3VLMoeTextModel``, which Qwen3.5 has too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from vlmdata.model.architecture import Architecture, LanguageArchitecture, MoeArchitecture
from vlmdata.model.weight_names.table import ParameterMap, Shape, SourceTensor, joined, only, same
from vlmdata.model.weight_names.vision import vision_maps

#: Name prefix of the decoder's tensors.
_LANGUAGE = "model.language_model."
#: Makes the entries of a layer's part from its prefix on each side.
Part = Callable[[str, str], list[ParameterMap]]
#: Makes the entries of one expert from its prefix, the prefix of all experts' tensors, and its number.
ExpertPart = Callable[[str, str, int], list[ParameterMap]]


def table(
    architecture: Architecture, vocab_rows: int | None, layers: Sequence[Part], further: Sequence[ParameterMap] = ()
) -> dict[str, ParameterMap]:
    """Returns the table of a model, in layer order. A tied output layer has no entry, since it is the embedding."""
    language = architecture.language
    rows = language.vocab_size if vocab_rows is None else vocab_rows
    embedding = _vocabulary("embedding.word_embeddings", f"{_LANGUAGE}embed_tokens.weight", language, rows)
    maps = [*vision_maps(architecture.vision), embedding]
    for number, layer in enumerate(layers):
        maps += layer(f"language.decoder.layers.{number}.", f"{_LANGUAGE}layers.{number}.")
    maps.append(same("language.decoder.final_layernorm.weight", f"{_LANGUAGE}norm.weight", (language.hidden_size,)))
    if not architecture.tie_embeddings:
        maps.append(_vocabulary("output_layer", "lm_head.weight", language, rows))
    return {entry.name: entry for entry in [*maps, *further]}


def attention_layer(
    ours: str, theirs: str, language: LanguageArchitecture, experts: ExpertPart, *, gated: bool
) -> list[ParameterMap]:
    """Returns the entries of a layer with full attention, given its prefix on each side."""
    heads, groups, head = language.num_attention_heads, language.num_key_value_heads, language.head_dim
    width, sizes = language.hidden_size, (groups, heads, head, 1 + gated)
    at, there = ours + "self_attention.", theirs + "self_attn."
    rows = {"q_proj": (1 + gated) * heads * head, "k_proj": groups * head, "v_proj": groups * head}
    sources = tuple(SourceTensor(f"{there}{name}.weight", (count, width)) for name, count in rows.items())
    to_mcore, to_hf = partial(_by_group, *sizes), partial(_by_group_back, *sizes)
    attention = [
        ParameterMap(at + "linear_qkv.weight", (sum(rows.values()), width), sources, to_mcore, to_hf, 0),
        same(at + "q_layernorm.weight", there + "q_norm.weight", (head,)),
        same(at + "k_layernorm.weight", there + "k_norm.weight", (head,)),
        same(at + "linear_proj.weight", there + "o_proj.weight", (width, heads * head), 1),
    ]
    return layer_maps(ours, theirs, language, attention, experts)


def layer_maps(
    ours: str, theirs: str, language: LanguageArchitecture, mixer: Sequence[ParameterMap], experts: ExpertPart
) -> list[ParameterMap]:
    """Returns the entries of a layer with any mixer of tokens: norms, mixer, feed-forward layer or experts."""
    width, moe = language.hidden_size, language.moe
    maps = [
        same(ours + "input_layernorm.weight", theirs + "input_layernorm.weight", (width,)),
        same(ours + "pre_mlp_layernorm.weight", theirs + "post_attention_layernorm.weight", (width,)),
        *mixer,
    ]
    ours, theirs = ours + "mlp.", theirs + "mlp."
    if moe is None:
        return maps + _mlp(ours, theirs, width, language.intermediate_size)
    maps.append(same(ours + "router.weight", theirs + "gate.weight", (moe.num_experts, width)))
    for expert in range(moe.num_experts):
        maps += experts(f"{ours}experts.local_experts.{expert}.", f"{theirs}experts.", expert)
    if shared := moe.shared_expert_intermediate_size:
        maps += _mlp(ours + "shared_experts.", theirs + "shared_expert.", width, shared)
        maps.append(same(ours + "shared_experts.gate_weight", theirs + "shared_expert_gate.weight", (1, width)))
    return maps


def expert_shapes(width: int, moe: MoeArchitecture) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns (out, in) of an expert's two matrices. At most one of them is square."""
    return (2 * moe.intermediate_size, width), (width, moe.intermediate_size)


def expert_of_whole(
    ours: str, theirs: str, expert: int, width: int, moe: MoeArchitecture, *, transposed: bool = False
) -> list[ParameterMap]:
    """Returns the entries of an expert in tensors of all experts, (count, out, in) or transposed (count, in, out)."""
    maps = []
    kinds = (("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj"))
    for (kind, name), shape in zip(kinds, expert_shapes(width, moe), strict=True):
        whole: Shape = (moe.num_experts, *(reversed(shape) if transposed else shape))
        source = SourceTensor(theirs + name, whole, expert)
        maps.append(ParameterMap(f"{ours}{kind}.weight", shape, (source,)))
    if not transposed:
        return maps
    return [
        replace(each, to_mcore=lambda x: only(x).T.contiguous(), to_hf=lambda x: [x.T.contiguous()]) for each in maps
    ]


def _vocabulary(ours: str, theirs: str, language: LanguageArchitecture, rows: int) -> ParameterMap:
    """Returns the entry of a table with ``rows`` rows, of which those beyond the vocabulary are zero."""
    size, width = language.vocab_size, language.hidden_size

    def fill(tensors: Sequence[Tensor]) -> Tensor:
        table = only(tensors)
        return torch.cat([table, table.new_zeros(rows - size, width)])

    source = SourceTensor(theirs, (size, width))
    return ParameterMap(f"language.{ours}.weight", (rows, width), (source,), fill, lambda x: [x[:size]], 0)


def _mlp(ours: str, theirs: str, width: int, wide: int) -> list[ParameterMap]:
    """Returns the entries of a gated MLP with hidden size ``width`` and inner size ``wide``."""
    halves = [(f"{theirs}gate_proj.weight", wide), (f"{theirs}up_proj.weight", wide)]
    return [
        joined(ours + "linear_fc1.weight", halves, (width,), (wide, wide)),
        same(ours + "linear_fc2.weight", theirs + "down_proj.weight", (width, wide), 1),
    ]


def _by_group(groups: int, heads: int, width: int, of_heads: int, tensors: Sequence[Tensor]) -> Tensor:
    """Joins q, k and v per key-value group: [queries, gates if any, key, value]. ``q_proj`` has [query, gate] by head.

    ``of_heads`` is 2 with gates, else 1.
    """
    query, key, value = tensors
    by_head = query.unflatten(0, (groups, heads // groups, of_heads, width))
    parts = [by_head[:, :, number].flatten(1, 2) for number in range(of_heads)]
    parts += [each.unflatten(0, (groups, width)) for each in (key, value)]
    return torch.cat(parts, 1).flatten(0, 1)


def _by_group_back(groups: int, heads: int, width: int, of_heads: int, parameter: Tensor) -> list[Tensor]:
    sizes = [heads // groups * width] * of_heads + [width, width]
    *of_query, key, value = parameter.unflatten(0, (groups, -1)).split(sizes, 1)
    by_head = torch.stack([x.unflatten(1, (-1, width)) for x in of_query], 2)
    return [by_head.flatten(0, 3), key.flatten(0, 1), value.flatten(0, 1)]
