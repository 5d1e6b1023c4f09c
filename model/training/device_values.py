"""Results of a device's work, for a host that does not wait for them at once."""

from __future__ import annotations

import torch

from model.parallel.waiting import DeviceMoment


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
