"""Copies batches to a CUDA device in the background of the training step."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vlmdata.batch import PackedBatch


@dataclass(frozen=True, eq=False)
class DeviceCopy:
    """A copy in progress: the batch on the host, which must live until then, and the CUDA event at its end."""

    source: PackedBatch
    done: Any


class DeviceMover:
    """Copies batches on a separate stream: the next batch is transferred while the current one is in training."""

    def __init__(self, device: torch.device):
        # Another thread will send, and its current device is 0, regardless of the training's.
        self._device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self._device)
        self._registered: set[int] = set()
        self._refused: set[int] = set()

    def pin(self, buffer: npt.NDArray[np.uint8]) -> None:
        """Page-locks a reused buffer in place, once. If it is refused, batches are copied to pinned memory."""
        address = buffer.ctypes.data
        if address in self._registered or address in self._refused:
            return
        runtime: Any = torch.cuda.cudart()
        with torch.cuda.device(self._device):  # otherwise this creates a context on device 0
            if int(runtime.cudaHostRegister(address, buffer.nbytes, 0)) == 0:
                self._registered.add(address)
                return
            self._refused.add(address)
            # CUDA keeps the error, and PyTorch would raise it at this thread's next kernel, so launch one here.
            with suppress(RuntimeError):
                torch.zeros(1, device=self._device)

    def send(self, batch: PackedBatch) -> tuple[PackedBatch, DeviceCopy]:
        """Starts the copy of a batch. The batch may be used after :meth:`receive`."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            pinned = batch.pin_memory()  # tensors outside page-locked buffers: a few integers
            moved = pinned.to(self._device, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        return moved, DeviceCopy(pinned, done)

    def receive(self, batch: PackedBatch, copy: DeviceCopy) -> None:
        """Waits for a batch's copy and makes its memory safe to use on the current stream."""
        # The source's buffer is reused after its release, so the copy must be complete, not only ordered.
        copy.done.synchronize()
        stream = torch.cuda.current_stream(self._device)
        for tensor in batch.tensors().values():
            tensor.record_stream(stream)  # its memory was allocated on the copy's stream

    def close(self) -> None:
        """Waits for copies in progress and unlocks the buffers."""
        self._stream.synchronize()
        with torch.cuda.device(self._device):
            for address in self._registered:
                torch.cuda.cudart().cudaHostUnregister(address)
        self._registered.clear()
