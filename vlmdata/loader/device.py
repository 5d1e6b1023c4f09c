"""Moving batches to a CUDA device behind the training step's back."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vlmdata.batch import PackedBatch


@dataclass(frozen=True, eq=False)
class InFlight:
    """A copy under way; holds the source until the batch is received."""

    source: PackedBatch
    batch: PackedBatch
    done: Any


class DeviceMover:
    """Copies batches on a stream of its own: the next one crosses the bus while the current one is trained on.

    Args:
        device: The CUDA device; without a number it is the current one of the thread that calls this.
    """

    def __init__(self, device: torch.device):
        # Another thread will send: its current device is 0, whatever the training's is.
        self._device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self._device)
        self._registered: set[int] = set()
        self._refused: set[int] = set()

    def pin(self, buffer: npt.NDArray[np.uint8]) -> None:
        """Page-locks a reused buffer in place, once: no batch is then copied on the host only to be pinned.

        Where that is refused (a limit on locked memory, say), batches are copied to be pinned.
        """
        address = buffer.ctypes.data
        if address in self._registered or address in self._refused:
            return
        runtime: Any = torch.cuda.cudart()
        with torch.cuda.device(self._device):  # else this makes a context on device 0
            if int(runtime.cudaHostRegister(address, buffer.nbytes, 0)) == 0:
                self._registered.add(address)
                return
            self._refused.add(address)
            # CUDA keeps the error and PyTorch would raise it at this thread's next kernel: let that be this one.
            with suppress(RuntimeError):
                torch.zeros(1, device=self._device)

    def send(self, batch: PackedBatch) -> InFlight:
        """Starts the copy of a batch."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            pinned = batch.pin_memory()  # those not in a page-locked buffer: a few integers
            moved = pinned.to(self._device, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        return InFlight(pinned, moved, done)

    def receive(self, flight: InFlight) -> PackedBatch:
        """Hands a batch over to the current stream."""
        # The source's buffer is reused once it is let go of, so the copy must be over, not merely ordered.
        flight.done.synchronize()
        stream = torch.cuda.current_stream(self._device)
        for tensor in flight.batch.tensors().values():
            tensor.record_stream(stream)  # its memory was allocated on the copy's stream
        return flight.batch

    def close(self) -> None:
        """Waits for copies under way and unlocks the buffers."""
        self._stream.synchronize()
        with torch.cuda.device(self._device):
            for address in self._registered:
                torch.cuda.cudart().cudaHostUnregister(address)
        self._registered.clear()
