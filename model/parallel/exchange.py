"""Collectives with gradients that megatron-core lacks.

Shapes: rows R on a rank, gathered rows N, hidden H.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def all_gather_rows(
    rows: torch.Tensor, counts: Sequence[int], group: dist.ProcessGroup, *, sum_gradients: bool = True
) -> torch.Tensor:
    """Gathers a different number of rows from each rank of a group: (R, ...) to (N, ...), in rank order.

    All ranks must call it together, even with zero rows. The counts come from data that all ranks have.

    ``sum_gradients`` sums the gradient over the ranks. This is needed if the ranks use the gathered rows for different
    things (context parallelism). If all ranks do the same with them and have the same gradient (tensor parallelism),
    each rank takes its rows of the gradient without communication.
    """
    size = dist.get_world_size(group)
    assert len(counts) == size
    assert rows.shape[0] == counts[dist.get_rank(group)], (rows.shape, counts)
    if size == 1:
        return rows
    gathered: torch.Tensor = _AllGatherRows.apply(rows, tuple(counts), group, sum_gradients)
    return gathered


class _AllGatherRows(torch.autograd.Function):
    """One collective per direction: ranks send equal blocks of the largest count, and the excess is dropped."""

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


def exchange_rows(
    rows: torch.Tensor, outgoing: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Sends some of the rows (R, ...) to each rank of a group, and nothing else. Gradients return the same way.

    All ranks must call it together, even with zero rows. The counts come from data that all ranks have. ``outgoing``,
    int64 (sum of sent,), are the rows to send, in the order of their destinations; a row may go to several. ``sent``
    and ``received`` are numbers of rows by rank. Returns (sum of received, ...), in the order of the ranks they came
    from.
    """
    assert len(sent) == len(received) == dist.get_world_size(group)
    chosen = rows.index_select(0, outgoing)
    arrived: torch.Tensor = _ExchangeRows.apply(chosen, tuple(sent), tuple(received), group)
    return arrived


class _ExchangeRows(torch.autograd.Function):
    """One all-to-all per direction."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: tuple[int, ...], received: tuple[int, ...], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _all_to_all(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def all_tokens_of_some_columns(
    x: torch.Tensor, sections: Sequence[int], order: torch.Tensor, inverse: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """Exchanges some tokens of all columns for all tokens of some columns: heads, under context parallelism.

    Each rank gives its tokens (t, w), and gets (T, w / ranks): an equal share of each of the sections of a row, whose
    widths are given. ``order``, int64 (T,), is each token's row in the rank-order concatenation of all ranks' tokens.
    """
    size = dist.get_world_size(group)
    counts = (x.shape[0],) * size
    arrived = _ExchangeRows.apply(_ByRank.apply(x, tuple(sections), size), counts, counts, group)
    rows: torch.Tensor = _Reordered.apply(arrived, order, inverse)
    return rows


def some_tokens_of_all_columns(
    x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """Reverses :func:`all_tokens_of_some_columns` for columns of one section: (T, w) to (T / ranks, w * ranks).

    Columns are in the order of the ranks. ``order`` and ``inverse`` are as there.
    """
    size = dist.get_world_size(group)
    counts = (x.shape[0] // size,) * size
    arrived = _ExchangeRows.apply(_Reordered.apply(x, inverse, order), counts, counts, group)
    tokens: torch.Tensor = arrived.unflatten(0, (size, -1)).transpose(0, 1).flatten(1)
    return tokens


class _ByRank(torch.autograd.Function):
    """Maps (t, w) to (ranks * t, w / ranks): each rank's share of each section, for one rank after another."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sections: tuple[int, ...], size: int) -> torch.Tensor:
        ctx.sections, ctx.size = sections, size
        parts = [part.unflatten(-1, (size, -1)).transpose(0, 1) for part in x.split(sections, -1)]
        return torch.cat(parts, -1).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        blocks = grads[0].unflatten(0, (ctx.size, -1)).transpose(0, 1)  # (t, ranks, w / ranks)
        gradient = blocks.new_empty((len(blocks), sum(ctx.sections)))
        parts = blocks.split([width // ctx.size for width in ctx.sections], -1)
        for target, part in zip(gradient.split(ctx.sections, -1), parts, strict=True):
            target.unflatten(-1, (ctx.size, -1)).copy_(part)
        return gradient, None, None


class _Reordered(torch.autograd.Function):
    """Puts rows in another order. Gradients are selected too, where torch would add them up row by row."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse), None, None


def _all_to_all(
    rows: torch.Tensor, sent: tuple[int, ...], received: tuple[int, ...], group: dist.ProcessGroup
) -> torch.Tensor:
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), list(received), list(sent), group=group)
    return arrived


def summed(group: dist.ProcessGroup, gradient: torch.Tensor) -> torch.Tensor:
    """Returns the sum of a gradient over the ranks of a group, for hooks of tensors."""
    gradient = gradient.contiguous().clone()
    dist.all_reduce(gradient, group=group)
    return gradient


def all_gather_plain(local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gathers tensors of equal shape along a new first axis, (size, *local.shape), without gradient."""
    size = dist.get_world_size(group)
    if size == 1:
        return local.unsqueeze(0)
    gathered = local.new_empty((size, *local.shape))
    dist.all_gather_into_tensor(gathered.flatten(0, 1) if local.dim() else gathered, local.contiguous(), group=group)
    return gathered
