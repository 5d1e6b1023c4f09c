"""Attention within the segments of a pack, for the decoders and vision encoders of transformers' models.

transformers' SDPA takes a pack with a mask of all its tokens by all its tokens, which excludes the fast kernels and
computes what lies between samples, too. :func:`attend` takes the segments instead. On CUDA, in bfloat16 and float16,
it is one call of a kernel for sequences of any lengths: torch's ``varlen_attn``, else that of the package flash-attn.
Elsewhere it computes segment by segment with SDPA. Layers with a sliding window have it within segments
(:mod:`vlmdata.integrations.windows`): a kernel knows windows, and SDPA gets a mask of each segment.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from vlmdata.integrations.segments import SEGMENTS, Segments, SegmentsMask
from vlmdata.integrations.windows import SlidingWindows

#: ``attn_implementation`` of prepared decoders: plain calls are SDPA's.
DECODER = "vlmdata"
#: The same of prepared vision encoders. With "flash" in its name, transformers gives all images in one call.
ENCODER = "vlmdata_flash"

#: Queries, keys, values (T, heads, width), int32 boundaries, longest segment, causal, scale -> (T, heads, width). Two
#: keywords: ``left``, tokens that a token sees before itself; ``keys``, boundaries and longest segment of keys where
#: they are others than those of queries.
Kernel = Callable[..., torch.Tensor]


def register() -> None:
    """Makes the names known to transformers. To repeat it is harmless."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in (DECODER, ENCODER):
        if name not in ALL_ATTENTION_FUNCTIONS:
            ALL_ATTENTION_FUNCTIONS.register(name, attend)
            ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def exchange(decoder: Any, encoder: Any) -> Callable[[], None]:
    """Makes a model's decoder and vision encoder call :func:`attend` if they have SDPA.

    Args:
        decoder: Configuration of the decoder. It is changed.
        encoder: Configuration of the vision encoder. It is changed. None if it computes images in rows, not in a pack.

    Returns:
        What undoes that, unless another attention was set in the meantime.
    """
    register()
    named = ((decoder, DECODER), (encoder, ENCODER))
    wanted = [(each, name) for each, name in named if each is not None and each._attn_implementation == "sdpa"]
    for config, name in wanted:
        config._attn_implementation_internal = name

    def undo() -> None:
        for config, name in wanted:
            if config._attn_implementation == name:
                config._attn_implementation_internal = "sdpa"

    return undo


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: within segments if it is told of them, else its own SDPA.

    Args:
        module: The layer; ``is_causal`` of the keywords or of the layer says whether tokens see later ones.
        query: (1, heads, T, width).
        key: (1, key heads, T, width).
        value: As ``key``.
        attention_mask: A :class:`SegmentsMask` for a pack; a mask or None in other calls.
        scaling: Factor of the scores.
        dropout: Probability, for which there is no fast kernel.
        **kwargs: ``vlmdata_segments`` for a pack, with ``sliding_window`` in layers that have one, or ``cu_seq_lens_q``
            and ``max_length_q`` for images. Others have no effect on these.

    Returns:
        (1, T, heads, width), and None for the weights.
    """
    segments: Segments | None = kwargs.get(SEGMENTS)
    bounds: Any = kwargs.get("cu_seq_lens_q")
    longest: Any = kwargs.get("max_length_q")
    windows = None
    if segments is not None and isinstance(attention_mask, SegmentsMask):
        bounds, longest = segments.cu_seqlens, max(segments.lengths)
        windows = segments.windows(kwargs.get("sliding_window"))
    elif bounds is None or attention_mask is not None:
        return _plain(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    causal = bool(kwargs.get("is_causal", module.is_causal))
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    kernel = kernel_for(query, value, dropout)
    if kernel is not None:
        queries, keys, values = (each[0].transpose(0, 1) for each in (query, key, value))
        bounds = bounds.to(query.device, torch.int32)
        if windows is not None:
            return _in_windows(kernel, queries, keys, values, bounds, longest, scaling, windows)[None], None
        return kernel(queries, keys, values, bounds, longest, causal, scaling)[None], None
    lengths = bounds.diff().tolist() if segments is None else list(segments.lengths)
    masks = [None] * len(lengths) if windows is None else windows.masks
    pieces = [
        _plain(module, *each, scaling=scaling, dropout=dropout, is_causal=causal)[0]
        for each in zip(*(torch.split(tensor, lengths, dim=2) for tensor in (query, key, value)), masks, strict=True)
    ]
    return torch.cat(pieces, dim=1), None


def _in_windows(
    kernel: Kernel,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scale: float | None,
    windows: SlidingWindows,
) -> torch.Tensor:
    """Causal attention in windows; then that of images' tokens, which also see the later ones of their image."""
    left, seen = windows.left, windows.seen_keys
    out = kernel(query, key, value, bounds, longest, True, scale, left=left)
    if seen is None:
        return out
    parts = (query.index_select(0, seen.queries), key.index_select(0, seen.keys), value.index_select(0, seen.keys))
    keys = (seen.key_bounds, seen.longest_key)
    of_images = kernel(*parts, seen.query_bounds, seen.longest_query, False, scale, left=left, keys=keys)
    return out.index_copy(0, seen.queries, of_images)


def _plain(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    result: tuple[torch.Tensor, None] = ALL_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)
    return result


def kernel_for(query: torch.Tensor, value: torch.Tensor, dropout: float) -> Kernel | None:
    """The kernel that can compute such tensors, or None."""
    fits = query.shape[-1] == value.shape[-1] <= 256 and query.shape[-1] % 8 == 0
    same = query.dtype == value.dtype and query.dtype in (torch.bfloat16, torch.float16)
    return installed_kernel() if query.is_cuda and fits and same and not dropout else None


@cache
def installed_kernel() -> Kernel | None:
    """Torch's kernel for sequences of any lengths, else that of the package flash-attn, else None."""
    return _of_torch() or _of_flash_attn()


def _of_torch() -> Kernel | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    if not {"scale", "window_size"} <= set(inspect.signature(varlen_attn).parameters):
        return None  # torch 2.10 has no scale
    return _kernel(lambda *given, causal, scale, window: varlen_attn(*given, scale=scale, window_size=window))


def _of_flash_attn() -> Kernel | None:
    try:
        from flash_attn import flash_attn_varlen_func as varlen
    except ImportError:
        return None
    return _kernel(
        lambda *given, causal, scale, window: varlen(*given, softmax_scale=scale, causal=causal, window_size=window)
    )


def _kernel(varlen: Callable[..., Any]) -> Kernel:
    """Makes a :data:`Kernel` of a function with arguments for keys and a window on both sides."""

    def kernel(
        q: Any,
        k: Any,
        v: Any,
        bounds: Any,
        longest: int,
        causal: bool,
        scale: float | None,
        left: int = -1,
        keys: tuple[torch.Tensor, int] | None = None,
    ) -> torch.Tensor:
        key_bounds, longest_key = keys or (bounds, longest)
        window = (left, 0 if causal else -1)
        out = varlen(q, k, v, bounds, key_bounds, longest, longest_key, causal=causal, scale=scale, window=window)
        assert isinstance(out, torch.Tensor)
        return out

    return kernel
