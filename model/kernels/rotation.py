"""Triton kernel that splits heads and rotates queries and keys in one pass.

It replaces the vision tower's ``q, k, v = mixed.unbind(); q = rotate(q); k = rotate(k)``
(``apply_rotary_pos_emb_vision``), with separate angles for each row. Memory traffic is its only cost. Transformer
Engine's kernel, which is made for angles per sequence position, takes more than twice as long on an H200
(docs/decisions/0026).

Shapes: rows P, heads n, head width d. The two halves of a head rotate against each other.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


class SplitAndRotate(torch.autograd.Function):
    """Maps (P, n, 3, d) and angles float32 (P, d), both halves equal, to query, key and value, each (P, n, d)."""

    @staticmethod
    def forward(ctx: Any, mixed_pn3d: Tensor, angles_pd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Splits and rotates, in float32."""
        mixed_pn3d = mixed_pn3d.contiguous()
        rows, heads, _, width = mixed_pn3d.shape
        query, key, value = (mixed_pn3d.new_empty(rows, heads, width) for _ in range(3))
        _launch(mixed_pn3d, (query, key, value), angles_pd, backward=False)
        ctx.save_for_backward(angles_pd)
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Rotates back and joins."""
        (angles_pd,) = ctx.saved_tensors
        grads = tuple(grad.contiguous() for grad in grads)
        rows, heads, width = grads[0].shape
        mixed = grads[0].new_empty(rows, heads, 3, width)
        _launch(mixed, grads, angles_pd, backward=True)
        return mixed, None


def run_rotation(heads: int, width: int, device: str) -> None:
    """Runs the kernels forward and backward on one row, such as to compile them for a number of heads and their width.

    Args:
        heads: Heads on a rank.
        width: Width of a head.
        device: ``meta`` for tensors without content.
    """
    mixed = torch.empty(1, heads, 3, width, dtype=torch.bfloat16, device=device, requires_grad=True)
    parts = SplitAndRotate.apply(mixed, torch.empty(1, width, device=device))
    torch.autograd.backward(parts, [torch.ones_like(each) for each in parts])


def _launch(mixed: Tensor, parts: tuple[Tensor, ...], angles_pd: Tensor, *, backward: bool) -> None:
    rows, heads, _, width = mixed.shape
    _split_and_rotate[(rows,)](
        mixed,
        *parts,
        angles_pd,
        heads=heads,
        half=width // 2,
        block_heads=triton.next_power_of_2(heads),
        block_half=triton.next_power_of_2(width // 2),
        backward=backward,
        num_warps=4,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _split_and_rotate(  # type: ignore[no-untyped-def]  # Triton compiles it; its arguments are pointers and constants
    mixed,
    query,
    key,
    value,
    angles,
    heads: tl.constexpr,
    half: tl.constexpr,
    block_heads: tl.constexpr,
    block_half: tl.constexpr,
    backward: tl.constexpr,
):
    """Processes all heads of a row per program. The backward pass joins instead, with negated angles."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, block_heads)[:, None]
    column = tl.arange(0, block_half)[None, :]
    mask = (head < heads) & (column < half)
    angle = tl.load(angles + row * 2 * half + column, mask=column < half)
    cos, sin = tl.cos(angle), tl.sin(angle)
    part = row * heads * 2 * half + head * 2 * half + column
    joint = 3 * row * heads * 2 * half + head * 6 * half + column
    if backward:
        for number in tl.static_range(3):
            source = (query, key, value)[number] + part
            first = tl.load(source, mask=mask).to(tl.float32)
            second = tl.load(source + half, mask=mask).to(tl.float32)
            if number < 2:
                first, second = first * cos + second * sin, second * cos - first * sin
            target = mixed + joint + number * 2 * half
            tl.store(target, first.to(mixed.dtype.element_ty), mask=mask)
            tl.store(target + half, second.to(mixed.dtype.element_ty), mask=mask)
    else:
        for number in tl.static_range(3):
            source = mixed + joint + number * 2 * half
            first = tl.load(source, mask=mask).to(tl.float32)
            second = tl.load(source + half, mask=mask).to(tl.float32)
            if number < 2:
                first, second = first * cos - second * sin, second * cos + first * sin
            target = (query, key, value)[number] + part
            tl.store(target, first.to(mixed.dtype.element_ty), mask=mask)
            tl.store(target + half, second.to(mixed.dtype.element_ty), mask=mask)
