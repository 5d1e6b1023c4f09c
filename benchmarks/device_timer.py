"""Time of work on a CUDA device."""

from __future__ import annotations

import time
from collections import Counter
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


def host_microseconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Time that the host takes to launch the work, with an idle device."""
    total = 0.0
    for _ in range(repeats):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        total += time.perf_counter() - begun
    return total / repeats * 1e6


def by_kernel(work: Callable[[], object], repeats: int = 10) -> Counter[str]:
    """Milliseconds of each kernel of the work."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            work()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    for each in profile.profiler.kineto_results.events():
        if each.device_type() == torch.autograd.DeviceType.CUDA and not each.is_user_annotation():
            times[each.name()] += (each.end_ns() - each.start_ns()) / 1e6 / repeats
    return times
