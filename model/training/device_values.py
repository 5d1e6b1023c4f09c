"""Results and times of a device's work, for a host that does not wait for them at once."""

from __future__ import annotations

import time

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


class DeviceValues:
    """Copies the values of some tensors from their device in the background, all together. float64 holds them exactly.

    Attributes:
        ready: The moment at which the values are on the host.
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
