"""Time of work on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch


def milliseconds(work: Callable[[], object], repeats: int = 30, warmup: int = 5) -> float:
    """Median time on the device, by events around the work."""
    times = []
    for _ in range(warmup + repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return median(times[warmup:])
