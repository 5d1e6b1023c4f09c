"""Triton kernels from a delta net's projected channels to the heads of its delta rule, forward and backward.

Forward, one kernel: causal depthwise convolution within samples, SiLU, split into heads, and for queries and keys the
unit length of each head and its repetition for the value heads that share it. It takes the place of
flash-linear-attention's ``causal_conv1d`` and ``l2norm``, and of the copies between them. Backward, two kernels: the
first computes everything up to the convolution's output again from its input, and writes the gradient there and sums
of the taps' gradient over blocks of tokens; the second correlates that gradient with the taps. Nothing is added
atomically, so that gradients are the same in every run. All is computed in float32.

Shapes: tokens T, channels C (queries, keys, values), taps K, value heads h, key width k, value width v.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

#: As in flash-linear-attention's ``l2norm`` and transformers'.
_EPSILON = 1e-6
#: Tokens of a tile and warps of a program: forward, gradient before the activation, gradient of the input.
FORWARD, SLOPES, CORRELATE = (16, 4), (16, 4), (16, 4)
#: Tokens over which one program sums the gradient of taps.
BLOCK = 256
#: Columns of a tile of the input's gradient.
_COLUMNS = 128


class Heads(NamedTuple):
    """Heads of a delta net on this rank.

    Attributes:
        keys: Query heads, and as many key heads.
        values: Value heads, a multiple of ``keys``.
        key_width: Width of a query or key head.
        value_width: Width of a value head.
    """

    keys: int
    values: int
    key_width: int
    value_width: int

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys * self.key_width + self.values * self.value_width


def convolve(x: Tensor, taps: Tensor, first: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the heads.

    Args:
        x: (T, at least C); the first C columns are read. Rows may be apart.
        taps: (C, 1, K), contiguous; the last tap applies to the token itself.
        first: int32 (T,), the first token of each token's sample.
        heads: What the channels are split into.

    Returns:
        Queries (T, h, k) and keys (T, h, k), of unit length, and values (T, h, v).
    """
    tokens = _checked(x, taps, first, heads)
    query, key = (x.new_empty(tokens, heads.values, heads.key_width) for _ in range(2))
    value = x.new_empty(tokens, heads.values, heads.value_width)
    rows, warps = FORWARD
    _delta_heads[(2 * heads.keys + heads.values, triton.cdiv(tokens, rows))](
        x, taps, first, query, key, value, tokens, **_constants(x, taps, heads), rows=rows, num_warps=warps
    )
    return query, key, value


def convolve_backward(
    x: Tensor,
    taps: Tensor,
    first: Tensor,
    heads: Heads,
    grads: tuple[Tensor, Tensor, Tensor],
    dx: Tensor,
    sums: Tensor,
) -> None:
    """Computes the gradients of the input and of the taps.

    Args:
        x: As in :func:`convolve`, as the rest.
        taps: See there.
        first: See there.
        heads: See there.
        grads: Gradients of queries, keys and values.
        dx: (T, at least C); the first C columns are written.
        sums: float32 (blocks of :data:`BLOCK` tokens, at least C K); the first C K columns are written. Their sum
            over blocks is the gradient of the taps.
    """
    tokens = _checked(x, taps, first, heads)
    assert (dx.shape[0], dx.stride(1)) == (tokens, 1), (dx.shape, dx.stride())
    assert (sums.shape[0], sums.stride(1)) == (triton.cdiv(tokens, BLOCK), 1), (sums.shape, sums.stride())
    slopes = x.new_empty(tokens, heads.channels)
    constants = _constants(x, taps, heads)
    rows, warps = SLOPES
    _delta_slopes[(2 * heads.keys + heads.values, sums.shape[0])](
        x,
        taps,
        first,
        *(each.contiguous() for each in grads),
        slopes,
        sums,
        tokens,
        **constants,
        sums_stride=sums.stride(0),
        rows=rows,
        steps=triton.cdiv(min(BLOCK, tokens), rows),
        count_rows=triton.next_power_of_2(taps.shape[-1]),
        num_warps=warps,
    )
    rows, warps = CORRELATE
    _delta_correlate[(triton.cdiv(heads.channels, _COLUMNS), triton.cdiv(tokens, rows))](
        slopes,
        taps,
        first,
        dx,
        tokens,
        dx_stride=dx.stride(0),
        channels=heads.channels,
        count=taps.shape[-1],
        rows=rows,
        columns=_COLUMNS,
        num_warps=warps,
    )


def _checked(x: Tensor, taps: Tensor, first: Tensor, heads: Heads) -> int:
    """Checks what the kernels read. Returns the number of tokens."""
    tokens = x.shape[0]
    assert x.stride(1) == 1, x.stride()
    assert x.shape[1] >= heads.channels, (x.shape, heads)
    assert taps.is_contiguous(), taps.stride()
    assert taps.shape[:2] == (heads.channels, 1), (taps.shape, heads)
    assert (first.shape, first.dtype) == ((tokens,), torch.int32), (first.shape, first.dtype, tokens)
    assert heads.values % heads.keys == 0, heads
    return tokens


def _constants(x: Tensor, taps: Tensor, heads: Heads) -> dict[str, object]:
    """What is fixed in a run. The stride is among it, so that the compiler knows how rows are aligned."""
    return {
        "eps": _EPSILON,
        "stride": x.stride(0),
        "count": taps.shape[-1],
        "key_heads": heads.keys,
        "repeats": heads.values // heads.keys,
        "key_width": heads.key_width,
        "value_width": heads.value_width,
        "key_columns": triton.next_power_of_2(heads.key_width),
        "value_columns": triton.next_power_of_2(heads.value_width),
    }


@triton.jit  # type: ignore[untyped-decorator]
def _preactivation(  # type: ignore[no-untyped-def]  # Triton compiles it, as all that follow
    x,
    taps,
    begin,
    row,
    tokens,
    start,
    stride: tl.constexpr,
    width: tl.constexpr,
    columns: tl.constexpr,
    count: tl.constexpr,
    rows: tl.constexpr,
):
    """The convolution's output for some tokens and the channels of a head, float32 (rows, columns)."""
    column = tl.arange(0, columns)
    inside = column < width
    total = tl.zeros((rows, columns), tl.float32)
    for back in tl.static_range(count):
        mask = ((row < tokens) & (row - back >= begin))[:, None] & inside[None, :]
        value = tl.load(x + (row - back)[:, None] * stride + start + column[None, :], mask=mask, other=0.0)
        tap = tl.load(taps + (start + column) * count + (count - 1 - back), mask=inside, other=0.0)
        total += value.to(tl.float32) * tap.to(tl.float32)[None, :]
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _forward_head(  # type: ignore[no-untyped-def]
    x,
    taps,
    first,
    out,
    tokens,
    start,
    head,
    eps: tl.constexpr,
    stride: tl.constexpr,
    count: tl.constexpr,
    heads: tl.constexpr,
    repeats: tl.constexpr,
    unit: tl.constexpr,
    width: tl.constexpr,
    columns: tl.constexpr,
    rows: tl.constexpr,
):
    """Writes a head of the projection to the ``repeats`` heads of the output that it serves."""
    row = tl.program_id(1).to(tl.int64) * rows + tl.arange(0, rows)
    begin = tl.load(first + row, mask=row < tokens, other=0)
    before = _preactivation(x, taps, begin, row, tokens, start, stride, width, columns, count, rows)
    value = before * tl.sigmoid(before)
    if unit:
        value *= tl.rsqrt(tl.sum(value * value, 1) + eps)[:, None]
    column = tl.arange(0, columns)[None, :]
    mask = (row < tokens)[:, None] & (column < width)
    for number in tl.static_range(repeats):
        target = out + (row[:, None] * heads + (head * repeats + number)) * width + column
        tl.store(target, value.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _delta_heads(  # type: ignore[no-untyped-def]
    x,
    taps,
    first,
    query,
    key,
    value,
    tokens,
    eps: tl.constexpr,
    stride: tl.constexpr,
    count: tl.constexpr,
    key_heads: tl.constexpr,
    repeats: tl.constexpr,
    key_width: tl.constexpr,
    value_width: tl.constexpr,
    key_columns: tl.constexpr,
    value_columns: tl.constexpr,
    rows: tl.constexpr,
):
    """A program computes one head of some tokens. Neighbours have neighbouring heads, so that rows are read whole."""
    head = tl.program_id(0)
    heads: tl.constexpr = key_heads * repeats
    if head < key_heads:
        _forward_head(
            x, taps, first, query, tokens, head * key_width, head,
            eps, stride, count, heads, repeats, True, key_width, key_columns, rows,
        )  # fmt: skip
    elif head < 2 * key_heads:
        _forward_head(
            x, taps, first, key, tokens, head * key_width, head - key_heads,
            eps, stride, count, heads, repeats, True, key_width, key_columns, rows,
        )  # fmt: skip
    else:
        number = head - 2 * key_heads
        _forward_head(
            x, taps, first, value, tokens, 2 * key_heads * key_width + number * value_width, number,
            eps, stride, count, heads, 1, False, value_width, value_columns, rows,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _slopes_of_head(  # type: ignore[no-untyped-def]
    x,
    taps,
    first,
    grad,
    slopes,
    sums,
    tokens,
    start,
    head,
    eps: tl.constexpr,
    stride: tl.constexpr,
    count: tl.constexpr,
    heads: tl.constexpr,
    channels: tl.constexpr,
    sums_stride: tl.constexpr,
    repeats: tl.constexpr,
    unit: tl.constexpr,
    width: tl.constexpr,
    columns: tl.constexpr,
    rows: tl.constexpr,
    steps: tl.constexpr,
    count_rows: tl.constexpr,
):
    """Writes the gradient of the convolution's output for a head and a block of tokens, and sums for its taps."""
    column = tl.arange(0, columns)
    inside = column < width
    numbers = tl.arange(0, count_rows)
    total = tl.zeros((count_rows, columns), tl.float32)
    block = tl.program_id(1).to(tl.int64)
    for step in range(steps):
        row = (block * steps + step) * rows + tl.arange(0, rows)
        here = row < tokens
        begin = tl.load(first + row, mask=here, other=0)
        before = _preactivation(x, taps, begin, row, tokens, start, stride, width, columns, count, rows)
        opened = tl.sigmoid(before)
        mask = here[:, None] & inside[None, :]
        slope = tl.zeros((rows, columns), tl.float32)
        for number in tl.static_range(repeats):
            source = grad + (row[:, None] * heads + (head * repeats + number)) * width + column[None, :]
            slope += tl.load(source, mask=mask, other=0.0).to(tl.float32)
        if unit:
            value = before * opened
            scale = tl.rsqrt(tl.sum(value * value, 1) + eps)[:, None]
            value *= scale
            slope = scale * (slope - value * tl.sum(slope * value, 1)[:, None])
        slope *= opened * (1 + before * (1 - opened))
        target = slopes + row[:, None] * channels + start + column[None, :]
        tl.store(target, slope.to(slopes.dtype.element_ty), mask=mask)
        for back in tl.static_range(count):
            earlier = (here & (row - back >= begin))[:, None] & inside[None, :]
            value = tl.load(x + (row - back)[:, None] * stride + start + column[None, :], mask=earlier, other=0.0)
            part = tl.sum(slope * value.to(tl.float32), 0)
            total += tl.where((numbers == count - 1 - back)[:, None], part[None, :], 0.0)
    target = sums + block * sums_stride + (start + column)[None, :] * count + numbers[:, None]
    tl.store(target, total, mask=(numbers < count)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _delta_slopes(  # type: ignore[no-untyped-def]
    x,
    taps,
    first,
    dquery,
    dkey,
    dvalue,
    slopes,
    sums,
    tokens,
    eps: tl.constexpr,
    stride: tl.constexpr,
    count: tl.constexpr,
    key_heads: tl.constexpr,
    repeats: tl.constexpr,
    key_width: tl.constexpr,
    value_width: tl.constexpr,
    key_columns: tl.constexpr,
    value_columns: tl.constexpr,
    sums_stride: tl.constexpr,
    rows: tl.constexpr,
    steps: tl.constexpr,
    count_rows: tl.constexpr,
):
    """A program goes through a block of tokens of one head."""
    head = tl.program_id(0)
    heads: tl.constexpr = key_heads * repeats
    channels: tl.constexpr = 2 * key_heads * key_width + heads * value_width
    if head < key_heads:
        _slopes_of_head(
            x, taps, first, dquery, slopes, sums, tokens, head * key_width, head,
            eps, stride, count, heads, channels, sums_stride, repeats, True, key_width, key_columns,
            rows, steps, count_rows,
        )  # fmt: skip
    elif head < 2 * key_heads:
        _slopes_of_head(
            x, taps, first, dkey, slopes, sums, tokens, head * key_width, head - key_heads,
            eps, stride, count, heads, channels, sums_stride, repeats, True, key_width, key_columns,
            rows, steps, count_rows,
        )  # fmt: skip
    else:
        number = head - 2 * key_heads
        _slopes_of_head(
            x, taps, first, dvalue, slopes, sums, tokens, 2 * key_heads * key_width + number * value_width, number,
            eps, stride, count, heads, channels, sums_stride, 1, False, value_width, value_columns,
            rows, steps, count_rows,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _delta_correlate(  # type: ignore[no-untyped-def]
    slopes,
    taps,
    first,
    dx,
    tokens,
    dx_stride: tl.constexpr,
    channels: tl.constexpr,
    count: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """The input's gradient for a tile: each tap's share comes from a later token of the same sample."""
    row = tl.program_id(1).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    inside = column < channels
    total = tl.zeros((rows, columns), tl.float32)
    for ahead in tl.static_range(count):
        later = row + ahead
        begin = tl.load(first + later, mask=later < tokens, other=0)
        mask = ((later < tokens) & (begin <= row))[:, None] & inside[None, :]
        slope = tl.load(slopes + later[:, None] * channels + column[None, :], mask=mask, other=0.0)
        tap = tl.load(taps + column * count + (count - 1 - ahead), mask=inside, other=0.0)
        total += slope.to(tl.float32) * tap.to(tl.float32)[None, :]
    mask = (row < tokens)[:, None] & inside[None, :]
    tl.store(dx + row[:, None] * dx_stride + column[None, :], total.to(dx.dtype.element_ty), mask=mask)
