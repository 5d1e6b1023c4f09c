"""Selects the target tokens, and attaches a second loss to the first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vlmdata.batch import IGNORE_INDEX

#: The number of targets is padded to a multiple of this.
_ROWS = 128


class TargetRows:
    """Indices, labels and weights of the target tokens. Fine-tuning has few targets, and only targets need logits.

    The device finds the indices. Their number is copied to the host in the background, so it is usually available when
    the heads need it, and nothing waits for the queued layers.

    Args:
        labels: int64 (1, t), the next token or -100.
        weights: float32 (1, t), weight of each label in the loss.
    """

    def __init__(self, labels: Tensor, weights: Tensor) -> None:
        self._labels, self._weights = labels[0], weights[0]
        on_target = self._labels != IGNORE_INDEX
        self._places = torch.nonzero_static(on_target, size=len(self._labels), fill_value=0)[:, 0]
        self._count = on_target.sum()
        self._counted: torch.cuda.Event | None = None
        if labels.is_cuda:
            self._count = torch.empty((), dtype=torch.int64, pin_memory=True).copy_(self._count, non_blocking=True)
            self._counted = torch.cuda.Event()
            self._counted.record()

    def get(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns indices, labels and weights of the targets, padded with label -100 for efficient matrix kernels.

        Returns:
            int64 (n,) token indices, int64 (n,) labels, and float32 (n,) weights, 0 for padding; n is at least 1.
        """
        if self._counted is not None:
            self._counted.synchronize()
        count = int(self._count)
        rows = min(max(-(-count // _ROWS), 1) * _ROWS, len(self._places))
        places = self._places[:rows]
        filling = torch.arange(rows, device=places.device) >= count
        labels = self._labels[places].masked_fill(filling, IGNORE_INDEX)
        return places, labels, self._weights[places].masked_fill(filling, 0)


class AttachLoss(torch.autograd.Function):
    """Adds a second loss to the backward pass of the first, at the first loss's scale, without changing its value.

    The step sums weighted token losses and divides the gradient by the sum of weights of the global batch. An attached
    sum is divided by the same number, whatever the layout. A caller that divides the loss itself scales all its
    gradients by the same factor, which then applies to the second loss too. The losses must already contain their
    weights: a caller that multiplied by weights afterwards would apply different factors.
    """

    @staticmethod
    def forward(ctx: Any, losses: Tensor, extra: Tensor) -> Tensor:
        """Returns the losses."""
        ctx.save_for_backward(extra)
        return losses.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradient of the losses, and ones for the extra loss."""
        (extra,) = ctx.saved_tensors
        return gradients[0], gradients[0].amax().to(extra.dtype).expand_as(extra)
