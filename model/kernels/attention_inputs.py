"""A Triton kernel pair between an attention layer's first projection and its attention.

The projection holds, for each group of heads, its queries, their gates if the model has any, one key and one value.
One pass splits them, normalises queries and keys over each head, and rotates the two. It takes the place of some ten
launches: Transformer Engine's norms and rotations, and copies of what lies apart. The backward pass writes the gradient
of the projection in one piece. All is computed in float32 and rounded once. Nothing is saved but the inputs.

Shapes: tokens T, groups g (key-value heads), queries of a group n, head width d, rotated width r <= d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

#: The widest head, for which a program keeps ``_TOKENS`` rows in registers.
WIDEST = 256
#: Tokens of a program. Each program of the backward pass has its own part of the norms' weight gradients.
_TOKENS = 8


@dataclass(frozen=True)
class Heads:
    """Layout of a projection and settings of its norms.

    Attributes:
        groups: Groups, each with a key and a value.
        queries: Queries of a group.
        width: Width of a head.
        gated: Whether gates follow the queries of a group, as many as these.
        zero_centered: Whether a norm's scale is 1 + its weight.
        eps: Added to the mean of squares.
    """

    groups: int
    queries: int
    width: int
    gated: bool
    zero_centered: bool
    eps: float

    @property
    def columns(self) -> int:
        """Columns of the projection."""
        return self.groups * ((1 + self.gated) * self.queries + 2) * self.width


class AttentionInputs(torch.autograd.Function):
    """Maps a projection (T, columns) and angles float32 (T, r) to query, key, value and gate.

    Query and gate are (T, g n, d), key and value (T, g, d). Without gates the last one is empty.
    """

    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, angles: Tensor, of_query: Tensor, of_key: Tensor, heads: Heads
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Splits, normalises and rotates."""
        mixed, angles = mixed.contiguous(), angles.contiguous()
        tokens, queries = len(mixed), heads.groups * heads.queries
        query = mixed.new_empty(tokens, queries, heads.width)
        key, value = (mixed.new_empty(tokens, heads.groups, heads.width) for _ in range(2))
        gate = torch.empty_like(query) if heads.gated else mixed.new_empty(0)
        _launch(mixed, (query, key, value, gate), angles, (of_query, of_key), (mixed, mixed), heads, backward=False)
        ctx.save_for_backward(mixed, angles, of_query, of_key)
        ctx.heads = heads
        return query, key, value, gate

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor, Tensor, None]:
        """Returns the gradients of the projection and of the norms' weights."""
        mixed, angles, of_query, of_key = ctx.saved_tensors
        heads: Heads = ctx.heads
        gradient = torch.empty_like(mixed)
        parts = mixed.new_empty((2, triton.cdiv(len(mixed), _TOKENS) * heads.groups, heads.width), dtype=torch.float32)
        pulled = tuple(each.contiguous() for each in grads)
        _launch(mixed, pulled, angles, (of_query, of_key), (gradient, parts), heads, backward=True)
        dquery, dkey = parts.sum(1)
        return gradient, None, dquery.to(of_query.dtype), dkey.to(of_key.dtype), None


def _launch(
    mixed: Tensor,
    parts: tuple[Tensor, ...],
    angles: Tensor,
    weights: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, Tensor],
    heads: Heads,
    *,
    backward: bool,
) -> None:
    tokens, half = len(mixed), angles.shape[-1] // 2
    rest = heads.width - 2 * half
    _split_norm_rotate[(triton.cdiv(tokens, _TOKENS), heads.groups)](
        mixed,
        *parts,
        angles,
        *weights,
        *gradients,
        tokens,
        heads.eps,
        groups=heads.groups,
        queries=heads.queries,
        width=heads.width,
        half=half,
        block_half=triton.next_power_of_2(half),
        block_rest=max(1, triton.next_power_of_2(rest)),
        height=_TOKENS,
        gated=heads.gated,
        zero_centered=heads.zero_centered,
        backward=backward,
        num_warps=4,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _load(  # type: ignore[no-untyped-def]
    row, seen, half: tl.constexpr, width: tl.constexpr, block_half: tl.constexpr, block_rest: tl.constexpr
):
    """Loads heads, or weights, in three parts: both halves of the rotated columns, and the rest."""
    column, beyond = tl.arange(0, block_half)[None, :], tl.arange(0, block_rest)[None, :]
    first = tl.load(row + column, mask=seen & (column < half), other=0).to(tl.float32)
    second = tl.load(row + half + column, mask=seen & (column < half), other=0).to(tl.float32)
    rest = tl.load(row + 2 * half + beyond, mask=seen & (beyond < width - 2 * half), other=0).to(tl.float32)
    return first, second, rest


@triton.jit  # type: ignore[untyped-decorator]
def _store(  # type: ignore[no-untyped-def]
    row, first, second, rest, seen, half: tl.constexpr, width: tl.constexpr,
    block_half: tl.constexpr, block_rest: tl.constexpr,
):  # fmt: skip
    """Stores what :func:`_load` loads."""
    column, beyond = tl.arange(0, block_half)[None, :], tl.arange(0, block_rest)[None, :]
    dtype = row.dtype.element_ty
    tl.store(row + column, first.to(dtype), mask=seen & (column < half))
    tl.store(row + half + column, second.to(dtype), mask=seen & (column < half))
    tl.store(row + 2 * half + beyond, rest.to(dtype), mask=seen & (beyond < width - 2 * half))


@triton.jit  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]
    source, target, seen, half: tl.constexpr, width: tl.constexpr, block_half: tl.constexpr, block_rest: tl.constexpr
):
    """Copies heads."""
    first, second, rest = _load(source, seen, half, width, block_half, block_rest)
    _store(target, first, second, rest, seen, half, width, block_half, block_rest)


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _split_norm_rotate(  # type: ignore[no-untyped-def]  # Triton compiles it; its arguments are pointers and numbers
    mixed,
    query,
    key,
    value,
    gate,
    angles,
    of_query,
    of_key,
    gradient,
    parts,
    tokens,
    eps,
    groups: tl.constexpr,
    queries: tl.constexpr,
    width: tl.constexpr,
    half: tl.constexpr,
    block_half: tl.constexpr,
    block_rest: tl.constexpr,
    height: tl.constexpr,
    gated: tl.constexpr,
    zero_centered: tl.constexpr,
    backward: tl.constexpr,
):
    """Processes a group of some tokens. Forward it reads ``mixed``; backward also the gradients of the four parts."""
    group = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * height + tl.arange(0, height)[:, None]
    seen, always = row < tokens, tl.full((1, 1), 1, tl.int1)
    per_group: tl.constexpr = ((2 if gated else 1) * queries + 2) * width
    start = row * groups * per_group + group * per_group
    column = tl.arange(0, block_half)[None, :]
    angle = tl.load(angles + row * 2 * half + column, mask=seen & (column < half), other=0)
    cos, sin = tl.cos(angle), tl.sin(angle)
    for kind in tl.static_range(2):
        weights = _load((of_query, of_key)[kind], always, half, width, block_half, block_rest)
        w1, w2, w3 = weights
        if zero_centered:
            w1, w2, w3 = w1 + 1, w2 + 1, w3 + 1
        dw1 = tl.zeros((1, block_half), tl.float32)
        dw2 = tl.zeros((1, block_half), tl.float32)
        dw3 = tl.zeros((1, block_rest), tl.float32)
        for head in range(queries if kind == 0 else 1):
            offset = start + (head if kind == 0 else (2 if gated else 1) * queries) * width
            if kind == 0:
                part = query + row * groups * queries * width + (group * queries + head) * width
            else:
                part = key + row * groups * width + group * width
            x1, x2, x3 = _load(mixed + offset, seen, half, width, block_half, block_rest)
            square = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1) + tl.sum(x3 * x3, 1)
            rate = 1 / tl.sqrt(square / width + eps)[:, None]
            x1, x2, x3 = x1 * rate, x2 * rate, x3 * rate
            if backward:
                y1, y2, y3 = _load(part, seen, half, width, block_half, block_rest)
                y1, y2 = y1 * cos + y2 * sin, y2 * cos - y1 * sin
                dw1 += tl.sum(y1 * x1, 0)[None, :]
                dw2 += tl.sum(y2 * x2, 0)[None, :]
                dw3 += tl.sum(y3 * x3, 0)[None, :]
                y1, y2, y3 = y1 * w1, y2 * w2, y3 * w3
                along = (tl.sum(y1 * x1, 1) + tl.sum(y2 * x2, 1) + tl.sum(y3 * x3, 1))[:, None] / width
                y1, y2, y3 = rate * (y1 - x1 * along), rate * (y2 - x2 * along), rate * (y3 - x3 * along)
                _store(gradient + offset, y1, y2, y3, seen, half, width, block_half, block_rest)
            else:
                x1, x2, x3 = x1 * w1, x2 * w2, x3 * w3
                x1, x2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
                _store(part, x1, x2, x3, seen, half, width, block_half, block_rest)
        if backward:
            program = (kind * tl.num_programs(0) + tl.program_id(0)) * groups + group
            _store(parts + program * width + tl.zeros((1, 1), tl.int32), dw1, dw2, dw3, always, half, width,
                   block_half, block_rest)  # fmt: skip
    # Gates and the value are as they were.
    if gated:
        for head in range(queries):
            offset = start + (queries + head) * width
            part = gate + row * groups * queries * width + (group * queries + head) * width
            if backward:
                _move(part, gradient + offset, seen, half, width, block_half, block_rest)
            else:
                _move(mixed + offset, part, seen, half, width, block_half, block_rest)
    last: tl.constexpr = ((2 if gated else 1) * queries + 1) * width
    part = value + row * groups * width + group * width
    if backward:
        _move(part, gradient + start + last, seen, half, width, block_half, block_rest)
    else:
        _move(mixed + start + last, part, seen, half, width, block_half, block_rest)
