"""The decoder's part of a weight name table, as far as families share it.

The Hugging Face names are those of ``Qwen3VLTextModel`` and ``Qwen3VLMoeTextModel``, which Qwen3.5 has too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from model.architecture import LanguageArchitecture, MoeArchitecture
from model.weights.mapping import ParameterMap, SourceTensor, fill, joined, same, trim

#: Name prefix of the decoder's tensors.
LANGUAGE = "model.language_model."


def embedding_map(language: LanguageArchitecture, rows: int) -> ParameterMap:
    """Returns the entry of the embedding table, with ``rows`` rows of which those beyond the vocabulary are zero."""
    return _vocabulary_map("embedding.word_embeddings", f"{LANGUAGE}embed_tokens.weight", language, rows)


def head_maps(language: LanguageArchitecture, rows: int, *, tied: bool) -> list[ParameterMap]:
    """Returns the entries of the final norm and the output layer. A tied output layer has none: it is the embedding."""
    norm = same("language.decoder.final_layernorm.weight", f"{LANGUAGE}norm.weight", (language.hidden_size,))
    return [norm] if tied else [norm, _vocabulary_map("output_layer", "lm_head.weight", language, rows)]


def norm_maps(ours: str, theirs: str, language: LanguageArchitecture) -> list[ParameterMap]:
    """Returns the entries of a layer's two norms, given the layer's prefix on each side."""
    width = (language.hidden_size,)
    return [
        same(ours + "input_layernorm.weight", theirs + "input_layernorm.weight", width),
        same(ours + "pre_mlp_layernorm.weight", theirs + "post_attention_layernorm.weight", width),
    ]


def attention_maps(
    ours: str,
    theirs: str,
    language: LanguageArchitecture,
    query_rows: int,
    to_mcore: Callable[[Sequence[Tensor]], Tensor],
    to_hf: Callable[[Tensor], list[Tensor]],
) -> list[ParameterMap]:
    """Returns the entries of full attention; ``ours`` and ``theirs`` prefix the canonical and Hugging Face names.

    ``query_rows`` are those of ``q_proj``, with the gate if the family has one. ``to_mcore`` joins ``q_proj``,
    ``k_proj`` and ``v_proj`` by key-value group, as ``linear_qkv`` holds them; ``to_hf`` is its inverse.
    """
    head, width = language.head_dim, language.hidden_size
    keys = language.num_key_value_heads * head
    sizes = (query_rows, keys, keys)
    named = zip(("q_proj", "k_proj", "v_proj"), sizes, strict=True)
    sources = tuple(SourceTensor(f"{theirs}{name}.weight", (rows, width)) for name, rows in named)
    outputs = (width, language.num_attention_heads * head)
    return [
        ParameterMap(ours + "linear_qkv.weight", (sum(sizes), width), sources, to_mcore, to_hf, 0),
        same(ours + "q_layernorm.weight", theirs + "q_norm.weight", (head,)),
        same(ours + "k_layernorm.weight", theirs + "k_norm.weight", (head,)),
        same(ours + "linear_proj.weight", theirs + "o_proj.weight", outputs, 1),
    ]


def mlp_maps(ours: str, theirs: str, width: int, wide: int) -> list[ParameterMap]:
    """Returns the entries of a gated MLP with hidden size ``width`` and inner size ``wide``."""
    halves = [(f"{theirs}gate_proj.weight", wide), (f"{theirs}up_proj.weight", wide)]
    return [
        joined(ours + "linear_fc1.weight", halves, (width,), (wide, wide)),
        same(ours + "linear_fc2.weight", theirs + "down_proj.weight", (width, wide), 1),
    ]


def router_map(ours: str, theirs: str, language: LanguageArchitecture, moe: MoeArchitecture) -> ParameterMap:
    """Returns the entry of a router."""
    return same(ours + "router.weight", theirs + "gate.weight", (moe.num_experts, language.hidden_size))


def _vocabulary_map(ours: str, theirs: str, language: LanguageArchitecture, rows: int) -> ParameterMap:
    width, source = language.hidden_size, SourceTensor(theirs, (language.vocab_size, language.hidden_size))
    to_mcore, to_hf = partial(fill, rows), partial(trim, language.vocab_size)
    return ParameterMap(f"language.{ours}.weight", (rows, width), (source,), to_mcore, to_hf, 0)
