"""Which tokens are targets, and how a second loss joins the first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlmdata.batch import IGNORE_INDEX

#: Targets are filled up to a multiple of this.
_ROWS = 128


@dataclass(frozen=True)
class Targets:
    """What the last stage compares with.

    Attributes:
        next: The tokens that come next.
        after_next: The tokens after the next; None without multi-token prediction.
    """

    next: TargetRows
    after_next: TargetRows | None


class TargetRows:
    """Which tokens are targets, and their weights. In fine-tuning they are few, and only they need logits.

    The places are found on the device; their number comes to the host in the background, so that it is there when
    the heads ask for it and nothing waits for the layers that are queued in between.

    Args:
        labels: int64 (1, t), the next token or -100.
        weights: float32 (1, t), what each label counts in the loss.
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
        """Places, labels and weights of the targets, filled up with label -100 to a number that matrix kernels like.

        Returns:
            int64 (n,) places among the tokens, int64 (n,) labels, and float32 (n,) weights, 0 of what fills up; n is
            at least 1.
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
    """Lets a second loss take part in the backward pass of the first, with its scale, without changing its value.

    The step adds up weighted token losses and divides the gradient by the sum of the weights of the global batch; so a
    sum attached here is divided by the same number, whatever the layout. Who divides the loss instead gives every
    loss's gradient the same factor, and that is the second loss's, too. (Weights must be in the losses already: a
    caller who multiplied by them would give different factors.)
    """

    @staticmethod
    def forward(ctx: Any, losses: Tensor, extra: Tensor) -> Tensor:
        """Returns the losses."""
        ctx.save_for_backward(extra)
        return losses.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of the losses, and one for the extra loss."""
        (extra,) = ctx.saved_tensors
        return gradients[0], gradients[0].amax().to(extra.dtype).expand_as(extra)
