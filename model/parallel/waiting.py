"""How long a device waits for other ranks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch


class Waiting:
    """Sums the time in which a device has no other work than to wait.

    On a CUDA device, it is the time that the current stream waits, not the process: that one only enters commands.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._seconds = 0.0
        self._marks: list[tuple[Any, Any]] = []

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Wraps a wait."""
        if self._device.type != "cuda":
            begun = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begun
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._marks.append((begin, end))

    def take(self) -> float:
        """Returns the seconds since the last call, and starts again from zero. Waits for the last of these waits."""
        if self._marks:
            self._marks[-1][1].synchronize()
        seconds: float = self._seconds + sum(begin.elapsed_time(end) for begin, end in self._marks) / 1e3
        self._seconds = 0.0
        self._marks.clear()
        return seconds
