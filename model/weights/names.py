"""Which Hugging Face tensors make up which megatron-core parameter, and how: the table of conversion and tests.

Names on the Hugging Face side are those of ``Qwen3_5ForConditionalGeneration`` / ``Qwen3_5MoeForConditionalGeneration``
and of the ``mtp.*`` tensors in published checkpoints. On megatron-core's side a parameter's *canonical* name is the one
it has in a model of one process with the torch back end; :func:`canonical_names` gives it for any other layout and back
end.

All functions only move values, so both directions are exact inverses in every dtype.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from model.architecture import LINEAR_ATTENTION, Architecture, LanguageArchitecture, MoeArchitecture

Shape = tuple[int, ...]

_LANGUAGE = "model.language_model."
_VISUAL = "model.visual."


@dataclass(frozen=True)
class Source:
    """A Hugging Face tensor, or one entry of its first axis.

    Attributes:
        name: In the checkpoint.
        shape: Of the whole tensor.
        index: The entry that is meant (an expert); None for the whole tensor.
    """

    name: str
    shape: Shape
    index: int | None = None

    def take(self, tensor: Tensor) -> Tensor:
        """What is meant of the whole tensor."""
        return tensor if self.index is None else tensor[self.index]


@dataclass(frozen=True)
class ParameterMap:
    """How one parameter is made, unmade and cut.

    Attributes:
        name: Canonical name.
        shape: Of the parameter without tensor parallelism.
        sources: The tensors it is made of.
        to_mcore: From the sources (their entries, in order) to the parameter.
        to_hf: The inverse.
        shard_dim: Axis that tensor parallelism cuts; None for a parameter that every rank holds.
        sections: Lengths of parts of that axis that are cut one by one; empty for the axis as a whole.
        expert: Global number of the expert it belongs to.
    """

    name: str
    shape: Shape
    sources: tuple[Source, ...]
    to_mcore: Callable[[Sequence[Tensor]], Tensor]
    to_hf: Callable[[Tensor], list[Tensor]]
    shard_dim: int | None = None
    sections: tuple[int, ...] = ()
    expert: int | None = None

    def shard(self, parameter: Tensor, rank: int, size: int) -> Tensor:
        """The part of a tensor-parallel rank."""
        if self.shard_dim is None or size == 1:
            return parameter
        parts = parameter.split(self.sections or (parameter.shape[self.shard_dim],), self.shard_dim)
        return torch.cat([part.chunk(size, self.shard_dim)[rank] for part in parts], self.shard_dim)

    def unshard(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole parameter from the parts of all tensor-parallel ranks."""
        if self.shard_dim is None or len(parts) == 1:
            return parts[0]
        axis, size = self.shard_dim, len(parts)
        lengths = [section // size for section in self.sections] or [parts[0].shape[axis]]
        columns = zip(*(part.split(lengths, axis) for part in parts), strict=True)
        return torch.cat([piece for column in columns for piece in column], axis)


def parameter_maps(
    architecture: Architecture,
    *,
    mtp: bool = True,
    vocab_rows: int | None = None,
    checkpoint_names: Collection[str] = (),
) -> dict[str, ParameterMap]:
    """The table of a model.

    Args:
        architecture: Of the model.
        mtp: Whether the multi-token prediction layer, if the architecture has one, is part of it.
        vocab_rows: Rows of the embedding table (:func:`model.network.build.vocabulary_rows`); the vocabulary's if None.
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
    maps = [*_vision_maps(architecture), _vocabulary_map("embedding.word_embeddings", "embed_tokens", language, rows)]
    for number, kind in enumerate(language.layer_types):
        ours, theirs = f"language.decoder.layers.{number}.", f"{_LANGUAGE}layers.{number}."
        maps += layers.maps(ours, theirs, linear=kind == LINEAR_ATTENTION)
    maps.append(_same("language.decoder.final_layernorm.weight", f"{_LANGUAGE}norm.weight", (language.hidden_size,)))
    if not architecture.tie_embeddings:
        maps.append(_vocabulary_map("output_layer", None, language, rows))
    if mtp and architecture.mtp_layers:
        maps += _mtp_maps(language, layers)
    return {entry.name: entry for entry in maps}


def hf_names(maps: Mapping[str, ParameterMap]) -> dict[str, Shape]:
    """Every Hugging Face tensor of a table, with its shape."""
    return {source.name: source.shape for entry in maps.values() for source in entry.sources}


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Canonical names of a model's parameters on this rank.

    Args:
        model: A :class:`Qwen35VL` of any layout and back end, unwrapped.

    Returns:
        From names as ``named_parameters`` has them to canonical names.
    """
    layers: dict[str, int] = {}
    experts: dict[str, int] = {}
    for name, module in model.named_modules():
        if re.fullmatch(r"language\.decoder\.layers\.\d+", name):
            layers[name] = module.layer_number - 1
        if name.endswith(".mlp") and hasattr(module, "local_expert_indices"):
            experts[name] = module.local_expert_indices[0]
    return {name: _canonical(name, layers, experts) for name, _ in model.named_parameters()}


@torch.no_grad()
def load_from_hf(
    model: nn.Module,
    maps: Mapping[str, ParameterMap],
    take: Callable[[Source], Tensor],
    *,
    tensor_rank: int = 0,
    tensor_parallel: int = 1,
    vision_parallel: int | None = None,
    leave: tuple[str, ...] = (),
) -> None:
    """Fills a model's parameters on this rank from Hugging Face tensors.

    Args:
        model: As for :func:`canonical_names`.
        maps: The table.
        take: Gives what a source means: a tensor, or one entry of it.
        tensor_rank: Tensor-parallel rank.
        tensor_parallel: Tensor-parallel size.
        vision_parallel: That of the vision tower: the same (None), or 1.
        leave: What canonical names of parameters begin with that stay as they are.

    Raises:
        KeyError: If a parameter is not in the table.
        ValueError: If shapes differ.
    """
    names = canonical_names(model)
    for name, parameter in model.named_parameters():
        if names[name].startswith(leave):
            continue
        entry = _entry(maps, names[name])
        value = entry.to_mcore([take(source) for source in entry.sources])
        if vision_parallel != 1 or not names[name].startswith("vision."):
            value = entry.shard(value, tensor_rank, tensor_parallel)
        if value.shape != parameter.shape:
            raise ValueError(
                f"{name} has shape {tuple(parameter.shape)}, but {', '.join(s.name for s in entry.sources)} give "
                f"{tuple(value.shape)}: the checkpoint is of another architecture"
            )
        parameter.copy_(value)


def _entry(maps: Mapping[str, ParameterMap], name: str) -> ParameterMap:
    """A tied output layer of its own (last pipeline stage) is a copy of the embedding."""
    if name not in maps and name == "language.output_layer.weight":
        return maps["language.embedding.word_embeddings.weight"]
    return maps[name]


def _later(first: int, number: re.Match[str]) -> str:
    return str(int(number[0]) + first)


def _canonical(name: str, layers: Mapping[str, int], experts: Mapping[str, int]) -> str:
    for prefix, first in experts.items():
        if name.startswith(f"{prefix}.experts."):
            # Grouped experts (Transformer Engine): linear_fc1.weight3; one by one: local_experts.3.linear_fc1.weight.
            name = re.sub(r"\.experts\.(linear_fc[12])\.weight(\d+)$", r".experts.local_experts.\2.\1.weight", name)
            name = re.sub(r"(?<=local_experts\.)\d+", partial(_later, first), name)
    found = re.match(r"language\.decoder\.layers\.\d+", name)
    if found:
        name = f"language.decoder.layers.{layers[found[0]]}{name[found.end() :]}"
    # Transformer Engine keeps a norm in the linear layer behind it.
    name = re.sub(r"self_attention\.(linear_qkv|in_proj)\.layer_norm_weight$", "input_layernorm.weight", name)
    return re.sub(r"mlp\.linear_fc1\.layer_norm_weight$", "pre_mlp_layernorm.weight", name)


# How values move. Every function takes and gives whole parameters.


def _only(tensors: Sequence[Tensor]) -> Tensor:
    (tensor,) = tensors
    return tensor


def _join(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors))


def _parts(sizes: tuple[int, ...], parameter: Tensor) -> list[Tensor]:
    return list(parameter.split(sizes))


def _reshape(shape: Shape, tensors: Sequence[Tensor]) -> Tensor:
    return _only(tensors).reshape(shape)


def _reshape_back(shape: Shape, parameter: Tensor) -> list[Tensor]:
    return [parameter.reshape(shape)]


def _fill(rows: int, tensors: Sequence[Tensor]) -> Tensor:
    table = _only(tensors)
    return torch.cat([table, table.new_zeros(rows - table.shape[0], table.shape[1])])


def _trim(rows: int, parameter: Tensor) -> list[Tensor]:
    return [parameter[:rows]]


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


def _by_head(heads: int, tensors: Sequence[Tensor]) -> Tensor:
    """Qkv's rows are [queries, keys, values]; ours per head [query, key, value]."""
    return _only(tensors).unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)


def _by_head_back(heads: int, parameter: Tensor) -> list[Tensor]:
    return [parameter.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)]


def _same(
    name: str, source: str, shape: Shape, shard_dim: int | None = None, sections: tuple[int, ...] = ()
) -> ParameterMap:
    """A parameter that is a tensor as it stands."""
    return ParameterMap(name, shape, (Source(source, shape),), _only, lambda x: [x], shard_dim, sections)


def _joined(name: str, sources: Sequence[tuple[str, int]], rest: Shape, sections: tuple[int, ...]) -> ParameterMap:
    """A parameter that is several tensors one after another, cut by sections."""
    sizes = tuple(rows for _, rows in sources)
    return ParameterMap(
        name,
        (sum(sizes), *rest),
        tuple(Source(source, (rows, *rest)) for source, rows in sources),
        _join,
        partial(_parts, sizes),
        0,
        sections,
    )


def _vocabulary_map(ours: str, theirs: str | None, language: LanguageArchitecture, rows: int) -> ParameterMap:
    source = "lm_head.weight" if theirs is None else f"{_LANGUAGE}{theirs}.weight"
    shape = (language.vocab_size, language.hidden_size)
    return ParameterMap(
        f"language.{ours}.weight",
        (rows, language.hidden_size),
        (Source(source, shape),),
        partial(_fill, rows),
        partial(_trim, language.vocab_size),
        0,
    )


def _vision_maps(architecture: Architecture) -> list[ParameterMap]:
    vision = architecture.vision
    width, wide, merged = vision.hidden_size, vision.intermediate_size, vision.hidden_size * vision.merge_unit
    kernel = (width, vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    flat = (width, vision.patch_values)
    maps = [
        ParameterMap(
            "vision.patch_embed.weight",
            flat,
            (Source(f"{_VISUAL}patch_embed.proj.weight", kernel),),
            partial(_reshape, flat),
            partial(_reshape_back, kernel),
        ),
        _same("vision.patch_embed.bias", f"{_VISUAL}patch_embed.proj.bias", (width,)),
        _same("vision.pos_embed.weight", f"{_VISUAL}pos_embed.weight", (vision.num_position_embeddings, width)),
    ]
    for number in range(vision.depth):
        ours, theirs = f"vision.blocks.{number}.", f"{_VISUAL}blocks.{number}."
        maps += _affine_pair(ours + "norm1", theirs + "norm1", width)
        maps += _affine_pair(ours + "norm2", theirs + "norm2", width)
        for kind, shape in (("weight", (3 * width, width)), ("bias", (3 * width,))):
            maps.append(
                ParameterMap(
                    f"{ours}qkv.{kind}",
                    shape,
                    (Source(f"{theirs}attn.qkv.{kind}", shape),),
                    partial(_by_head, vision.num_heads),
                    partial(_by_head_back, vision.num_heads),
                    0,
                )
            )
        maps += _row_parallel(ours + "proj", theirs + "attn.proj", width, width)
        maps += _column_parallel(ours + "linear_fc1", theirs + "mlp.linear_fc1", width, wide)
        maps += _row_parallel(ours + "linear_fc2", theirs + "mlp.linear_fc2", wide, width)
    ours, theirs = "vision.merger.", f"{_VISUAL}merger."
    maps += _affine_pair(ours + "norm", theirs + "norm", width)
    maps += _column_parallel(ours + "linear_fc1", theirs + "linear_fc1", merged, merged)
    maps += _row_parallel(ours + "linear_fc2", theirs + "linear_fc2", merged, vision.out_hidden_size)
    return maps


def _affine_pair(ours: str, theirs: str, width: int) -> list[ParameterMap]:
    return [_same(f"{ours}.{kind}", f"{theirs}.{kind}", (width,)) for kind in ("weight", "bias")]


def _column_parallel(ours: str, theirs: str, width: int, out: int) -> list[ParameterMap]:
    return [
        _same(f"{ours}.weight", f"{theirs}.weight", (out, width), 0),
        _same(f"{ours}.bias", f"{theirs}.bias", (out,), 0),
    ]


def _row_parallel(ours: str, theirs: str, width: int, out: int) -> list[ParameterMap]:
    return [
        _same(f"{ours}.weight", f"{theirs}.weight", (out, width), 1),
        _same(f"{ours}.bias", f"{theirs}.bias", (out,)),
    ]


def _mtp_maps(language: LanguageArchitecture, layers: _Layers) -> list[ParameterMap]:
    width, ours = language.hidden_size, "language.predictor."
    return [
        _same(ours + "enorm.weight", "mtp.pre_fc_norm_embedding.weight", (width,)),
        _same(ours + "hnorm.weight", "mtp.pre_fc_norm_hidden.weight", (width,)),
        _same(ours + "final_layernorm.weight", "mtp.norm.weight", (width,)),
        _same(ours + "eh_proj.weight", "mtp.fc.weight", (width, 2 * width), 0),
        *layers.maps(ours + "layer.", "mtp.layers.0.", linear=False),
    ]


@dataclass(frozen=True)
class _Layers:
    """Maps of decoder layers."""

    language: LanguageArchitecture
    checkpoint_names: frozenset[str]

    def maps(self, ours: str, theirs: str, *, linear: bool) -> list[ParameterMap]:
        """One layer, given the prefixes of both sides."""
        width = (self.language.hidden_size,)
        norms = [
            _same(ours + "input_layernorm.weight", theirs + "input_layernorm.weight", width),
            _same(ours + "pre_mlp_layernorm.weight", theirs + "post_attention_layernorm.weight", width),
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
            _joined(
                ours + "in_proj.weight",
                [(f"{theirs}{name}.weight", rows) for name, rows in into],
                (width,),
                (keys, keys, values, values, heads, heads),
            ),
            _same(
                ours + "conv1d.weight",
                theirs + "conv1d.weight",
                (mixed, 1, language.linear_conv_kernel_dim),
                0,
                (keys, keys, values),
            ),
            _same(ours + "dt_bias", theirs + "dt_bias", (heads,), 0),
            _same(ours + "A_log", theirs + "A_log", (heads,), 0),
            _same(ours + "out_norm.weight", theirs + "norm.weight", (language.linear_value_head_dim,)),
            _same(ours + "out_proj.weight", theirs + "out_proj.weight", (width, values), 1),
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
            _same(ours + "q_layernorm.weight", theirs + "q_norm.weight", (head,)),
            _same(ours + "k_layernorm.weight", theirs + "k_norm.weight", (head,)),
            _same(ours + "linear_proj.weight", theirs + "o_proj.weight", (width, heads * head), 1),
        ]

    def _mlp(self, ours: str, theirs: str, wide: int) -> list[ParameterMap]:
        width = self.language.hidden_size
        halves = [(f"{theirs}gate_proj.weight", wide), (f"{theirs}up_proj.weight", wide)]
        return [
            _joined(ours + "linear_fc1.weight", halves, (width,), (wide, wide)),
            _same(ours + "linear_fc2.weight", theirs + "down_proj.weight", (width, wide), 1),
        ]

    def _moe(self, ours: str, theirs: str, moe: MoeArchitecture) -> list[ParameterMap]:
        width = self.language.hidden_size
        maps = [_same(ours + "router.weight", theirs + "gate.weight", (moe.num_experts, width))]
        for expert in range(moe.num_experts):
            maps += self._expert(ours, theirs, expert, moe)
        maps += self._mlp(ours + "shared_experts.", theirs + "shared_expert.", moe.shared_expert_intermediate_size)
        maps.append(_same(ours + "shared_experts.gate_weight", theirs + "shared_expert_gate.weight", (1, width)))
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
            split = partial(_parts, (wide, wide))
        return [
            ParameterMap(ours + "linear_fc1.weight", into, first, _join, split, expert=expert),
            ParameterMap(ours + "linear_fc2.weight", out, (second,), _only, lambda x: [x], expert=expert),
        ]
