"""Triton kernel that adds a bias, splits heads and rotates queries and keys in one pass.

It replaces the vision tower's ``q, k, v = (product + bias).unbind(); q = rotate(q); k = rotate(k)``
(``apply_rotary_pos_emb_vision``), with separate angles for each row. Backward, it also sums the rows of the gradient,
which is the gradient of the bias. Cosines and sines are computed once before all heads and blocks
(docs/decisions/0026).

Shapes: rows P, heads n, head width d. The two halves of a head rotate against each other.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class RotationTiling(NamedTuple):
    """How rows are divided among programs."""

    #: Pairs of columns in a tile that rotate against each other, of as many rows as fit, but at least one.
    pairs: int
    per_thread: int  # neighbouring pairs of a thread: 8 are 16 bytes of bfloat16 from each half
    programs: int  # maximum number of programs, which take tiles in turn
    stages: int = 1  # number of tiles in work at once. All but one of them are being copied to shared memory.


#: Tilings forward and backward: the fastest of 27 on an H200 (``benchmarks/tower_biases.py --tilings``, 55,500 patches
#: of 16 heads of 64). Backward, each program writes 12 n d bytes.
FORWARD, BACKWARD = RotationTiling(512, 4, 792, 2), RotationTiling(512, 8, 1056, 1)


class SplitAndRotate(torch.autograd.Function):
    """Maps a product (P, n, 3, d), a bias (3 n d,) and turns float32 (P, d) to query, key and value, each (P, n, d).

    The turns of a row are d / 2 cosines, then d / 2 sines.
    """

    @staticmethod
    def forward(ctx: Any, mixed_pn3d: Tensor, bias: Tensor, turns_pd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Adds, splits and rotates, in float32."""
        mixed_pn3d = mixed_pn3d.contiguous()
        rows, heads, _, width = mixed_pn3d.shape
        query, key, value = (mixed_pn3d.new_empty(rows, heads, width) for _ in range(3))
        _launch(mixed_pn3d, bias, (query, key, value), turns_pd, FORWARD)
        ctx.save_for_backward(turns_pd)
        ctx.dtype = bias.dtype
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """Rotates back, joins, and sums rows."""
        (turns_pd,) = ctx.saved_tensors
        _, of_bias, _ = ctx.needs_input_grad
        query, key, value = (grad.contiguous() for grad in grads)
        rows, heads, width = query.shape
        mixed = query.new_empty(rows, heads, 3, width)
        parts = _launch(mixed, None, (query, key, value), turns_pd, BACKWARD, of_bias=of_bias)
        return mixed, parts.sum(0).to(ctx.dtype) if of_bias else None, None


def _launch(
    mixed: Tensor,
    bias: Tensor | None,
    parts: tuple[Tensor, Tensor, Tensor],
    turns_pd: Tensor,
    tiling: RotationTiling,
    *,
    of_bias: bool = False,
) -> Tensor:
    """Splits ``mixed``, or joins it without a bias. Returns sums over programs' rows, float32 (programs, 3 n d)."""
    rows, heads, _, width = mixed.shape
    block_heads, block_half = triton.next_power_of_2(heads), triton.next_power_of_2(width // 2)
    height = max(1, tiling.pairs // (block_heads * block_half))
    per_warp = 32 * math.gcd(tiling.per_thread, width // 2)  # those that are next to each other in a tile, too
    tiles = triton.cdiv(rows, height)
    programs = min(tiles, tiling.programs)
    sums = mixed.new_empty((programs if of_bias else 0, 3 * heads * width), dtype=torch.float32)
    _split_and_rotate[(programs,)](
        mixed, mixed if bias is None else bias, *parts, turns_pd, sums, rows, triton.cdiv(tiles, max(1, programs)),
        heads=heads, half=width // 2, block_heads=block_heads, block_half=block_half, height=height,
        stages=tiling.stages, backward=bias is None, of_bias=of_bias,
        num_warps=min(16, max(1, height * block_heads * block_half // per_warp)),
    )  # fmt: skip
    return sums


@triton.jit  # type: ignore[untyped-decorator]
def _load(source, half: tl.constexpr, mask):  # type: ignore[no-untyped-def]  # Triton compiles it
    """Loads both halves of heads."""
    first = tl.load(source, mask=mask, other=0).to(tl.float32)
    return first, tl.load(source + half, mask=mask, other=0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _store(target, half: tl.constexpr, mask, both):  # type: ignore[no-untyped-def]
    """Stores both halves of heads."""
    tl.store(target, both[0].to(target.dtype.element_ty), mask=mask)
    tl.store(target + half, both[1].to(target.dtype.element_ty), mask=mask)


@triton.jit
def _rotate(both, cos, sin):  # type: ignore[no-untyped-def]
    """Rotates both halves of heads."""
    return both[0] * cos - both[1] * sin, both[1] * cos + both[0] * sin


@triton.jit
def _add(both, others):  # type: ignore[no-untyped-def]
    """Adds halves of heads."""
    return both[0] + others[0], both[1] + others[1]


@triton.jit(do_not_specialize=["rows", "tiles"])  # type: ignore[untyped-decorator]
def _split_and_rotate(  # type: ignore[no-untyped-def]  # Triton compiles it; its arguments are pointers and numbers
    mixed, bias, query, key, value, turns, sums, rows, tiles,
    heads: tl.constexpr, half: tl.constexpr, block_heads: tl.constexpr, block_half: tl.constexpr,
    height: tl.constexpr, stages: tl.constexpr, backward: tl.constexpr, of_bias: tl.constexpr,
):  # fmt: skip
    """Processes some tiles of whole rows. Backward joins, rotates back, and has the sums where forward has the bias."""
    lines: tl.constexpr = height * block_heads
    head, column = (tl.arange(0, lines) % block_heads)[:, None], tl.arange(0, block_half)[None, :]
    within = (head < heads) & (column < half)
    place = head * 6 * half + column
    if backward:
        zeros = tl.zeros((lines, block_half), tl.float32)
        of_query, of_key, of_value = (zeros, zeros), (zeros, zeros), (zeros, zeros)
    else:
        of_query = _load(bias + place, half, within)
        of_key = _load(bias + place + 2 * half, half, within)
        of_value = _load(bias + place + 4 * half, half, within)
    for tile in tl.range(tiles, num_stages=stages):
        start = (tl.program_id(0).to(tl.int64) + tile * tl.num_programs(0)) * height
        row = start + tl.arange(0, height)[:, None]
        turn, turned = turns + row * 2 * half + column, (row < rows) & (column < half)
        cos = tl.load(turn, mask=turned, other=0)[:, None, :]
        sin = tl.load(turn + half, mask=turned, other=0)[:, None, :]
        cos = tl.reshape(tl.broadcast_to(cos, height, block_heads, block_half), lines, block_half)
        sin = tl.reshape(tl.broadcast_to(sin, height, block_heads, block_half), lines, block_half)
        row = start + (tl.arange(0, lines) // block_heads)[:, None]
        mask = (row < rows) & within
        part = (row * heads + head) * 2 * half + column
        joint = mixed + row * heads * 6 * half + place
        if backward:
            q, k, v = _load(query + part, half, mask), _load(key + part, half, mask), _load(value + part, half, mask)
            q, k = _rotate(q, cos, -sin), _rotate(k, cos, -sin)
            _store(joint, half, mask, q)
            _store(joint + 2 * half, half, mask, k)
            _store(joint + 4 * half, half, mask, v)
            if of_bias:
                of_query, of_key, of_value = _add(of_query, q), _add(of_key, k), _add(of_value, v)
        else:
            q, k = _add(_load(joint, half, mask), of_query), _add(_load(joint + 2 * half, half, mask), of_key)
            v = _add(_load(joint + 4 * half, half, mask), of_value)
            _store(query + part, half, mask, _rotate(q, cos, sin))
            _store(key + part, half, mask, _rotate(k, cos, sin))
            _store(value + part, half, mask, v)
    if of_bias:
        head = tl.arange(0, block_heads)[:, None]
        target = sums + tl.program_id(0).to(tl.int64) * heads * 6 * half + head * 6 * half + column
        for number in tl.static_range(3):
            for side in tl.static_range(2):
                total = tl.reshape((of_query, of_key, of_value)[number][side], height, block_heads, block_half)
                mask = (head < heads) & (column < half)
                tl.store(target + (2 * number + side) * half, tl.sum(total, 0), mask=mask)
