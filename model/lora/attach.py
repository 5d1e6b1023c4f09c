"""Gives a built model its adapters, in any layout: which matrices, which rows and columns of them, which values.

Initial values are PEFT's: uniform input matrices, and zero output matrices. They depend on the seed and on the names of
the matrices, but not on the layout.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vlmdata.model.architecture import Architecture
from vlmdata.model.families import spec_of
from vlmdata.model.lora.adapters import AdapterForm, ExpertAdapters, Factors, LinearAdapter
from vlmdata.model.lora.options import LoraOptions
from vlmdata.model.lora.sites import LoraError, LoraSite, chosen, group_of, sites_of
from vlmdata.model.network.quantized import held_by
from vlmdata.model.network.wrapping import WRAPPER, WrappableLinear, is_of_wrapper, wrap, wrap_experts
from vlmdata.model.weight_names.table import ParameterMap, canonical_names

#: An adapter of a layer, or of a layer's experts.
Adapter = LinearAdapter | ExpertAdapters


@dataclass(frozen=True)
class Plan:
    """What a run adapts.

    Attributes:
        options: The run's.
        sites: The chosen matrices by name.
        maps: The model's weight name table, with weights as transformers holds them.
    """

    options: LoraOptions
    sites: dict[str, LoraSite]
    maps: dict[str, ParameterMap] = field(repr=False)

    @property
    def form(self) -> AdapterForm:
        """Rank, scale and dropout."""
        assert self.options.rank is not None
        return AdapterForm(self.options.rank, self.options.scale, self.options.dropout)

    def maps_of(self, canonical: str) -> ParameterMap:
        """Returns the entry of a weight; an output layer that is a copy of the embedding has the embedding's."""
        copied = "language.embedding.word_embeddings.weight"
        return self.maps[canonical if canonical in self.maps else copied]

    def described(self) -> str:
        """Formats what is trained, for the start of a run."""
        assert self.options.rank is not None
        whole = sum(math.prod(entry.shape) for entry in self.maps.values())
        groups: dict[str, dict[str, int]] = {}
        for site in self.sites.values():
            names = groups.setdefault(site.group, {})
            last = site.name.rpartition(".")[2]
            names[last] = names.get(last, 0) + 1
        total = sum(site.parameters(self.options.rank) for site in self.sites.values())
        parts = "; ".join(
            f"{group}: {', '.join(f'{count} {name}' for name, count in names.items())}"
            for group, names in groups.items()
        )
        full = "".join(f", and the weights of the part {part!r}" for part in self.options.full_parts)
        return (
            f"LoRA of rank {self.options.rank} trains {total:,} parameters, {total / whole:.2%} of the model's "
            f"{whole:,}, in {len(self.sites):,} matrices ({parts}){full}"
        )


def plan_of(architecture: Architecture, options: LoraOptions, *, mtp: bool, language_only: bool = False) -> Plan:
    """Chooses what a run adapts.

    Raises:
        LoraError: If a target fits nothing, or settings contradict each other.
    """
    maps = spec_of(architecture).parameter_maps(architecture, mtp=mtp)
    if language_only:
        maps = {name: entry for name, entry in maps.items() if not name.startswith("vision.")}
    fixed = [source.name for name, entry in maps.items() if not group_of(name) for source in entry.sources]
    return Plan(options, chosen(sites_of(maps), options, fixed), maps)


def attach(model: nn.Module, plan: Plan, seed: int = 0) -> list[Adapter]:
    """Gives a rank's part of an unwrapped model its adapters, with initial values, and freezes all other weights.

    The parts that ``plan.options`` trains in full stay trainable.

    Raises:
        LoraError: If a chosen matrix is in a layer that has no place for an adapter.
    """
    model.requires_grad_(False)
    names = canonical_names(model)
    made: list[Adapter] = []
    experts: dict[str, list[tuple[str, str]]] = {}
    for name, canonical in names.items():
        group = group_of(canonical)
        if not any(source.name.removesuffix(".weight") in plan.sites for source in plan.maps_of(canonical).sources):
            continue
        assert group
        if ".experts." in canonical:
            experts.setdefault(name.partition(".experts.")[0] + ".experts", []).append((name, canonical))
        else:
            made.append(_adapt_linear(model, name, canonical, plan))
    made += [_adapt_experts(model, name, found, plan) for name, found in experts.items()]
    for adapter in made:
        _initialise(adapter, seed)
    for name, parameter in model.named_parameters():
        if name.startswith("vision.") and not is_of_wrapper(name):
            merger = name.startswith(("vision.merger.", "vision.deepstack_mergers."))
            parameter.requires_grad_(("merger" if merger else "vision") in plan.options.full_parts)
    vars(model)["adapted"] = True
    return made


def adapters_of(model: nn.Module) -> Iterator[tuple[str, Adapter]]:
    """Yields the adapters of a rank's part of a model, with the name of each in it."""
    for name, module in model.named_modules():
        if isinstance(module, LinearAdapter | ExpertAdapters):
            yield name, module


def fill(model: nn.Module, factors: Mapping[str, Factors]) -> None:
    """Sets the adapters of a rank's part of an unwrapped model from whole factors by name of the site.

    Adapters of multi-token prediction keep their values if there are none for them.
    """
    for _, adapter in adapters_of(model):
        if any(site.name in factors or site.group != "mtp" for site in adapter.adapted):
            adapter.fill(factors)


def _adapt_linear(model: nn.Module, name: str, canonical: str, plan: Plan) -> LinearAdapter:
    layer = _layer(model, name.removesuffix(".weight"))
    entry = plan.maps[canonical]
    size, rank = layer.tensor_group.size(), layer.tensor_group.rank()
    where = [source.name.removesuffix(".weight") for source in entry.sources]
    sites = tuple(plan.sites[each] for each in where if each in plan.sites)
    # The number of each row among those of all matrices, and of its matrix, in the order of the layer's weight.
    rows, owner, start = [], [], 0
    for source, each in zip(entry.sources, where, strict=True):
        count, adapted = source.shape[0], each in plan.sites
        rows.append(torch.arange(start, start + count) if adapted else torch.full((count,), -1))
        owner.append(torch.full((count,), sites.index(plan.sites[each]) if adapted else -1))
        start += count * adapted
    # Functions of the table move whole rows, so one column shows where each goes.
    both = [entry.to_mcore([part[:, None] for part in parts])[:, 0] for parts in (rows, owner)]
    columns = None
    if entry.shard_dim == 0:
        both = [entry.shard(part, rank, size) for part in both]
    elif entry.shard_dim == 1 and size > 1:
        width = entry.shape[1] // size
        columns = (rank * width, (rank + 1) * width)
    like = held_by(layer.get_parameter("weight"))[-1]
    adapter = LinearAdapter(sites, plan.form, like, both[0], both[1], columns)
    wrap(layer, adapter)
    return adapter


def _adapt_experts(model: nn.Module, name: str, found: list[tuple[str, str]], plan: Plan) -> ExpertAdapters:
    experts = model.get_submodule(name)
    sites, numbers = {}, set()
    for _, canonical in found:
        (source,) = plan.maps[canonical].sources
        assert source.index is not None
        sites["linear_fc1" if ".linear_fc1." in canonical else "linear_fc2"] = plan.sites[source.name]
        numbers.add(source.index)
    like = held_by(model.get_parameter(found[0][0]))[-1]
    if like.is_cuda and plan.form.rank * like.itemsize % 16:
        raise LoraError(
            f"lora.rank is {plan.form.rank}: on GPUs, adapters of routed experts need a multiple of "
            f"{16 // like.itemsize}; choose one, or leave the experts out of lora.targets"
        )
    adapter = ExpertAdapters(sites, plan.form, like, (min(numbers), max(numbers) + 1))
    wrap_experts(experts, adapter)
    return adapter


def _layer(model: nn.Module, name: str) -> WrappableLinear:
    layer = model.get_submodule(name)
    if not isinstance(layer, WrappableLinear):
        raise LoraError(f"{name} ({type(layer).__name__}) has no place for an adapter; leave it out of lora.targets")
    if WRAPPER in layer._modules:
        raise LoraError(f"{name} has an adapter already")
    return layer


def _initialise(adapter: Adapter, seed: int) -> None:
    if next(adapter.parameters()).is_meta:
        return
    factors = {}
    for site in adapter.adapted:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{site.name}".encode()))
        shape = (adapter.form.rank, site.columns)
        bound = 1 / math.sqrt(site.columns)
        a = torch.empty((site.experts, *shape) if site.experts else shape).uniform_(-bound, bound, generator=generator)
        factors[site.name] = a, _zeros(site, adapter.form.rank)
    adapter.fill(factors)


def _zeros(site: LoraSite, rank: int) -> Tensor:
    shape = (site.rows, rank)
    return torch.zeros((site.experts, *shape) if site.experts else shape)
