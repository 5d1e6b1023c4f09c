"""Sums of additional model measurements, averaged over the whole step.

A mean of per-rank means is wrong if ranks count different numbers. Sums and counts add up correctly.
"""

from __future__ import annotations

from collections.abc import Sequence

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

    def pop(self, names: tuple[str, ...], device: str | torch.device = "cpu") -> dict[str, float]:
        """Returns means over all ranks since the last call and resets the sums.

        All ranks must call this together with the same names. A rank may have counted nothing.

        Args:
            names: Metrics, in the same order on all ranks.
            device: Device of the collective.

        Returns:
            The mean of each metric that any rank counted.
        """
        return named_means(names, self.take(names, device).flatten().tolist())

    def take(self, names: tuple[str, ...], device: str | torch.device = "cpu") -> Tensor:
        """Resets the sums as :meth:`pop` does, without waiting for the device. Its arguments are those of ``pop``.

        Returns:
            float32 (metrics, 2), mean and count of each over all ranks, for :func:`named_means`.
        """
        if not names:
            return torch.zeros(0, 2, device=device)
        zero = torch.zeros(2, device=device)
        table = torch.stack([self._pairs.get(name, zero).to(device) for name in names])
        self._pairs.clear()
        if dist.is_initialized():
            dist.all_reduce(table)
        return torch.stack([table[:, 0] / table[:, 1].clamp(min=1e-20), table[:, 1]], 1)


def named_means(names: tuple[str, ...], values: Sequence[float]) -> dict[str, float]:
    """Returns the mean of each metric that any rank counted.

    Args:
        names: Metrics.
        values: Mean and count of each, in turn, as :meth:`MetricSums.take` returns them.
    """
    return {name: values[2 * i] for i, name in enumerate(names) if values[2 * i + 1] > 0}
