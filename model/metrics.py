"""Sums of what a model measures beside its loss, to be averaged over the whole step.

A mean of ranks' means is wrong where the ranks count different numbers; sums and counts add up.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class MetricSums:
    """Named pairs of a sum and a count, kept on the device until they are read."""

    def __init__(self) -> None:
        self._pairs: dict[str, Tensor] = {}

    def add(self, name: str, total: Tensor, count: Tensor) -> None:
        """Adds to a metric, without waiting for the device.

        Args:
            name: Metric.
            total: Sum, one number.
            count: What to divide by, one number.
        """
        pair = torch.stack([total.detach().float(), count.detach().float()])
        self._pairs[name] = self._pairs[name] + pair if name in self._pairs else pair

    def pop(
        self, names: tuple[str, ...], group: dist.ProcessGroup | None = None, device: str = "cpu"
    ) -> dict[str, float]:
        """Means over all ranks since the last call, and starts anew.

        All ranks of the group must call it together with the same names; a rank may have counted nothing.

        Args:
            names: Metrics, in an order that all ranks share.
            group: Ranks to add up over; all if None.
            device: Where the collective runs.

        Returns:
            Mean of every metric that anyone counted.
        """
        if not names:
            return {}
        zero = torch.zeros(2, device=device)
        table = torch.stack([self._pairs.get(name, zero).to(device) for name in names])
        self._pairs.clear()
        if dist.is_initialized():
            dist.all_reduce(table, group=group)
        means = (table[:, 0] / table[:, 1].clamp(min=1e-20)).tolist()
        return {name: mean for name, mean, count in zip(names, means, table[:, 1].tolist(), strict=True) if count > 0}
