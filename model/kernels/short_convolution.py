"""Triton kernels from a delta net's projected channels to the heads of its delta rule, forward and backward.

Forward: causal depthwise convolution within samples, SiLU, split into heads, and for queries and keys the unit length
of each head and its repetition for the value heads that share it. Backward, a warp goes through the tokens of a block,
computes a head again, and sums the gradient of the taps over the block. Nothing is added atomically, so that gradients
are the same in every run. All is computed in float32 and rounded once.

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
#: Tokens of a tile and warps of a program, forward.
FORWARD = (16, 4)
#: Tokens that a program of the backward pass goes through, and sums the gradient of taps over.
BLOCK = 64
#: Taps that a program of the backward pass keeps in registers.
MOST_TAPS = 4


class DeltaHeads(NamedTuple):
    """Heads of a delta net on this rank."""

    keys: int  # query heads, and as many key heads
    values: int  # value heads, a multiple of ``keys``
    key_width: int  # width of a query or key head
    value_width: int  # width of a value head

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys * self.key_width + self.values * self.value_width


def convolve(x: Tensor, taps: Tensor, first: Tensor, heads: DeltaHeads) -> tuple[Tensor, Tensor, Tensor]:
    """Computes queries (T, h, k) and keys (T, h, k), of unit length, and values (T, h, v).

    The first C columns of x, (T, at least C), are read. Rows may be apart. The last of the contiguous taps (C, 1, K)
    applies to the token itself. ``first``, int32 (T,), is the first token of each token's sample.
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
    x: Tensor, taps: Tensor, first: Tensor, heads: DeltaHeads, grads: tuple[Tensor, ...], dx: Tensor, sums: Tensor
) -> None:
    """Computes the gradients from those of queries, keys and values. The first four are as in :func:`convolve`.

    Writes the first C columns of ``dx``, (T, at least C), and the first C K of ``sums``, float32 (blocks of
    :data:`BLOCK` tokens, at least C K), whose sum over blocks is the gradient of the taps.
    """
    tokens = _checked(x, taps, first, heads)
    assert (dx.shape[0], dx.stride(1)) == (tokens, 1), (dx.shape, dx.stride())
    assert (sums.shape[0], sums.stride(1)) == (triton.cdiv(tokens, BLOCK), 1), (sums.shape, sums.stride())
    _delta_heads_backward[(2 * heads.keys + heads.values, sums.shape[0])](
        x, taps, first, *(each.contiguous() for each in grads), dx, sums, tokens,
        **_constants(x, taps, heads), dx_stride=dx.stride(0), sums_stride=sums.stride(0), length=min(BLOCK, tokens),
        num_warps=1,
    )  # fmt: skip


def _checked(x: Tensor, taps: Tensor, first: Tensor, heads: DeltaHeads) -> int:
    """Checks what the kernels read. Returns the number of tokens."""
    tokens = x.shape[0]
    assert x.stride(1) == 1, x.stride()
    assert x.shape[1] >= heads.channels, (x.shape, heads)
    assert taps.is_contiguous(), taps.stride()
    assert taps.shape[2] <= MOST_TAPS, taps.shape
    assert taps.shape[:2] == (heads.channels, 1), (taps.shape, heads)
    assert (first.shape, first.dtype) == ((tokens,), torch.int32), (first.shape, first.dtype, tokens)
    assert heads.values % heads.keys == 0, heads
    return tokens


def _constants(x: Tensor, taps: Tensor, heads: DeltaHeads) -> dict[str, object]:
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


@triton.jit
def _sigmoid(x):  # type: ignore[no-untyped-def]  # Triton compiles it, as all that follow
    """A square of 1 / sqrt(y) takes fewer instructions than 1 / y."""
    root = tl.rsqrt(1 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit  # type: ignore[untyped-decorator]
def _preactivation(  # type: ignore[no-untyped-def]
    x, taps, begin, row, tokens, start,
    stride: tl.constexpr, width: tl.constexpr, columns: tl.constexpr, count: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
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
    x, taps, first, out, tokens, start, head,
    eps: tl.constexpr, stride: tl.constexpr, count: tl.constexpr, heads: tl.constexpr, repeats: tl.constexpr,
    unit: tl.constexpr, width: tl.constexpr, columns: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """Writes a head of the projection to the ``repeats`` heads of the output that it serves."""
    row = tl.program_id(1).to(tl.int64) * rows + tl.arange(0, rows)
    begin = tl.load(first + row, mask=row < tokens, other=0)
    before = _preactivation(x, taps, begin, row, tokens, start, stride, width, columns, count, rows)
    value = before * _sigmoid(before)
    if unit:
        value *= tl.rsqrt(tl.sum(value * value, 1) + eps)[:, None]
    column = tl.arange(0, columns)[None, :]
    mask = (row < tokens)[:, None] & (column < width)
    for number in tl.static_range(repeats):
        target = out + (row[:, None] * heads + (head * repeats + number)) * width + column
        tl.store(target, value.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _delta_heads(  # type: ignore[no-untyped-def]
    x, taps, first, query, key, value, tokens,
    eps: tl.constexpr, stride: tl.constexpr, count: tl.constexpr, key_heads: tl.constexpr, repeats: tl.constexpr,
    key_width: tl.constexpr, value_width: tl.constexpr, key_columns: tl.constexpr, value_columns: tl.constexpr,
    rows: tl.constexpr,
):  # fmt: skip
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
def _gradient_of_heads(place, mask, repeats: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of the gradients of the heads that a head serves, for a token: float32 if there are several."""
    total = tl.load(place, mask=mask, other=0.0)
    for number in tl.static_range(1, repeats):
        total = total.to(tl.float32) + tl.load(place + number * width, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _backward_of_head(  # type: ignore[no-untyped-def]
    x, taps, first, grad, dx, sums, tokens, start, head,
    eps: tl.constexpr, stride: tl.constexpr, dx_stride: tl.constexpr, count: tl.constexpr, heads: tl.constexpr,
    sums_stride: tl.constexpr, repeats: tl.constexpr, unit: tl.constexpr, width: tl.constexpr,
    columns: tl.constexpr, length: tl.constexpr,
):  # fmt: skip
    """Goes through the tokens of a block and three more, each of which sends gradients to three tokens before it.

    What the taps hold of earlier tokens (``x1`` to ``x3``) and what earlier tokens have got so far (``due1`` to
    ``due3``) stays in registers, so that every value is read once.
    """
    column = tl.arange(0, columns)
    inside = column < width
    begin = tl.program_id(1).to(tl.int64) * length
    source = x + start + column
    target = dx + start + column
    weights = taps + (start + column) * count + count - 1
    tap0 = tl.load(weights, mask=inside, other=0.0).to(tl.float32)
    tap1 = tl.load(weights - 1, mask=inside & (count > 1), other=0.0).to(tl.float32)
    tap2 = tl.load(weights - 2, mask=inside & (count > 2), other=0.0).to(tl.float32)
    tap3 = tl.load(weights - 3, mask=inside & (count > 3), other=0.0).to(tl.float32)
    x1 = tl.load(source + (begin - 1) * stride, mask=inside & (begin > 0), other=0.0).to(tl.float32)
    x2 = tl.load(source + (begin - 2) * stride, mask=inside & (begin > 1), other=0.0).to(tl.float32)
    x3 = tl.load(source + (begin - 3) * stride, mask=inside & (begin > 2), other=0.0).to(tl.float32)
    due1 = tl.zeros((columns,), tl.float32)
    due2 = tl.zeros((columns,), tl.float32)
    due3 = tl.zeros((columns,), tl.float32)
    sum0 = tl.zeros((columns,), tl.float32)
    sum1 = tl.zeros((columns,), tl.float32)
    sum2 = tl.zeros((columns,), tl.float32)
    sum3 = tl.zeros((columns,), tl.float32)
    # Values of the next token are read ahead of their use: a program is one warp, which would wait.
    next_x = tl.load(source + begin * stride, mask=inside, other=0.0)
    grads = grad + (begin * heads + head * repeats) * width + column
    next_slope = _gradient_of_heads(grads, inside, repeats, width)
    next_first = tl.load(first + begin)
    # From here on relative to the block, in 32 bits.
    left, ahead = (tokens - begin).to(tl.int32), begin.to(tl.int32)
    source += begin * stride
    target += (begin - 3) * dx_stride
    first += begin
    for step in range(length + 3):
        x0 = next_x.to(tl.float32)
        slope = next_slope.to(tl.float32)
        depth = ahead + step - next_first
        source += stride
        grads += heads * width
        first += 1
        seen = step + 1 < left
        next_x = tl.load(source, mask=inside & seen, other=0.0)
        next_slope = _gradient_of_heads(grads, inside & seen, repeats, width)
        next_first = tl.load(first, mask=seen, other=0)
        x1 = tl.where(depth > 0, x1, 0.0)
        x2 = tl.where(depth > 1, x2, 0.0)
        x3 = tl.where(depth > 2, x3, 0.0)
        before = x0 * tap0 + x1 * tap1 + x2 * tap2 + x3 * tap3
        opened = _sigmoid(before)
        value = before * opened
        bend = opened + value - value * opened  # the derivative of SiLU
        if unit:
            # Both sums are of values that are there, so that they take the time of one.
            along = tl.sum(slope * value, 0)
            scale = tl.rsqrt(tl.sum(value * value, 0) + eps)
            slope = scale * (slope - value * (scale * scale * along))
        slope *= bend
        done = due3 + tl.where(depth > 2, slope, 0.0) * tap3
        tl.store(target, done.to(dx.dtype.element_ty), mask=inside & (step > 2) & (step - 3 < left))
        target += dx_stride
        due3 = due2 + tl.where(depth > 1, slope, 0.0) * tap2
        due2 = due1 + tl.where(depth > 0, slope, 0.0) * tap1
        due1 = slope * tap0
        if step < length:  # those after the block are another program's
            sum0 += slope * x0
            sum1 += slope * x1
            sum2 += slope * x2
            sum3 += slope * x3
        x3 = x2
        x2 = x1
        x1 = x0
    place = sums + tl.program_id(1).to(tl.int64) * sums_stride + (start + column) * count + count - 1
    tl.store(place, sum0, mask=inside)
    tl.store(place - 1, sum1, mask=inside & (count > 1))
    tl.store(place - 2, sum2, mask=inside & (count > 2))
    tl.store(place - 3, sum3, mask=inside & (count > 3))


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _delta_heads_backward(  # type: ignore[no-untyped-def]
    x, taps, first, dquery, dkey, dvalue, dx, sums, tokens,
    eps: tl.constexpr, stride: tl.constexpr, count: tl.constexpr, key_heads: tl.constexpr, repeats: tl.constexpr,
    key_width: tl.constexpr, value_width: tl.constexpr, key_columns: tl.constexpr, value_columns: tl.constexpr,
    dx_stride: tl.constexpr, sums_stride: tl.constexpr, length: tl.constexpr,
):  # fmt: skip
    """A program goes through a block of tokens of one head."""
    head = tl.program_id(0)
    heads: tl.constexpr = key_heads * repeats
    if head < key_heads:
        _backward_of_head(
            x, taps, first, dquery, dx, sums, tokens, head * key_width, head,
            eps, stride, dx_stride, count, heads, sums_stride, repeats, True, key_width, key_columns, length,
        )  # fmt: skip
    elif head < 2 * key_heads:
        _backward_of_head(
            x, taps, first, dkey, dx, sums, tokens, head * key_width, head - key_heads,
            eps, stride, dx_stride, count, heads, sums_stride, repeats, True, key_width, key_columns, length,
        )  # fmt: skip
    else:
        number = head - 2 * key_heads
        _backward_of_head(
            x, taps, first, dvalue, dx, sums, tokens, 2 * key_heads * key_width + number * value_width, number,
            eps, stride, dx_stride, count, heads, sums_stride, 1, False, value_width, value_columns, length,
        )  # fmt: skip
