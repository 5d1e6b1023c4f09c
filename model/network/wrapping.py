"""The seam for what wraps linear layers, such as low-rank adapters: a place in each layer and each set of experts.

With the storage "nf4", these layers are also quantized when they are built (:mod:`vlmdata.model.network.quantized`).

Providers make linear layers with :func:`wrappable`, grouped layers of experts with :func:`wrappable_group` and sets of
experts with :func:`wrappable_experts`. :func:`wrap` and :func:`wrap_experts` then give some of them a wrapper: a
submodule that adds to the layer's product. Its parameters have names and checkpoint keys of their own
(:func:`is_of_wrapper`), which other weights may lack.

All tensor-parallel ranks hold a layer's whole wrapper. Between its two products lies a tensor as narrow as its rank;
only that is exchanged. A rank's gradients cover its columns, rows or tokens only, so they are summed over the ranks
once per step (:func:`sum_wrapper_gradients`).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor, nn

from vlmdata.model.network.awaited import await_weight
from vlmdata.model.network.grouped import ExpertRows, grouped_product, may_pass_rows, pass_rows, weights_in_line
from vlmdata.model.network.quantized import quantizing
from vlmdata.model.network.settings import Storage

#: Name of the submodule of a wrapped layer, or of wrapped experts.
WRAPPER = "wrapper"
#: Attribute of a layer of experts: the experts' wrapper, the layer's name, and the expert's number, None for all.
_OF_EXPERTS = "_wrapper_of_experts"
#: Mark of a parameter whose gradient is summed over tensor-parallel ranks.
_SUMMED = "summed_over_tensor_ranks"


class LinearWrapper(nn.Module, ABC):
    """Adds a product of low rank r to that of a linear layer with input width k and output width n.

    Attributes:
        narrowing: Names of the parameters that :meth:`narrow` uses; :meth:`widen` uses the others.
    """

    narrowing: frozenset[str]

    @abstractmethod
    def narrow(self, x: Tensor) -> Tensor:
        """Returns the first product.

        Args:
            x: (…, k), what the layer's weight multiplies: after the layer's norm, if it has one. A rank of a
                row-parallel layer has its own columns; the results of all ranks are summed.

        Returns:
            (…, r).
        """

    @abstractmethod
    def widen(self, narrow: Tensor, out: Tensor) -> Tensor:
        """Adds the second product.

        Args:
            narrow: (…, r), of all ranks.
            out: (…, n), the layer's product. A rank of a column-parallel layer has its own columns.

        Returns:
            (…, n).
        """


class ExpertsWrapper(nn.Module, ABC):
    """Adds to the products of all experts that a rank holds. Parameters have an axis of experts in front."""

    @abstractmethod
    def of_one(self, layer: str, expert: int, x: Tensor, out: Tensor) -> Tensor:
        """Returns ``out`` (…, n) of an expert's layer for x (…, k), with what is added."""

    @abstractmethod
    def of_all(self, layer: str, counts: Any, x: Tensor, out: Tensor) -> Tensor:
        """Returns ``out`` (t, n) of all experts' layers for x (t, k), with what is added.

        ``counts`` are the experts' numbers of tokens, or :class:`ExpertRows`. Rows of x are in the order of experts.
        """


def is_of_wrapper(name: str) -> bool:
    """Whether a parameter or a checkpoint key belongs to a wrapper."""
    return f".{WRAPPER}." in name


def wrap(layer: WrappableLinear, wrapper: LinearWrapper) -> None:
    """Gives a linear layer a wrapper, before training wraps the model."""
    group, spread = layer.tensor_group, layer.sequence_parallel
    layer.add_module(WRAPPER, wrapper)
    for name, parameter in wrapper.named_parameters():
        parameter.tensor_model_parallel = False  # type: ignore[attr-defined]  # the gradient norm counts it once
        # Without sequence parallelism, the ranks' gradients are equal where all columns, or all rows, take part.
        partial = spread or (name in wrapper.narrowing) != layer.columns
        setattr(parameter, _SUMMED, partial and group.size() > 1)


def wrap_experts(experts: nn.Module, wrapper: ExpertsWrapper) -> None:
    """Gives a set of experts a wrapper. Its parameters get the marks of the experts' own."""
    layers: Any = experts
    first = next(each for name, each in experts.named_parameters() if not is_of_wrapper(name))
    for parameter in wrapper.parameters():
        for mark in ("allreduce", "tensor_model_parallel"):
            if hasattr(first, mark):
                setattr(parameter, mark, getattr(first, mark))
    experts.add_module(WRAPPER, wrapper)
    for name in ("linear_fc1", "linear_fc2"):
        if hasattr(layers, "local_experts"):
            for number, expert in enumerate(layers.local_experts):
                vars(getattr(expert, name))[_OF_EXPERTS] = (wrapper, name, number)
        else:
            vars(getattr(layers, name))[_OF_EXPERTS] = (wrapper, name, None)


@torch.no_grad()
def sum_wrapper_gradients(parameters: Iterable[Any]) -> None:
    """Sums ``main_grad`` of wrappers over tensor-parallel ranks. Call it once per step, on complete gradients."""
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return
    gradients = [each.main_grad for each in parameters if each.requires_grad and getattr(each, _SUMMED, False)]
    if gradients:
        flat = torch.cat([each.flatten() for each in gradients])
        dist.all_reduce(flat, group=parallel_state.get_tensor_model_parallel_group())
        for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


class WrappableLinear(nn.Module):
    """A linear layer with a place for a wrapper; a mixin of :func:`wrappable`."""

    columns: bool
    sequence_parallel: bool

    @property
    def tensor_group(self) -> Any:
        """The layer's tensor-parallel ranks."""
        return getattr(self, "_tp_group", None) or self.tp_group

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """See the layer. With a wrapper, adds to its product."""
        wrapper = self._modules.get(WRAPPER)
        if wrapper is None:
            out, bias = super().forward(x, *args, **kwargs)
            return _with_experts(self, x, out), bias
        assert isinstance(wrapper, LinearWrapper)
        await_weight(wrapper)
        if "layer_norm_weight" in self._parameters:
            out, bias, x = self._with_normed(x)
        else:
            out, bias = super().forward(x, *args, **kwargs)
        return wrapper.widen(self._exchanged(wrapper.narrow(x)), out), bias

    def _exchanged(self, narrow: Tensor) -> Tensor:
        """Completes the first product: of all tokens for a column-parallel layer, else summed over the ranks."""
        group = self.tensor_group
        if group.size() == 1:
            return narrow
        if self.columns:
            if self.sequence_parallel:
                return tensor_parallel.gather_from_sequence_parallel_region(narrow, group=group)  # type: ignore[no-any-return]
            return tensor_parallel.copy_to_tensor_model_parallel_region(narrow, group)  # type: ignore[no-any-return]
        if self.sequence_parallel:
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(narrow, group=group)  # type: ignore[no-any-return]
        return tensor_parallel.reduce_from_tensor_model_parallel_region(narrow, group)  # type: ignore[no-any-return]

    def _with_normed(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns product, bias and the input after the norm, which Transformer Engine's layer computes inside."""
        layer: Any = self
        short = layer.product_and_norm(x) if hasattr(self, "product_and_norm") else None
        if short is not None:
            return short  # type: ignore[no-any-return]
        layer.return_layernorm_output = True
        try:
            out, bias = super().forward(x)
        finally:
            layer.return_layernorm_output = False
        # Transformer Engine returns a second or third value; megatron-core adds None where there is no bias.
        if isinstance(out, tuple):
            return out[0], bias, out[1]
        raise AssertionError(f"{type(self).__name__} did not return what its norm gave")


class _WrappableGroup(nn.Module):
    """A layer of all experts of a rank; a mixin of :func:`wrappable_group`."""

    def forward(self, x: Tensor, counts: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """See the layer. With a wrapper, adds to its product."""
        whole = weights_in_line(self, x)
        if whole is not None:
            rows = ExpertRows.of(counts, x.device)
            return _with_experts(self, x, grouped_product(self, x, rows, whole), rows), None
        out, bias = super().forward(x, counts, *args, **kwargs)
        return _with_experts(self, x, out, counts), bias


def _with_experts(layer: nn.Module, x: Tensor, out: Tensor, counts: Any = None) -> Tensor:
    """Adds to the product of a layer of one expert or all, if their set has a wrapper."""
    found: tuple[ExpertsWrapper, str, int | None] | None = vars(layer).get(_OF_EXPERTS)
    if found is None:
        return out
    wrapper, name, number = found
    await_weight(wrapper)
    return wrapper.of_all(name, counts, x, out) if number is None else wrapper.of_one(name, number, x, out)


class _WrappableExperts(nn.Module):
    """A set of experts with a place for a wrapper; a mixin of :func:`wrappable_experts`."""

    def forward(self, x: Tensor, counts: Tensor, shares: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """See the experts."""
        if hasattr(self, "local_experts") or not may_pass_rows(self, x):
            longer: tuple[Tensor, Any] = super().forward(x, counts, shares, *args, **kwargs)
            return longer
        return pass_rows(self, x, counts, shares)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns the sharded state. megatron-core's would take a wrapper as replicated, or leave it out."""
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        wrapper = self._modules.get(WRAPPER)
        if wrapper is None:
            return state
        place = f"{prefix}{WRAPPER}."
        state = {name: entry for name, entry in state.items() if not name.startswith(place)}
        groups: Any = self
        ranks = parallel_state.get_expert_data_parallel_group()
        for name, parameter in wrapper.named_parameters():
            state[place + name] = ShardedTensor.from_rank_offsets(
                place + name,
                parameter,
                *sharded_offsets,
                (len(sharded_offsets), groups.ep_group.rank(), groups.ep_group.size()),
                replica_id=(0, 0, ranks.rank()),
                prepend_axis_num=len(sharded_offsets),
            )
        return state


@functools.cache
def wrappable(layer: type, *, columns: bool, storage: Storage = "plain") -> type:
    """Returns a class of linear layers with a place for a wrapper.

    It keeps the name of the class, because megatron-core knows some layers by it.
    """
    made = type(layer.__name__, (WrappableLinear, layer), {"columns": columns})
    return made if storage == "plain" else quantizing(made)


@functools.cache
def wrappable_group(layer: type, storage: Storage = "plain") -> type:
    """Returns a class of grouped linear layers of experts with a place for a wrapper."""
    made = type(layer.__name__, (_WrappableGroup, layer), {})
    return made if storage == "plain" else quantizing(made, grouped=True)


@functools.cache
def wrappable_experts(experts: type) -> type:
    """Returns a class of sets of experts with a place for a wrapper."""
    return type(experts.__name__, (_WrappableExperts, experts), {})
