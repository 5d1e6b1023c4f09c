"""The weight name table of Qwen3-VL: which Hugging Face tensors form which parameter.

The Hugging Face names are those of ``Qwen3VLForConditionalGeneration`` and ``Qwen3VLMoeForConditionalGeneration``.
Checkpoints hold the experts' matrices in one of two layouts, (experts, in, out), as published ones do, or
(experts, out, in), as transformers 5 writes them (docs/decisions/0075-layout-of-experts.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from model.architecture import MoeArchitecture
from model.families.qwen3_vl.architecture import Qwen3VLArchitecture, Qwen3VLLanguageArchitecture
from model.weights.language_names import (
    LANGUAGE,
    attention_maps,
    embedding_map,
    head_maps,
    mlp_maps,
    norm_maps,
    router_map,
)
from model.weights.mapping import ParameterMap, Shape, Source, only
from model.weights.vision_names import vision_maps


def parameter_maps(
    architecture: Qwen3VLArchitecture,
    *,
    mtp: bool = False,
    vocab_rows: int | None = None,
    stored: Mapping[str, Shape] | None = None,
) -> dict[str, ParameterMap]:
    """Returns the table of a model.

    Args:
        architecture: The model's architecture.
        mtp: Ignored; the family has no multi-token prediction.
        vocab_rows: Rows of the embedding table (see ``vocabulary_rows``); None means the vocabulary size.
            Rows beyond the vocabulary are zero and are not written to Hugging Face files.
        stored: Shapes of the tensors of the checkpoint to read, by name, which tell the layout of each layer's experts.
            None gives the layout in which checkpoints are written.

    Returns:
        Maps by canonical name, in layer order. A tied output layer has no entry, since it is the embedding.
    """
    language = architecture.language
    rows = language.vocab_size if vocab_rows is None else vocab_rows
    maps = [*vision_maps(architecture.vision), embedding_map(language, rows)]
    for number in range(language.layers):
        ours, theirs = f"language.decoder.layers.{number}.", f"{LANGUAGE}layers.{number}."
        maps += norm_maps(ours, theirs, language)
        maps += _attention(ours + "self_attention.", theirs + "self_attn.", language)
        maps += _feed_forward(ours + "mlp.", theirs + "mlp.", language, stored or {})
    maps += head_maps(language, rows, tied=architecture.tie_embeddings)
    return {entry.name: entry for entry in maps}


def _attention(ours: str, theirs: str, language: Qwen3VLLanguageArchitecture) -> list[ParameterMap]:
    groups, head = language.num_key_value_heads, language.head_dim
    rows = language.num_attention_heads * head
    return attention_maps(
        ours, theirs, language, rows, partial(_by_group, groups), partial(_by_group_back, groups, rows, head)
    )


def _by_group(groups: int, tensors: Sequence[Tensor]) -> Tensor:
    """Joins the rows of q, k and v per key-value group: [queries, key, value]."""
    return torch.cat([each.unflatten(0, (groups, -1)) for each in tensors], 1).flatten(0, 1)


def _by_group_back(groups: int, rows: int, head: int, parameter: Tensor) -> list[Tensor]:
    parts = parameter.unflatten(0, (groups, -1)).split([rows // groups, head, head], 1)
    return [part.flatten(0, 1) for part in parts]


def _feed_forward(
    ours: str, theirs: str, language: Qwen3VLLanguageArchitecture, stored: Mapping[str, Shape]
) -> list[ParameterMap]:
    moe = language.moe
    if moe is None:
        return mlp_maps(ours, theirs, language.hidden_size, language.intermediate_size)
    maps = [router_map(ours, theirs, language, moe)]
    names = (theirs + "experts.gate_up_proj", theirs + "experts.down_proj")
    shapes = _shapes(language.hidden_size, moe)
    transposed = _transposed(shapes, [stored.get(name, ()) for name in names])
    for expert in range(moe.num_experts):
        to = f"{ours}experts.local_experts.{expert}."
        for kind, name, (rows, columns) in zip(("linear_fc1", "linear_fc2"), names, shapes, strict=True):
            whole = (moe.num_experts, *((columns, rows) if transposed else (rows, columns)))
            turn = _turn if transposed else only
            turn_back = _turn_back if transposed else _as_it_is
            source = Source(name, whole, expert)
            maps.append(ParameterMap(f"{to}{kind}.weight", (rows, columns), (source,), turn, turn_back, expert=expert))
    return maps


def _shapes(width: int, moe: MoeArchitecture) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns (out, in) of an expert's two matrices. At most one of them is square."""
    return (2 * moe.intermediate_size, width), (width, moe.intermediate_size)


def _transposed(shapes: Sequence[tuple[int, int]], stored: Sequence[Shape]) -> bool:
    """Whether a checkpoint holds a layer's experts as (experts, in, out), as published checkpoints do.

    The matrix that is not square tells the layout of both. Without a checkpoint, or if its shape fits neither layout,
    this is the layout to write: that of published checkpoints, which all readers turn. A square matrix is different:
    transformers from 5 on and current vLLM compare shapes, and take a square one as (experts, out, in), so both are
    written like that.

    Args:
        shapes: (out, in) of the two matrices.
        stored: Shapes of their tensors in the checkpoint.
    """
    for (rows, columns), found in zip(shapes, stored, strict=True):
        if rows != columns and found[1:] in ((rows, columns), (columns, rows)):
            return found[1:] == (columns, rows)
    return all(rows != columns for rows, columns in shapes)


def _turn(tensors: Sequence[Tensor]) -> Tensor:
    return only(tensors).T.contiguous()


def _turn_back(parameter: Tensor) -> list[Tensor]:
    return [parameter.T.contiguous()]


def _as_it_is(parameter: Tensor) -> list[Tensor]:
    return [parameter]
