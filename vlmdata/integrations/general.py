"""Packs in any model of transformers that takes images and text: the ways to keep samples apart that need no list.

transformers finds samples by positions that restart, if there is no attention mask. Where it does not, the model gets
masks of ours. Modules that convolve along the sequence compute one sample at a time. :mod:`~.proof` says which way is
right for a model on the installed version.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from vlmdata.errors import UsageError
from vlmdata.integrations import proof
from vlmdata.integrations.boundaries import refuse_mask, row_of_pack
from vlmdata.integrations.reduced import reduced_of_any
from vlmdata.integrations.segments import Segments

#: Kinds of layers in which tokens of an image see each other, by the name of the way; None: transformers' own masks.
_RUNS: dict[str, tuple[str, ...] | None] = {
    "positions": None,
    "masks": (),
    "masks with images": ("full_attention", "sliding_attention"),
    "masks with images in windows": ("sliding_attention",),
}
#: Marks the hook of a prepared model.
_OWN = "vlmdata_way"


def prepare_general(inner: Any, allow_unproven: bool) -> ExitStack:
    """Prepares a model by the first way that is proven for it.

    Args:
        inner: A model of transformers.
        allow_unproven: Whether to take positions alone, without a proof.

    Returns:
        What undoes it.

    Raises:
        UsageError: If no way is proven.
    """
    name = type(inner).__name__
    attention = inner.config.get_text_config()._attn_implementation
    if not hasattr(inner, "model"):
        raise UsageError(f"packed: {name} has no part `model`, which packs are given to. Train it on padded batches.")
    if attention not in (None, "sdpa", "eager"):
        raise UsageError(
            f"packed: {name} has attn_implementation={attention!r}, which no proof on the CPU has. Use 'sdpa' or "
            "'eager'."
        )
    if allow_unproven:
        return _prepare(inner, "positions")
    if "cross_attention_mask" in inspect.signature(inner.forward).parameters:
        raise UsageError(
            f"packed: tokens of {name} see images by cross-attention, and those of samples without images see all "
            "images of a pack. Train it on padded batches."
        )
    found = proof.verdict_of(inner, reduced_of_any, {way: partial(_prepare, way=way) for way in _RUNS})
    if not found.way:
        raise UsageError(
            f"packed: packs of {name} differ from their samples ({found.difference}, in a small random model). Train "
            "it on padded batches."
        )
    return _prepare(inner, found.way)


def is_prepared(inner: Any) -> bool:
    """Whether :func:`prepare_general` has prepared a model."""
    return "model" in inner._modules and any(
        _OWN in getattr(hook, "keywords", ()) for hook in inner.model._forward_pre_hooks.values()
    )


def _prepare(inner: Any, way: str) -> ExitStack:
    undo = ExitStack()
    hook = partial(_before, vlmdata_way=way)
    undo.callback(inner.model.register_forward_pre_hook(hook, with_kwargs=True).remove)
    decoder = getattr(inner.model, "language_model", None) or inner.get_decoder()
    for layer in getattr(decoder, "layers", ()):
        for module in layer.modules():
            if any(isinstance(child, torch.nn.Conv1d) for child in module.children()):
                _by_samples(layer, module, undo)
    return undo


def _before(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, vlmdata_way: str) -> Any:
    """Pre-hook of the model around the decoder, with keywords."""
    row = row_of_pack(kwargs)
    segments = None if row is None else Segments.of(row[0])
    if segments is None:
        return None
    refuse_mask(kwargs, segments)
    kwargs = kwargs | {"use_cache": False}
    runs = _RUNS[vlmdata_way]
    return args, kwargs if runs is None else kwargs | {"attention_mask": _masks(model, segments, runs, kwargs)}


def _masks(model: Any, segments: Segments, runs: tuple[str, ...], kwargs: dict[str, Any]) -> Any:
    """Added to scores, (1, 1, T, T) by the kind of layer: 0 where a query sees a key."""
    config = model.config.get_text_config()
    bounds = segments.long
    lengths = bounds.diff()
    token = torch.arange(int(lengths.sum()), device=bounds.device)
    sample = torch.arange(len(lengths), device=bounds.device).repeat_interleave(lengths)
    query, key = token[:, None], token[None]
    same, causal = sample[:, None] == sample[None], key <= query
    together = torch.zeros_like(causal)
    marks = kwargs.get("mm_token_type_ids", kwargs.get("token_type_ids"))
    if runs and marks is not None:
        image = marks[0] == 1
        begins = image & ~torch.nn.functional.pad(image[:-1], (1, 0))
        run = begins.cumsum(0)
        together = image[:, None] & image[None] & (run[:, None] == run[None])
    window = getattr(config, "sliding_window", None) or len(token)
    sees = {
        "full_attention": causal | together if "full_attention" in runs else causal,
        "sliding_attention": (causal | together if "sliding_attention" in runs else causal) & (key > query - window),
    }
    none = torch.finfo(model.dtype).min
    masks = {
        kind: torch.zeros_like(same, dtype=model.dtype).masked_fill(~(seen & same), none)[None, None]
        for kind, seen in sees.items()
    }
    kinds = set(getattr(config, "layer_types", None) or ())
    return (
        masks if len(kinds) > 1 else masks["sliding_attention" if kinds == {"sliding_attention"} else "full_attention"]
    )


def _by_samples(layer: Any, module: Any, undo: ExitStack) -> None:
    """Makes a module that convolves along the sequence compute each sample of a pack by itself."""
    running: list[Segments | None] = [None]
    left: list[tuple[torch.Tensor, ...]] = []

    def tell(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        positions = kwargs.get("position_ids")
        row = None if positions is None else positions.flatten(0, -2)[0]
        running[0] = None if row is None or row.ndim != 1 else Segments.of(row)

    def take_apart(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        left.clear()
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        if running[0] is None or hidden.shape[:2] != (1, sum(running[0].lengths)):
            return None
        first, *others = torch.split(hidden, list(running[0].lengths), dim=1)
        left.append(tuple(others))
        return _with_hidden(args, kwargs, first)

    def join(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if not left:
            return None
        pieces = [output]
        for other in left.pop():
            own_args, own_kwargs = _with_hidden(args, kwargs, other)
            pieces.append(module.forward(*own_args, **own_kwargs))
        if isinstance(output, torch.Tensor):
            return torch.cat(pieces, dim=1)
        return (torch.cat([piece[0] for piece in pieces], dim=1), *output[1:])

    register: list[Callable[..., Any]] = [layer.register_forward_pre_hook, module.register_forward_pre_hook]
    for add, hook in zip(register, (tell, take_apart), strict=True):
        undo.callback(add(hook, with_kwargs=True).remove)
    undo.callback(module.register_forward_hook(join, with_kwargs=True).remove)


def _with_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], hidden: torch.Tensor) -> Any:
    if "hidden_states" in kwargs:
        return args, kwargs | {"hidden_states": hidden}
    return (hidden, *args[1:]), kwargs
