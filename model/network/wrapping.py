"""The seam for what wraps linear layers, such as low-rank adapters: a hook in each layer.

Providers make linear layers with :func:`wrappable`. :func:`wrap` then gives some of them a :class:`LinearWrapper`, a
submodule that adds to the layer's product. Its parameters have names and checkpoint keys of their own
(:func:`is_of_wrapper`), which other weights may lack, and an export merges them into the layer's weight. Experts that
are computed as a group have no hook.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from model.parallel.exchange import summed

#: Name of the submodule of a wrapped layer.
WRAPPER = "wrapper"


class LinearWrapper(nn.Module, ABC):
    """Adds to the product of a linear layer with input width k and output width n.

    Attributes:
        shard_dims: Axis of each parameter that tensor parallelism shards. All ranks hold the others whole, and their
            gradients are summed over the ranks.
    """

    shard_dims: Mapping[str, int] = {}

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Returns what is added to the product.

        Args:
            x: (…, k), what the layer's weight multiplies: after the layer's norm, if it has one, and of all tokens. A
                rank of a row-parallel layer has some of the columns.

        Returns:
            (…, n). A rank of a column-parallel layer returns its columns; what ranks of a row-parallel layer return is
            summed over them.
        """

    @abstractmethod
    def merged(self, weight: Tensor, own: Mapping[str, Tensor]) -> Tensor:
        """Returns the weight with which the layer alone computes the same.

        Args:
            weight: (n, k), the layer's whole weight.
            own: Whole parameters of the wrapper by name.
        """


def is_of_wrapper(name: str) -> bool:
    """Whether a parameter or a checkpoint key belongs to a wrapper."""
    return f".{WRAPPER}." in name


def wrap(model: nn.Module, make: Callable[[str, nn.Module], LinearWrapper | None]) -> int:
    """Gives linear layers a wrapper.

    Args:
        model: An unwrapped model of any layout and back end, before training wraps it.
        make: Makes the wrapper of a layer from its name in the model and the layer, on the layer's device; or None.

    Returns:
        Number of wrapped layers on this rank.
    """
    layers = [(name, each) for name, each in model.named_modules() if isinstance(each, WrappableLinear)]
    made = [(layer, wrapper) for name, layer in layers if (wrapper := make(name, layer)) is not None]
    for layer, wrapper in made:
        layer.add_module(WRAPPER, wrapper)
        for name, parameter in wrapper.named_parameters():
            sharded = name in wrapper.shard_dims
            parameter.tensor_model_parallel = sharded  # type: ignore[attr-defined]  # the gradient norm counts it so
            if not sharded and layer.tensor_group.size() > 1:
                parameter.register_hook(functools.partial(summed, layer.tensor_group))
    return len(made)


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
        out, bias = super().forward(x, *args, **kwargs)
        wrapper = self._modules.get(WRAPPER)
        return (out if wrapper is None else out + self._added(wrapper, x)), bias

    def _added(self, wrapper: nn.Module, x: Tensor) -> Tensor:
        group, spread = self.tensor_group, self.sequence_parallel
        norm = self._parameters.get("layer_norm_weight")
        if norm is not None:
            x = self._normed(x, norm)
        if group.size() == 1:
            return wrapper(x)  # type: ignore[no-any-return]
        if self.columns:
            gather = tensor_parallel.gather_from_sequence_parallel_region
            x = gather(x, group=group) if spread else tensor_parallel.copy_to_tensor_model_parallel_region(x, group)
            return wrapper(x)  # type: ignore[no-any-return]
        scatter = tensor_parallel.reduce_scatter_to_sequence_parallel_region
        reduce = tensor_parallel.reduce_from_tensor_model_parallel_region
        added: Tensor = scatter(wrapper(x), group=group) if spread else reduce(wrapper(x), group)
        return added

    def _normed(self, x: Tensor, scale: Tensor) -> Tensor:
        """Transformer Engine's layer computes its norm inside, so that of the wrapper's input is computed again."""
        layer: Any = self
        assert layer.normalization == "RMSNorm"
        wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + layer.eps)
        normed: Tensor = (wide * (scale.float() + layer.zero_centered_gamma)).type_as(x)
        return normed

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns the layer's sharded state. It would take all parameters of the wrapper as replicated."""
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        wrapper: Any = self._modules.get(WRAPPER)
        if wrapper is None:
            return state
        assert metadata is not None
        place = f"{prefix}{WRAPPER}."
        own: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            wrapper.state_dict(prefix="", keep_vars=True),
            place,
            dict(wrapper.shard_dims),
            sharded_offsets,
            tp_group=self.tensor_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return {name: entry for name, entry in state.items() if not name.startswith(place)} | own


@functools.cache
def wrappable(layer: type, *, columns: bool) -> type:
    """Returns a class of linear layers with a place for a wrapper.

    It keeps the name of the class, because megatron-core knows some layers by it.
    """
    return type(layer.__name__, (WrappableLinear, layer), {"columns": columns})
