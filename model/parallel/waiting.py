"""Moments of a device's work, its results, and how long it waits for other ranks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch


class DeviceMoment:
    """The moment at which a device has done all work that is queued now. On a CPU, this is now."""

    def __init__(self, device: torch.device):
        self._host = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def has_come(self) -> bool:
        """Whether the device has done the work."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Waits until the device has done the work."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_after(self, earlier: DeviceMoment) -> float:
        """Returns the seconds from an earlier moment to this one. Both must have come."""
        if self._event is None or earlier._event is None:
            return self._host - earlier._host
        milliseconds: float = earlier._event.elapsed_time(self._event)
        return milliseconds / 1e3


class Waiting:
    """Sums the time in which a device has no other work than to wait.

    On a CUDA device, it is the time that the current stream waits, not the process: that one only enters commands.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._marks: list[tuple[DeviceMoment, DeviceMoment]] = []

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Wraps a wait."""
        begin = DeviceMoment(self._device)
        yield
        self._marks.append((begin, DeviceMoment(self._device)))

    def take(self) -> float:
        """Returns the seconds since the last call, and starts again from zero. Waits for the last of these waits."""
        if self._marks:
            self._marks[-1][1].wait()
        seconds = sum(end.seconds_after(begin) for begin, end in self._marks)
        self._marks.clear()
        return seconds


class DeviceValues:
    """Copies the values of some tensors from their device in the background, all together. float64 holds them exactly.

    They are on the host from the moment ``ready`` on.
    """

    def __init__(self, *tensors: torch.Tensor):
        self._lengths = [each.numel() for each in tensors]
        values = torch.cat([each.detach().double().flatten() for each in tensors])
        if values.is_cuda:
            self._values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
        else:
            self._values = values
        self.ready = DeviceMoment(values.device)

    def get(self) -> list[list[float]]:
        """Waits for the values and returns those of each tensor, flat."""
        self.ready.wait()
        return [part.tolist() for part in self._values.split(self._lengths)]
