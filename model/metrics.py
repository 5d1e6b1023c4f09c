"""Sums of additional model measurements, averaged over the whole step.

A mean of per-rank means is wrong if ranks count different numbers. Sums and counts add up correctly.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class MetricSums:
    """Named pairs of a sum and a count, kept on the device until read."""

    def __init__(self) -> None:
        self._pairs: dict[str, Tensor] = {}

    def add(self, name: str, total: Tensor, count: Tensor) -> None:
        """Adds to a metric without waiting for the device.

        Args:
            name: Metric.
            total: Sum, a scalar.
            count: Divisor, a scalar.
        """
        pair = torch.stack([total.detach().float(), count.detach().float()])
        self._pairs[name] = self._pairs[name] + pair if name in self._pairs else pair

    def pop(
        self, names: tuple[str, ...], group: dist.ProcessGroup | None = None, device: str = "cpu"
    ) -> dict[str, float]:
        """Returns means over all ranks since the last call and resets the sums.

        All ranks of the group must call this together with the same names. A rank may have counted nothing.

        Args:
            names: Metrics, in the same order on all ranks.
            group: Ranks to sum over; None means all.
            device: Device of the collective.

        Returns:
            The mean of each metric that any rank counted.
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
