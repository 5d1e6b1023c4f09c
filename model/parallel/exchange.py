"""Collectives with gradients that megatron-core lacks.

Shapes: rows R of a rank, gathered rows N, hidden H.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def all_gather_rows(
    rows: torch.Tensor, counts: Sequence[int], group: dist.ProcessGroup, *, sum_gradients: bool = True
) -> torch.Tensor:
    """Gathers different numbers of rows from every rank of a group.

    All ranks must call it together, whatever they hold: the counts come from knowledge that all of them have.

    Args:
        rows: (R, ...), R equal to this rank's count; zero is allowed.
        counts: Rows of every rank, in rank order; equal on all ranks.
        group: The ranks.
        sum_gradients: Whether the gradient comes back summed over the ranks, as it must where they use the gathered
            rows for different things (context parallelism). Where all do the same with them and have the same gradient
            (tensor parallelism), each takes its rows of it and nothing is sent.

    Returns:
        (sum of counts, ...), rows in rank order.
    """
    size = dist.get_world_size(group)
    assert len(counts) == size
    assert rows.shape[0] == counts[dist.get_rank(group)], (rows.shape, counts)
    if size == 1:
        return rows
    gathered: torch.Tensor = _AllGatherRows.apply(rows, tuple(counts), group, sum_gradients)
    return gathered


class _AllGatherRows(torch.autograd.Function):
    """One collective each way: equal blocks of the largest count travel, what is beyond a rank's count is dropped."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, counts: tuple[int, ...], group: dist.ProcessGroup, sum_gradients: bool
    ) -> torch.Tensor:
        ctx.counts, ctx.group, ctx.sum_gradients = counts, group, sum_gradients
        block = max(max(counts), 1)
        mine = rows.new_zeros((block, *rows.shape[1:]))
        mine[: rows.shape[0]] = rows
        blocks = rows.new_empty((len(counts) * block, *rows.shape[1:]))
        dist.all_gather_into_tensor(blocks, mine, group=group)
        return torch.cat([blocks[i * block : i * block + count] for i, count in enumerate(counts)])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,) = grads
        counts, group = ctx.counts, ctx.group
        rank = dist.get_rank(group)
        if not ctx.sum_gradients:
            before = sum(counts[:rank])
            return gradient[before : before + counts[rank]], None, None, None
        block = max(max(counts), 1)
        blocks = gradient.new_zeros((len(counts), block, *gradient.shape[1:]))
        start = 0
        for i, count in enumerate(counts):
            blocks[i, :count] = gradient[start : start + count]
            start += count
        mine = gradient.new_empty((block, *gradient.shape[1:]))
        dist.reduce_scatter_tensor(mine, blocks.flatten(0, 1), group=group)
        return mine[: counts[rank]], None, None, None


def all_gather_plain(local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gathers equal tensors from every rank along a new first axis, without gradient.

    Args:
        local: Any shape, equal on all ranks.
        group: The ranks.

    Returns:
        (size, *local.shape).
    """
    size = dist.get_world_size(group)
    if size == 1:
        return local.unsqueeze(0)
    gathered = local.new_empty((size, *local.shape))
    dist.all_gather_into_tensor(gathered.flatten(0, 1) if local.dim() else gathered, local.contiguous(), group=group)
    return gathered
