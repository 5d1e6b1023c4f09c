"""A Triton kernel pair between an attention layer's first projection and its attention, in place of some ten launches.

The projection holds, for each group of heads, its queries, their gates if the model has any, one key and one value.
One pass splits them, normalises queries and keys over each head, and rotates the two. The backward pass writes the
gradient of the projection in one piece. All is computed in float32 and rounded once. Only the inputs are saved.

Shapes: tokens T, groups g (key-value heads), queries of a group n, head width d, rotated width r <= d.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

#: The widest head, for which a program keeps the rows of a tile in registers.
WIDEST = 256
#: Tokens of a tile of the widest heads, tiles that a program processes one after the other, and warps of a program.
FORWARD = (4, 8, 4)
#: The same backward, where each program has its own part of the norms' weight gradients: fewer tiles, more parts.
BACKWARD = (2, 16, 2)


@dataclass(frozen=True)
class AttentionHeads:
    """Layout of a projection and settings of its norms."""

    groups: int  # groups, each with a key and a value
    queries: int  # queries of a group
    width: int  # width of a head
    gated: bool  # whether gates follow the queries of a group, as many as these
    zero_centered: bool  # whether a norm's scale is 1 + its weight
    eps: float  # added to the mean of squares

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
        ctx: Any, mixed: Tensor, angles: Tensor, of_query: Tensor, of_key: Tensor, heads: AttentionHeads
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
        heads: AttentionHeads = ctx.heads
        gradient = torch.empty_like(mixed)
        height, tiles, _ = _tiles(heads, backward=True)
        programs = [triton.cdiv(len(mixed), height * tiles) * heads.groups * each for each in (heads.queries, 1)]
        parts = mixed.new_empty((sum(programs), heads.width), dtype=torch.float32)
        pulled = tuple(each.contiguous() for each in grads)
        _launch(mixed, pulled, angles, (of_query, of_key), (gradient, parts), heads, backward=True)
        sums = parts.new_empty(2, heads.width)
        for part, total in zip(parts.split(programs), sums, strict=True):
            torch.sum(part, 0, out=total)
        dquery, dkey = sums.to(of_query.dtype)
        return gradient, None, dquery, dkey, None


def _tiles(heads: AttentionHeads, *, backward: bool) -> tuple[int, int, int]:
    """Tokens of a tile, tiles and warps of a program. Tiles of narrower heads are higher, to be as large."""
    height, tiles, warps = BACKWARD if backward else FORWARD
    return height * WIDEST // triton.next_power_of_2(heads.width), tiles, warps


def _launch(
    mixed: Tensor,
    parts: tuple[Tensor, ...],
    angles: Tensor,
    weights: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, Tensor],
    heads: AttentionHeads,
    *,
    backward: bool,
) -> None:
    tokens, half = len(mixed), angles.shape[-1] // 2
    height, tiles, warps = _tiles(heads, backward=backward)
    _split_norm_rotate[(triton.cdiv(tokens, height * tiles) * (heads.columns // heads.width),)](
        mixed, *parts, angles, *weights, *gradients, tokens, heads.eps,
        groups=heads.groups, queries=heads.queries, width=heads.width, half=half,
        block=triton.next_power_of_2(heads.width), height=height, tiles=tiles, gated=heads.gated,
        zero_centered=heads.zero_centered, backward=backward, num_warps=warps,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _fetch(  # type: ignore[no-untyped-def]
    source, second, angles, row, seen, strides, width: tl.constexpr, half: tl.constexpr, block: tl.constexpr
):
    """Loads rows of a head, each column's partner in the rotation, another tensor's rows, and angles."""
    column = tl.arange(0, block)[None, :]
    partner = tl.where(column < half, column + half, column - half)
    inside = seen & (column < width)
    x = tl.load(source + row * strides[0] + column, mask=inside, other=0)
    other = tl.load(source + row * strides[0] + partner, mask=seen & (column < 2 * half), other=0)
    y = x if second is None else tl.load(second + row * strides[1] + column, mask=inside, other=0)
    if half & (half - 1) == 0:
        angle = tl.load(angles + row * 2 * half + tl.arange(0, half)[None, :], mask=seen, other=0)
    else:
        angle = tl.load(angles + row * 2 * half + column % half, mask=seen & (column < 2 * half), other=0)
    return x, other, y, angle


@triton.jit  # type: ignore[untyped-decorator]
def _cos_sin(angle, half: tl.constexpr, block: tl.constexpr, height: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cosines and sines for each column of a head. Columns that are not rotated have a cosine of 1 and any sine."""
    cos, sin = tl.cos(angle), tl.sin(angle)
    if half & (half - 1) == 0:
        # Each is computed once and then repeated over all columns.
        cos = tl.reshape(tl.broadcast_to(cos[:, None, :], height, block // half, half), height, block)
        sin = tl.reshape(tl.broadcast_to(sin[:, None, :], height, block // half, half), height, block)
        cos = tl.where(tl.arange(0, block)[None, :] < 2 * half, cos, 1)
    return cos, sin


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _split_norm_rotate(  # type: ignore[no-untyped-def]  # Triton compiles it; its arguments are pointers and numbers
    mixed, query, key, value, gate, angles, of_query, of_key, gradient, parts, tokens, eps,
    groups: tl.constexpr, queries: tl.constexpr, width: tl.constexpr, half: tl.constexpr, block: tl.constexpr,
    height: tl.constexpr, tiles: tl.constexpr, gated: tl.constexpr, zero_centered: tl.constexpr,
    backward: tl.constexpr,
):  # fmt: skip
    """Processes a head of some tokens. Forward it reads ``mixed``; backward also the gradients of the four parts.

    Programs of the same tokens follow one another, so that rows of ``mixed`` and angles are read at about one time.
    """
    of_group: tl.constexpr = (2 if gated else 1) * queries + 2
    line, number = tl.program_id(0) % (groups * of_group), tl.program_id(0) // (groups * of_group)
    group, head = line // of_group, line % of_group
    # Where the head is outside of the projection: all queries and gates of a token follow one another, all keys do.
    place, stride = group * queries + head % queries, groups * queries * width
    apart, weights = query, of_query
    if head >= of_group - 2:
        place, stride = group, groups * width
        apart, weights = key, of_key
        if head == of_group - 1:
            apart = value
    elif head >= queries:
        apart = gate
    start = number.to(tl.int64) * (height * tiles)
    apart += start * stride + place * width
    mixed += start * (groups * of_group * width) + line * width
    gradient += start * (groups * of_group * width) + line * width
    angles += start * (2 * half)
    rows = tl.minimum(tokens - start, height * tiles).to(tl.int32)
    if backward:
        source, source_stride, target, target_stride = apart, stride, gradient, groups * of_group * width
    else:
        source, source_stride, target, target_stride = mixed, groups * of_group * width, apart, stride
    column = tl.arange(0, block)[None, :]
    dtype: tl.constexpr = mixed.dtype.element_ty
    if head < queries or head == of_group - 2:
        partner, turned = tl.where(column < half, column + half, column - half), column < 2 * half
        sign = tl.where(column < half, -1.0, 1.0)
        scale = tl.load(weights + column, mask=column < width, other=0).to(tl.float32)
        partners_scale = tl.load(weights + partner, mask=turned, other=0).to(tl.float32)
        if zero_centered:
            scale, partners_scale = scale + 1, partners_scale + 1
        slope = tl.zeros((height, block), tl.float32)
        row = tl.arange(0, height)[:, None]
        second, strides = mixed if backward else None, (source_stride, groups * of_group * width)
        fetched = _fetch(source, second, angles, row, row < rows, strides, width, half, block)
        for _ in range(tiles):
            x, other, y, angle = fetched
            at, seen = row * target_stride, row < rows
            # What the next tile needs is on its way while this one is computed.
            row += height
            fetched = _fetch(source, second, angles, row, row < rows, strides, width, half, block)
            cos, sin = _cos_sin(angle, half, block, height)
            x, other, y = x.to(tl.float32), other.to(tl.float32), y.to(tl.float32)
            rate = tl.rsqrt(tl.sum(y * y, 1) * (1.0 / width) + eps)[:, None]
            if backward:
                x = x * cos - sign * other * sin
                y *= rate
                slope += x * y
                x *= scale
                x = rate * (x - y * (tl.sum(x * y, 1)[:, None] * (1.0 / width)))
            else:
                x = rate * (x * scale * cos + sign * partners_scale * other * sin)
            tl.store(target + at + column, x.to(dtype), mask=seen & (column < width))
        if backward:
            # First the parts of all programs of queries, then those of keys.
            program = number * groups * queries + place
            if head >= queries:
                program = (tl.num_programs(0) // of_group) * queries + number * groups + group
            tl.store(parts + program.to(tl.int64) * width + column, tl.sum(slope, 0)[None, :], mask=column < width)
    else:
        # Gates and values are as they were. Rows without arithmetic take few registers: four tiles are read at once.
        together: tl.constexpr = min(tiles, 4)
        for step in range(tiles // together):
            row = step * together * height + tl.arange(0, together * height)[:, None]
            inside = (row < rows) & (column < width)
            kept = tl.load(source + row * source_stride + column, mask=inside)
            tl.store(target + row * target_stride + column, kept, mask=inside)
