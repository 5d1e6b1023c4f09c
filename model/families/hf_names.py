"""The weight name table of a decoder, as far as families share it: layers, attention, dense layers and experts.

The canonical names are those of :mod:`model.weights.mapping`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from model.architecture import Architecture, LanguageArchitecture, MoeArchitecture
from model.weights.language_names import (
    LANGUAGE,
    attention_maps,
    embedding_map,
    head_maps,
    mlp_maps,
    norm_maps,
    router_map,
)
from model.weights.mapping import ParameterMap, Shape, SourceTensor, only, same
from model.weights.vision_names import vision_maps

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
    maps = [*vision_maps(architecture.vision), embedding_map(language, rows)]
    for number, layer in enumerate(layers):
        maps += layer(f"language.decoder.layers.{number}.", f"{LANGUAGE}layers.{number}.")
    maps += [*head_maps(language, rows, tied=architecture.tie_embeddings), *further]
    return {entry.name: entry for entry in maps}


def attention_layer(
    ours: str, theirs: str, language: LanguageArchitecture, experts: ExpertPart, *, gated: bool
) -> list[ParameterMap]:
    """Returns the entries of a layer with full attention, given its prefix on each side."""
    heads, groups, head = language.num_attention_heads, language.num_key_value_heads, language.head_dim
    of_heads = 1 + gated
    sizes = groups, heads, head, of_heads
    attention = attention_maps(
        ours + "self_attention.",
        theirs + "self_attn.",
        language,
        of_heads * heads * head,
        partial(_by_group, *sizes),
        partial(_by_group_back, *sizes),
    )
    return layer_maps(ours, theirs, language, attention, experts)


def layer_maps(
    ours: str, theirs: str, language: LanguageArchitecture, mixer: Sequence[ParameterMap], experts: ExpertPart
) -> list[ParameterMap]:
    """Returns the entries of a layer with any mixer of tokens: norms, mixer, feed-forward layer or experts."""
    maps = [*norm_maps(ours, theirs, language), *mixer]
    ours, theirs = ours + "mlp.", theirs + "mlp."
    width, moe = language.hidden_size, language.moe
    if moe is None:
        return maps + mlp_maps(ours, theirs, width, language.intermediate_size)
    maps.append(router_map(ours, theirs, language, moe))
    for expert in range(moe.num_experts):
        maps += experts(f"{ours}experts.local_experts.{expert}.", f"{theirs}experts.", expert)
    if shared := moe.shared_expert_intermediate_size:
        maps += mlp_maps(ours + "shared_experts.", theirs + "shared_expert.", width, shared)
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
        ways = (_turn, _turn_back) if transposed else (only, _alone)
        source = SourceTensor(theirs + name, whole, expert)
        maps.append(ParameterMap(f"{ours}{kind}.weight", shape, (source,), *ways, expert=expert))
    return maps


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


def _turn(tensors: Sequence[Tensor]) -> Tensor:
    return only(tensors).T.contiguous()


def _turn_back(parameter: Tensor) -> list[Tensor]:
    return [parameter.T.contiguous()]


def _alone(parameter: Tensor) -> list[Tensor]:
    return [parameter]
