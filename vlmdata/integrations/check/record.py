"""Listens to the calls of a model's modules, and of the two functions in which linear attention mixes tokens.

Listeners stand outside of all hooks and replaced forwards: they see what a module is given and what its caller gets.
The model itself is not changed.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol
from unittest import mock

import torch

#: Functions of a linear-attention layer, by what they are for.
CONVOLUTION = re.compile(r"causal_conv1d(_fn)?$")
DELTA_RULE = re.compile(r"chunk_gated_delta_rule$|chunk_gated_delta_rule_fn$")

type Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Site:
    """A module of the model, or a function that it calls.

    Attributes:
        name: Its name, such as ``model.layers.0.linear_attn`` or ``model.layers.0.linear_attn.causal_conv1d_fn``.
        module: The module; for a function, the one that calls it.
        function: Name of the function, or "".
    """

    name: str
    module: torch.nn.Module
    function: str = ""


class Listener(Protocol):
    """Stands between a module and its caller."""

    def call(self, place: Site, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what the caller gets; ``compute(*args, **kwargs)`` is the call."""


@contextmanager
def listening(model: torch.nn.Module, listener: Listener) -> Iterator[None]:
    """Tells a listener of the calls in a model, until the context ends. For one thread."""
    places = {id(module): Site(name, module) for name, module in model.named_modules() if name}
    original = torch.nn.Module.__call__

    def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if (place := places.get(id(module))) is None:
            return original(module, *args, **kwargs)
        return listener.call(place, lambda *a, **k: original(module, *a, **k), args, kwargs)

    with ExitStack() as stack:
        caller = _Caller(listener)
        for place in list(places.values()):
            if is_linear_attention(place.module):
                for namespace, name in _mixing_functions(place.module):
                    heard = _Heard(namespace[name], name, caller)
                    stack.enter_context(_exchanged(namespace, name, heard))
        stack.enter_context(mock.patch.object(torch.nn.Module, "__call__", caller.following(call, places)))
        yield


@contextmanager
def _exchanged(namespace: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    before = namespace[name]
    namespace[name] = value
    try:
        yield
    finally:
        namespace[name] = before


def is_linear_attention(module: torch.nn.Module) -> bool:
    """Whether a module is a layer with a convolution and a state that run along the tokens."""
    return any("DeltaNet" in each.__name__ for each in type(module).__mro__)


def is_router(module: torch.nn.Module) -> bool:
    """Whether a module chooses experts for each token."""
    return any("Router" in each.__name__ for each in type(module).__mro__)


def mixes_tokens(place: Site | None) -> bool:
    """Whether a place is one where tokens reach each other: attention, or a part of linear attention."""
    return place is not None and (is_linear_attention(place.module) or "Attention" in type(place.module).__name__)


class _Caller:
    """Knows which linear-attention layer is being computed, since a function's call does not say."""

    def __init__(self, listener: Listener):
        self.listener = listener
        self.current: Site | None = None

    def following(self, call: Callable[..., Any], places: Mapping[int, Site]) -> Callable[..., Any]:
        def follow(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            place = places.get(id(module))
            if place is None or not is_linear_attention(module):
                return call(module, *args, **kwargs)
            before, self.current = self.current, place
            try:
                return call(module, *args, **kwargs)
            finally:
                self.current = before

        return follow


class _Heard:
    """A function that tells a listener of its calls. Equal to the function, so that caches know it."""

    def __init__(self, function: Callable[..., Any], name: str, caller: _Caller):
        self._function, self._name, self._caller = function, name, caller

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self._caller.current
        if layer is None:
            return self._function(*args, **kwargs)
        place = Site(f"{layer.name}.{self._name}", layer.module, self._name)
        return self._caller.listener.call(place, self._function, args, kwargs)

    def __hash__(self) -> int:
        return hash(self._function)

    def __eq__(self, other: object) -> bool:
        return self._function == (other._function if isinstance(other, _Heard) else other)


def _mixing_functions(layer: torch.nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Where a layer's code finds its convolution and delta rule: its attributes, or the names of a Python module."""
    forward = inspect.unwrap(layer.forward)
    namespaces = [vars(layer), getattr(getattr(forward, "__func__", forward), "__globals__", {})]
    namespaces += [vars(sys.modules[each.__module__]) for each in type(layer).__mro__ if "DeltaNet" in each.__name__]
    return [
        (namespace, name)
        for number, namespace in enumerate(namespaces)
        for name, value in namespace.items()
        if (CONVOLUTION.search(name) or DELTA_RULE.search(name))
        and callable(value)
        and not isinstance(value, _Heard | torch.nn.Module)
        and all(namespace is not earlier for earlier in namespaces[:number])
    ]


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """Tensors of a call by path, such as ``hidden_states`` or ``0.1``; copies."""

    inputs: Tensors
    outputs: Tensors


class Record:
    """A listener that copies all tensors. Modules that are called several times have several calls.

    Attributes:
        calls: By name of the place.
    """

    def __init__(self) -> None:
        self.calls: dict[str, list[RecordedCall]] = {}
        self._copies: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def call(self, place: Site, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Records a call."""
        inputs = self._copied(inputs_of(place.module, args, kwargs, plain=bool(place.function)))
        output = compute(*args, **kwargs)
        self.calls.setdefault(place.name, []).append(RecordedCall(inputs, self._copied(tensors_of(output))))
        return output

    def _copied(self, tensors: Tensors) -> Tensors:
        return {path: self._copy(tensor) for path, tensor in tensors.items()}

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies a tensor once, although it passes from module to module."""
        key = (id(tensor), tensor._version)
        if key not in self._copies:
            self._copies[key] = (tensor, tensor.detach().clone())  # holds the tensor, so that its id stays its own
        return self._copies[key][1]

    def finish(self) -> dict[str, list[RecordedCall]]:
        """Returns the calls, and gives up the tensors that were copied."""
        self._copies = {}
        return self.calls


def inputs_of(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], plain: bool) -> Tensors:
    """Tensors among the arguments of a call, by path; positional ones by the name of their parameter.

    Without the places in a row that have logits, which newer models hand on to their parts: a sample has others in a
    pack.
    """
    named = named_arguments(module, args, kwargs, plain)
    return tensors_of({name: value for name, value in named.items() if name != "logits_to_keep"})


def named_arguments(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], plain: bool
) -> dict[str, Any]:
    """Arguments of a call by name; ``plain``: positional ones by number."""
    names = [] if plain else _parameters(type(module).forward)
    named = {names[number] if number < len(names) else str(number): value for number, value in enumerate(args)}
    return named | dict(kwargs)


@cache
def _parameters(forward: Any) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, each in inspect.signature(forward).parameters.items() if each.kind in kinds][1:]


def tensors_of(value: Any, path: str = "") -> Tensors:
    """All tensors in tuples, lists, mappings and dataclasses, by path."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    found: Tensors = {}
    for name, part in _parts(value):
        found |= tensors_of(part, f"{path}.{name}" if path else name)
    return found


def replaced(value: Any, change: Callable[[str, torch.Tensor], torch.Tensor], path: str = "") -> Any:
    """Returns a value with its tensors changed; other parts, and parts without a change, are the same objects."""
    if isinstance(value, torch.Tensor):
        return change(path, value)
    parts = dict(_parts(value))
    changed = {name: replaced(part, change, f"{path}.{name}" if path else name) for name, part in parts.items()}
    if all(changed[name] is part for name, part in parts.items()):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(**dict(zip(value._fields, changed.values(), strict=True)))
    if isinstance(value, tuple | list):
        return type(value)(changed.values())
    if isinstance(value, Mapping):
        return type(value)(**changed) if type(value) is not dict else changed
    return dataclasses.replace(value, **changed)


def into_shared(given: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """Returns changed arguments, with the changes of dictionaries that layers share in these dictionaries themselves.

    Gemma's layers put their keys and values into one, from which later layers take them.
    """
    for name, value in given.items():
        if isinstance(value, UserDict) and changed[name] is not value:
            value.update(changed[name])
    return {name: given[name] if isinstance(given[name], UserDict) else value for name, value in changed.items()}


def not_shared(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arguments with copies of the dictionaries that layers share."""
    return {name: UserDict(each) if isinstance(each, UserDict) else each for name, each in kwargs.items()}


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, tuple | list):
        return [(str(number), each) for number, each in enumerate(value)]
    if isinstance(value, Mapping):
        return [(str(name), each) for name, each in value.items()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(each.name, getattr(value, each.name)) for each in dataclasses.fields(value)]
    return []
