"""The weight name table of Qwen3-VL: which Hugging Face tensors form which parameter.

The Hugging Face names are those of ``Qwen3VLForConditionalGeneration`` and ``Qwen3VLMoeForConditionalGeneration``.
Checkpoint files hold the experts' matrices transposed, as (experts, in, out). transformers turns them when it loads and
saves, and so does this table.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
from model.weights.mapping import ParameterMap, Source, only
from model.weights.vision_names import vision_maps


def parameter_maps(
    architecture: Qwen3VLArchitecture,
    *,
    mtp: bool = False,
    vocab_rows: int | None = None,
    checkpoint_names: Collection[str] = (),
) -> dict[str, ParameterMap]:
    """Returns the table of a model.

    Args:
        architecture: The model's architecture.
        mtp: Ignored; the family has no multi-token prediction.
        vocab_rows: Rows of the embedding table (see ``vocabulary_rows``); None means the vocabulary size.
            Rows beyond the vocabulary are zero and are not written to Hugging Face files.
        checkpoint_names: Ignored; all checkpoints have the same names.

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
        maps += _feed_forward(ours + "mlp.", theirs + "mlp.", language)
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


def _feed_forward(ours: str, theirs: str, language: Qwen3VLLanguageArchitecture) -> list[ParameterMap]:
    moe = language.moe
    if moe is None:
        return mlp_maps(ours, theirs, language.hidden_size, language.intermediate_size)
    maps = [router_map(ours, theirs, language, moe)]
    for expert in range(moe.num_experts):
        maps += _expert(f"{ours}experts.local_experts.{expert}.", theirs + "experts.", expert, language, moe)
    return maps


def _expert(
    ours: str, theirs: str, expert: int, language: Qwen3VLLanguageArchitecture, moe: MoeArchitecture
) -> list[ParameterMap]:
    width, wide, count = language.hidden_size, moe.intermediate_size, moe.num_experts
    into = Source(theirs + "gate_up_proj", (count, width, 2 * wide), expert)
    out = Source(theirs + "down_proj", (count, wide, width), expert)
    return [
        _transposed(ours + "linear_fc1.weight", into, expert),
        _transposed(ours + "linear_fc2.weight", out, expert),
    ]


def _transposed(ours: str, source: Source, expert: int) -> ParameterMap:
    _, inputs, outputs = source.shape
    return ParameterMap(ours, (outputs, inputs), (source,), _turn, _turn_back, expert=expert)


def _turn(tensors: Sequence[Tensor]) -> Tensor:
    return only(tensors).T.contiguous()


def _turn_back(parameter: Tensor) -> list[Tensor]:
    return [parameter.T.contiguous()]
