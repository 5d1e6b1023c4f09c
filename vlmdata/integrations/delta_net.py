"""Gated delta nets of transformers, one sample of a pack at a time.

Their convolution and their state run on from sample to sample. Two hooks on each layer prevent that: one takes the
hidden states apart before the layer's own forward, and one joins what it returns. If flash-linear-attention is
installed, its kernels start anew at each boundary, and nothing is taken apart.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from vlmdata.integrations.segments import SEGMENTS, Segments

#: The keyword that takes what is left to do from the first hook to the second. The layer ignores it.
_LEFT = "vlmdata_left"


@dataclass(frozen=True, eq=False)
class _Gaps:
    """The layer computes all segments, with gaps between them."""

    places: torch.Tensor


@dataclass(frozen=True, eq=False)
class _Pieces:
    """The layer computes the first segment. These are the others."""

    hidden_states: tuple[torch.Tensor, ...]


def take_apart(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook with keywords: changes the hidden states (1, T, hidden) of a call that has segments."""
    segments = kwargs.get("attention_mask")
    if not isinstance(segments, Segments):
        return None
    hidden: torch.Tensor = kwargs["hidden_states"]
    kwargs = kwargs | {"attention_mask": None, "cu_seq_lens_q": None, SEGMENTS: None}
    if not follows_boundaries(_delta_rule(layer), hidden.device.type):
        first, *others = torch.split(hidden, list(segments.lengths), dim=1)
        return args, kwargs | {"hidden_states": first, _LEFT: _Pieces(tuple(others))}
    if isinstance(_module(layer).causal_conv1d_fn, _Convolution):
        # The kernels prepare themselves once for the same tensors.
        return args, kwargs | {"cu_seq_lens_q": segments.long, "cu_seqlens_cpu": segments.on_host, SEGMENTS: segments}
    # The rule starts anew at each boundary, the convolution does not. Zeros between segments are what it sees at the
    # start of a sample by itself; the projection before it has no bias.
    gap: int = layer.conv_kernel_size - 1
    places, boundaries = segments.apart(gap)
    length = hidden.shape[1] + len(segments.lengths) * gap
    wide = hidden.new_zeros(1, length, hidden.shape[2]).index_copy(1, places, hidden)
    return args, kwargs | {"hidden_states": wide, "cu_seq_lens_q": boundaries, _LEFT: _Gaps(places)}


def join(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> Any:
    """Forward hook with keywords: makes one row (1, T, hidden) of what :func:`take_apart` took apart."""
    left = kwargs.get(_LEFT)
    if isinstance(left, _Gaps):
        return output.index_select(1, left.places)
    if isinstance(left, _Pieces):
        same = {name: value for name, value in kwargs.items() if name != _LEFT}
        others = [layer.forward(*args, **same | {"hidden_states": piece}) for piece in left.hidden_states]
        return torch.cat([output, *others], dim=1)
    return None


@cache
def follows_boundaries(rule: Any, device_type: str) -> bool:
    """Whether an implementation of the delta rule starts with an empty state at each of ``cu_seqlens``.

    transformers uses kernels of flash-linear-attention if they are installed, and they do. Its own code ignores the
    argument, or refuses it. So this tries it, on a row of two segments.
    """
    generator, length, heads, width = torch.Generator().manual_seed(0), 64, 1, 64
    dtype = torch.float32 if device_type == "cpu" else torch.bfloat16

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device_type, dtype)

    queries, keys, values = (numbers(1, 2 * length, heads, width) for _ in range(3))
    beta, decay = torch.full_like(queries[..., 0], 0.5), torch.zeros_like(queries[..., 0])

    def second(begin: int, boundaries: list[int]) -> torch.Tensor:
        q, k, v, b, g = (each[:, begin:] for each in (queries, keys, values, beta, decay))
        cu_seqlens = torch.tensor(boundaries, device=device_type)
        out, _ = rule(q, k, v, g=g, beta=b, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens)
        last: torch.Tensor = out[:, -length:].float()
        return last

    with torch.no_grad(), torch.autocast(device_type, enabled=False):
        try:
            alone, packed = second(length, [0, length]), second(0, [0, length, 2 * length])
        except (TypeError, ValueError, NotImplementedError):
            return False
    return bool((packed - alone).norm() < 0.05 * alone.norm())


class _Convolution:
    """In the place of transformers' causal convolution: packs go to that of flash-linear-attention."""

    def __init__(self, own: Any, kernel: Any):
        self.own = own
        self.kernel = kernel
        self.users = 0

    def __call__(self, hidden_states: torch.Tensor, weight: Any, bias: Any = None, **kwargs: Any) -> Any:
        """Convolves (1, channels, T)."""
        segments: Segments | None = kwargs.get(SEGMENTS)
        if segments is None:
            return self.own(hidden_states, weight, bias, **kwargs)
        rows = hidden_states.transpose(1, 2)
        names = {"activation": kwargs.get("activation"), "cu_seqlens": segments.long}
        out, _ = self.kernel(rows, weight, bias, cu_seqlens_cpu=segments.on_host, **names)
        return out.transpose(1, 2)


def exchange_convolution(layer: Any) -> Callable[[], None]:
    """Makes the code of a layer's module use flash-linear-attention's convolution for packs, if it is installed.

    Returns:
        What undoes that, when the last layer that asked for it is done.
    """
    module, kernel = _module(layer), _convolution_kernel()
    if kernel is None:
        return lambda: None
    if not isinstance(module.causal_conv1d_fn, _Convolution):
        module.causal_conv1d_fn = _Convolution(module.causal_conv1d_fn, kernel)
    exchanged = module.causal_conv1d_fn
    exchanged.users += 1

    def undo() -> None:
        exchanged.users -= 1
        if not exchanged.users and module.causal_conv1d_fn is exchanged:
            module.causal_conv1d_fn = exchanged.own

    return undo


def _convolution_kernel() -> Any:
    try:
        from fla.modules.conv import causal_conv1d
    except ImportError:
        return None
    return causal_conv1d if "cu_seqlens_cpu" in inspect.signature(causal_conv1d).parameters else None


def _delta_rule(layer: Any) -> Any:
    """The implementation that the code of a layer calls."""
    return _module(layer).torch_chunk_gated_delta_rule


def _module(layer: Any) -> Any:
    """The module of transformers that has the code of a layer."""
    own = next(each for each in type(layer).__mro__ if each.__module__.startswith("transformers."))
    return sys.modules[own.__module__]
