"""Values that a device computes, for a host that does not wait for them at once."""

from __future__ import annotations

import time

import torch


class DeviceValues:
    """The values of some tensors, copied from their device together, in the background. float64 holds them exactly."""

    def __init__(self, *tensors: torch.Tensor):
        self._lengths = [each.numel() for each in tensors]
        self._values = torch.cat([each.detach().double().flatten() for each in tensors])
        self._copied: torch.cuda.Event | None = None
        self._made = time.perf_counter()
        if self._values.is_cuda:
            self._values = torch.empty_like(self._values, device="cpu", pin_memory=True).copy_(
                self._values, non_blocking=True
            )
            self._copied = torch.cuda.Event(enable_timing=True)
            self._copied.record()

    def done(self) -> bool:
        """Whether they are on the host."""
        return self._copied is None or self._copied.query()

    def get(self) -> list[list[float]]:
        """Waits for the copy and returns the values of each tensor, flat."""
        if self._copied is not None:
            self._copied.synchronize()
        return [part.tolist() for part in self._values.split(self._lengths)]

    def seconds_after(self, earlier: DeviceValues) -> float:
        """Returns how long after other values these were complete. Both must be."""
        if self._copied is None or earlier._copied is None:
            return self._made - earlier._made
        milliseconds: float = earlier._copied.elapsed_time(self._copied)
        return milliseconds / 1e3
