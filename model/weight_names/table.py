"""Entries of a weight name table: which Hugging Face tensors form which megatron-core parameter, and how.

The table itself belongs to the family (``model/families/NAME/names.py``). The *canonical* name of a parameter is its
name in a model of one process with the torch back end. All functions only move values, so both directions are exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vlmdata.model.network import quantized
from vlmdata.model.network.quantized import is_quantized
from vlmdata.model.network.wrapping import is_of_wrapper

Shape = tuple[int, ...]


@dataclass(frozen=True)
class SourceTensor:
    """A Hugging Face tensor, or one entry of its first axis."""

    name: str  # name in the checkpoint
    shape: Shape  # shape of the whole tensor
    index: int | None = None  # selected entry (an expert); None for the whole tensor

    def take(self, tensor: Tensor) -> Tensor:
        """Selects the source's part of the whole tensor."""
        return tensor if self.index is None else tensor[self.index]


def only(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the single tensor."""
    (tensor,) = tensors
    return tensor


@dataclass(frozen=True)
class ParameterMap:
    """Conversion and sharding of one parameter. By default, the parameter equals its one source."""

    name: str  # canonical name
    shape: Shape  # shape of the parameter without tensor parallelism
    sources: tuple[SourceTensor, ...]  # tensors that form the parameter
    #: Converts the sources (their entries, in order) to the parameter.
    to_mcore: Callable[[Sequence[Tensor]], Tensor] = only
    to_hf: Callable[[Tensor], list[Tensor]] = lambda parameter: [parameter]  # the inverse of ``to_mcore``
    shard_dim: int | None = None  # axis that tensor parallelism shards; None for a parameter that every rank holds
    #: Lengths of the parts of that axis that are sharded separately; empty to shard the whole axis.
    sections: tuple[int, ...] = ()

    def shard(self, parameter: Tensor, rank: int, size: int) -> Tensor:
        """Returns the shard of a tensor-parallel rank."""
        if self.shard_dim is None or size == 1:
            return parameter
        parts = parameter.split(self.sections or (parameter.shape[self.shard_dim],), self.shard_dim)
        return torch.cat([part.chunk(size, self.shard_dim)[rank] for part in parts], self.shard_dim)


def hf_names(maps: Mapping[str, ParameterMap]) -> dict[str, Shape]:
    """Returns the Hugging Face tensors of a table with their shapes."""
    return {source.name: source.shape for entry in maps.values() for source in entry.sources}


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Returns the canonical names of an unwrapped model's parameters on this rank, by those of ``named_parameters``.

    Those of wrappers are left out: only checkpoints have them.
    """
    layers: dict[str, int] = {}
    experts: dict[str, int] = {}
    for name, module in model.named_modules():
        if re.fullmatch(r"language\.decoder\.layers\.\d+", name):
            layers[name] = module.layer_number - 1
        if name.endswith(".mlp") and hasattr(module, "local_expert_indices"):
            experts[name] = module.local_expert_indices[0]
    names = (name for name, _ in model.named_parameters() if not is_of_wrapper(name))
    return {name: _canonical(name, layers, experts) for name in names}


@torch.no_grad()
def load_from_hf(
    model: nn.Module,
    maps: Mapping[str, ParameterMap],
    take: Callable[[SourceTensor], Tensor],
    *,
    tensor_rank: int = 0,
    tensor_parallel: int = 1,
    vision_parallel: int | None = None,
    leave: tuple[str, ...] = (),
) -> None:
    """Fills an unwrapped model's parameters on this rank from Hugging Face tensors, as ``take`` returns them.

    ``vision_parallel`` is the tensor-parallel size of the vision tower: 1, or None for the same size. Parameters whose
    canonical names start with a prefix in ``leave`` stay unchanged. A KeyError if a parameter is not in the table, a
    ValueError if shapes differ.
    """
    names = canonical_names(model)
    for name, parameter in model.named_parameters():
        if name not in names or names[name].startswith(leave):
            continue
        entry = _entry(maps, names[name])
        value = entry.to_mcore([take(source) for source in entry.sources])
        if vision_parallel != 1 or not names[name].startswith("vision."):
            value = entry.shard(value, tensor_rank, tensor_parallel)
        if value.shape != parameter.shape:
            raise ValueError(
                f"{name} has shape {tuple(parameter.shape)}, but {', '.join(s.name for s in entry.sources)} have "
                f"{tuple(value.shape)}: the checkpoint has another architecture"
            )
        assign(parameter, value)


def assign(parameter: Any, value: Tensor) -> None:
    """Copies a whole value to a parameter; of a fully sharded one (:mod:`vlmdata.model.parallel.sharding`), its rows.

    A quantized parameter (:mod:`vlmdata.model.network.quantized`) stores its codes.
    """
    if is_quantized(parameter):
        quantized.assign(parameter, value)
        return
    start: int | None = getattr(parameter, "first_row", None)
    if start is None:
        parameter.copy_(value)
    else:
        rows = parameter.to_local()
        rows.copy_(value[start : start + rows.shape[0]])


def _entry(maps: Mapping[str, ParameterMap], name: str) -> ParameterMap:
    """Finds a parameter's entry. A separate tied output layer (last pipeline stage) is a copy of the embedding."""
    if name not in maps and name == "language.output_layer.weight":
        return maps["language.embedding.word_embeddings.weight"]
    return maps[name]


def _canonical(name: str, layers: Mapping[str, int], experts: Mapping[str, int]) -> str:
    for prefix, first in experts.items():
        if name.startswith(f"{prefix}.experts."):
            # Grouped experts (Transformer Engine): linear_fc1.weight3; one by one: local_experts.3.linear_fc1.weight.
            name = re.sub(r"\.experts\.(linear_fc[12])\.weight(\d+)$", r".experts.local_experts.\2.\1.weight", name)
            if number := re.search(r"(?<=local_experts\.)\d+", name):
                name = f"{name[: number.start()]}{int(number[0]) + first}{name[number.end() :]}"
    found = re.match(r"language\.decoder\.layers\.\d+", name)
    if found:
        name = f"language.decoder.layers.{layers[found[0]]}{name[found.end() :]}"
    # Transformer Engine keeps a norm in the linear layer that follows.
    name = re.sub(r"self_attention\.(linear_qkv|in_proj)\.layer_norm_weight$", "input_layernorm.weight", name)
    return re.sub(r"mlp\.linear_fc1\.layer_norm_weight$", "pre_mlp_layernorm.weight", name)


def same(
    name: str, source: str, shape: Shape, shard_dim: int | None = None, sections: tuple[int, ...] = ()
) -> ParameterMap:
    """Maps a parameter to an identical tensor."""
    return ParameterMap(name, shape, (SourceTensor(source, shape),), shard_dim=shard_dim, sections=sections)


def joined(name: str, sources: Sequence[tuple[str, int]], rest: Shape, sections: tuple[int, ...]) -> ParameterMap:
    """Maps a parameter to several concatenated tensors, sharded by section."""
    sizes = [rows for _, rows in sources]
    tensors = tuple(SourceTensor(source, (rows, *rest)) for source, rows in sources)
    shape = (sum(sizes), *rest)
    return ParameterMap(name, shape, tensors, lambda x: torch.cat([*x]), lambda x: [*x.split(sizes)], 0, sections)
