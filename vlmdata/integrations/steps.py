"""Optimizer steps of packs: which batches belong together, and what each counts in the mean loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from vlmdata.batch import PackedBatch


def optimizer_steps(loader: Any) -> Iterator[list[PackedBatch]]:
    """Yields this process's batches of one optimizer step after another, epoch after epoch, without end.

    Args:
        loader: A ``StreamingLoader``. Its state after a step is that between two steps.
    """
    batches: list[PackedBatch] = []
    while True:
        for batch in loader:  # one pass is one epoch
            batches.append(batch)
            if loader.position.micro_batch == 0:  # the next batch starts a new step
                yield batches
                batches = []


def step_weight(batches: Iterable[PackedBatch], group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Returns the total weight of the targets of a step, over all processes: float32 ().

    If no target weighs anything, the result is 1, so that the loss is 0.

    Args:
        batches: This process's batches of the step.
        group: The data-parallel processes; by default all. Without a process group, this one alone.
    """
    weights = [batch.loss_weights.sum() for batch in batches if batch.loss_weights is not None]
    weight = torch.stack(weights).sum()
    if _processes(group) > 1:
        home = weight.device
        if dist.get_backend(group) == "nccl":
            weight = weight.cuda()
        dist.all_reduce(weight, group=group)
        weight = weight.to(home)
    return weight.where(weight > 0, torch.ones_like(weight))


def step_loss(
    losses: torch.Tensor, batch: PackedBatch, weight: torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Returns a batch's part of the mean loss of its step, to be called ``backward()`` on: float32 ().

    It is multiplied by the number of processes, because DDP and FSDP divide gradients by that.

    Args:
        losses: float32 (T,), the loss of each token.
        batch: The batch.
        weight: :func:`step_weight` of the step.
        group: The data-parallel processes; by default all.
    """
    assert batch.loss_weights is not None
    weighted = losses * batch.loss_weights[0].to(losses.device)
    return weighted.sum() / weight.to(losses.device) * _processes(group)


def _processes(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
