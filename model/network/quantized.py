"""Frozen weights in 4 bits: layers store NF4 codes and scales, and compute with the weight that these stand for.

:func:`quantizing` makes a class of layers whose weights are quantized as soon as a layer is built, so that the weights
of one layer at a time lie whole on the device. The layer keeps its parameters on the meta device: their names, shapes,
dtypes and marks are what checkpoints, weight name tables and adapters read. Nothing can read values from them by
mistake; :func:`value_of` and :func:`assign` are the ways to them.

A call of the layer dequantizes its weight, computes as always, and releases it. Whatever autograd keeps of the weight
is a note, from which the backward pass dequantizes again.

Blocks of 64 values of a row share a scale, the largest magnitude among them. A block is quantized by itself, so values
do not depend on which rows or matrices lie in one tensor: all layouts have the same. Scales need no float32: the
largest of some values is one of them, and has their dtype.
"""

from __future__ import annotations

import contextlib
import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vlmdata.model.network.settings import SettingError

#: Values that share a scale.
BLOCK = 64
#: Name of the submodule of a layer that holds its codes.
QUANTIZED = "quantized"
#: Attribute of a grouped layer of experts during a call: one tensor with all its weights, (experts, n, k).
STACKED = "_stacked_weights"
#: Attribute of a parameter on the meta device: the module with its codes, and its number there.
_CODES = "_codes_of_weight"


class QuantizedWeights(nn.Module):
    """NF4 codes and scales of weights of one shape, such as those of all experts of a layer.

    Args:
        weights: Each (n, k), on the device that shall hold the codes; k is a multiple of :data:`BLOCK`.

    Attributes:
        codes: uint8 (weights, n * k / 2).
        scales: (weights, n * k / 64), in the dtype of the weights.
    """

    codes: Tensor
    scales: Tensor

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        first, count = weights[0], len(weights)
        self.shape = tuple(first.shape)
        size = first.numel()
        # Not part of the state: a checkpoint holds no frozen weights.
        codes = torch.empty(count, size // 2, dtype=torch.uint8, device=first.device)
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scales", first.new_empty(count, size // BLOCK), persistent=False)
        for number, weight in enumerate(weights):
            self.put(number, weight)

    @torch.no_grad()
    def put(self, number: int, weight: Tensor) -> None:
        """Quantizes a weight (n, k), on any device, and stores it."""
        moved = weight.detach().to(self.codes.device, self.scales.dtype).contiguous()
        codes, state = _functions().quantize_4bit(moved, blocksize=BLOCK, quant_type="nf4")
        self.codes[number] = codes.view(-1)
        self.scales[number] = state.absmax

    @torch.no_grad()
    def value(self, number: int | None = None) -> Tensor:
        """Dequantizes a weight, (n, k), or all, (weights, n, k)."""
        codes, scales = (self.codes, self.scales) if number is None else (self.codes[number], self.scales[number])
        shape = self.shape if number is not None else (len(self.codes), *self.shape)
        state = _functions().QuantState(
            scales.reshape(-1).float(), shape=shape, blocksize=BLOCK, quant_type="nf4", dtype=scales.dtype
        )
        found: Tensor = _functions().dequantize_4bit(codes.reshape(-1, 1), state)
        return found


@functools.cache
def _functions() -> Any:
    """Returns bitsandbytes' functions. Its import takes seconds and is needed by few runs."""
    from bitsandbytes import functional

    return functional


def quantizing(layer: type, *, grouped: bool = False) -> type:
    """Returns a class of linear layers, or of grouped layers of experts, whose weights are quantized when built.

    It keeps the name of the class, because megatron-core knows some layers by it.
    """
    return type(layer.__name__, (_QuantizedGroup if grouped else _QuantizedLinear, layer), {})


class _Quantized(nn.Module):
    """A layer with quantized weights; a mixin of :func:`quantizing`."""

    @abstractmethod
    def _weight_names(self) -> list[str]:
        """Returns the layer's parameters that are quantized."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _quantize(self, self._weight_names())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves all but the parameters on the meta device, from which nothing can be moved."""
        if QUANTIZED not in self._modules:
            return super()._apply(fn, recurse)
        names = self._weight_names()
        kept = {name: self._parameters[name] for name in names}
        self._parameters.update(dict.fromkeys(names))
        try:
            return super()._apply(fn, recurse)
        finally:
            self._parameters.update(kept)


class _QuantizedLinear(_Quantized):
    """Computes with the dequantized weight (n, k)."""

    def _weight_names(self) -> list[str]:
        return ["weight"]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See the layer."""
        codes: Any = self._modules[QUANTIZED]
        weight, kept = nn.Parameter(codes.value(0), requires_grad=False), self._parameters["weight"]
        self._parameters["weight"] = weight
        try:
            with _kept_as_codes(weight, functools.partial(codes.value, 0)):
                return super().forward(*args, **kwargs)
        finally:
            self._parameters["weight"] = kept
            weight.data = weight.new_empty(0)  # functions of Transformer Engine hold on to the parameter


class _QuantizedGroup(_Quantized):
    """Computes with the dequantized weights of all experts, (experts, n, k)."""

    def _weight_names(self) -> list[str]:
        layer: Any = self
        return [f"weight{number}" for number in range(layer.num_gemms)]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See the layer."""
        codes: Any = self._modules[QUANTIZED]
        whole = codes.value()
        vars(self)[STACKED] = whole
        try:
            with _kept_as_codes(whole, codes.value):
                return super().forward(*args, **kwargs)
        finally:
            del vars(self)[STACKED]


@contextlib.contextmanager
def _kept_as_codes(weight: Tensor, again: Callable[[], Tensor]) -> Iterator[None]:
    """Has autograd keep a note of a weight, or of a view of it, from which ``again`` makes it anew."""
    place = weight.untyped_storage().data_ptr()

    def pack(tensor: Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() != place:
            return tensor
        return tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(kept: Any) -> Tensor:
        return kept if isinstance(kept, Tensor) else again().as_strided(*kept)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _quantize(layer: nn.Module, names: Sequence[str]) -> None:
    """Replaces parameters of a layer by parameters on the meta device, whose values its submodule stores."""
    weights = [layer.get_parameter(name) for name in names]
    if weights[0].is_meta:  # a model without values
        return
    rows, columns = weights[0].shape
    if columns % BLOCK:
        raise SettingError(
            f"«storage» 'nf4' needs rows of a multiple of {BLOCK} values, but a matrix is {rows} x {columns} on this "
            "rank: use a smaller «tensor_parallel», or 'plain'"
        )
    codes = QuantizedWeights([weight.detach() for weight in weights])
    for number, (name, weight) in enumerate(zip(names, weights, strict=True)):
        bare = nn.Parameter(weight.detach().to("meta"), requires_grad=False)
        vars(bare).update(vars(weight))
        setattr(bare, _CODES, (codes, number))
        layer._parameters[name] = bare
    layer.add_module(QUANTIZED, codes)


def is_quantized(parameter: Tensor) -> bool:
    """Whether a parameter is on the meta device, and a layer stores its values as codes."""
    return hasattr(parameter, _CODES)


def value_of(parameter: Tensor) -> Tensor:
    """Returns the values of a parameter; those of a quantized one are dequantized."""
    if not is_quantized(parameter):
        return parameter.detach()
    codes, number = getattr(parameter, _CODES)
    return codes.value(number)  # type: ignore[no-any-return]


def assign(parameter: Tensor, value: Tensor) -> None:
    """Quantizes and stores the values of a quantized parameter."""
    codes, number = getattr(parameter, _CODES)
    codes.put(number, value)


def held_by(parameter: Tensor) -> list[Tensor]:
    """Returns the tensors that hold a parameter's values: itself, or its codes, and its scales in its dtype."""
    if not is_quantized(parameter):
        return [parameter.detach()]
    codes, number = getattr(parameter, _CODES)
    return [codes.codes[number], codes.scales[number]]


def device_of(model: nn.Module) -> torch.device:
    """Returns the device of a model's values."""
    return held_by(next(model.parameters()))[0].device
