"""What must hold on a CUDA device. Plain functions: ``test_gpu.py`` runs them under pytest, ``main`` without it.

On a machine with torch, numpy, pyarrow, xxhash, filelock and fsspec: ``python -m tests.loader.gpu_checks``.
"""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.loader.helpers import differences
from tests.loader.synthetic import write_dataset
from vlmdata.batch import PackedBatch
from vlmdata.loader.feed.device import DeviceMover
from vlmdata.loader.fill.buffers import BufferPool
from vlmdata.loader.loader import StreamingLoader

CUDA = torch.device("cuda", 0)


def stream(data: Path, **options: Any) -> StreamingLoader:
    return StreamingLoader(data, **{"capacity": 1024, "global_batch": 2, **options})


def batches_of(data: Path, epochs: int = 1, **options: Any) -> list[PackedBatch]:
    with stream(data, **options) as loader:
        return [batch.clone() for _ in range(epochs) for batch in loader]


def same_as_on_the_cpu_and_kept_intact(data: Path) -> None:
    """Batches on the device equal the host's, also when all are kept while buffers are reused."""
    expected = batches_of(data, epochs=2)
    for options in ({}, {"num_workers": 2}, {"num_workers": 2, "context_parallel": 2, "context_parallel_rank": 1}):
        wanted = expected if "context_parallel" not in options else batches_of(data, 2, **{**options, "num_workers": 0})
        with stream(data, device="cuda", **options) as loader:
            kept = [batch for _ in range(2) for batch in loader]
        assert len(kept) == len(wanted) > 8
        assert {tensor.device for batch in kept for tensor in batch.tensors().values()} == {CUDA}
        for batch, other in zip(kept, wanted, strict=True):
            assert not differences(batch.to("cpu"), other), differences(batch.to("cpu"), other)


def dropped_batches_are_not_overwritten_while_kernels_read_them(data: Path) -> None:
    """Kernels that are still waiting when a batch is let go of read that batch, not the next one."""
    expected = [fingerprint(batch) for batch in batches_of(data, epochs=4)]
    work = torch.randn(4096, 4096, device=CUDA)
    found = []
    with stream(data, device="cuda", num_workers=2) as loader:
        for _ in range(4):
            for batch in loader:
                for _ in range(4):  # the device is behind: what follows is only queued
                    work = torch.tanh(work @ work / 64)
                found.append(fingerprint(batch))
                del batch
    assert [value.cpu().tolist() for value in found] == [value.tolist() for value in expected]


def fingerprint(batch: PackedBatch) -> torch.Tensor:
    """A few sums over the fields, int64, on the batch's device and not waited for."""
    assert batch.input_ids is not None
    assert batch.patches is not None
    assert batch.labels is not None
    weights = torch.arange(batch.patches.shape[0], device=batch.patches.device)
    return torch.stack(
        [
            (batch.input_ids[0] * torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)).sum(),
            batch.labels.sum(),
            batch.position_ids.sum(),
            (batch.patches.sum(1, dtype=torch.int64) * weights).sum(),
            batch.cu_seqlens_padded.sum(),
        ]
    )


def pixel_values_are_exact(data: Path) -> None:
    """Expanded on the device or on the host: the same bits."""
    for batch in batches_of(data):
        on_device = batch.to(CUDA)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert torch.equal(on_device.pixel_values(dtype).cpu(), batch.pixel_values(dtype)), dtype
    every_byte = torch.arange(256, dtype=torch.uint8).repeat(3).view(1, 768)
    batch = batches_of(data)[0]
    object.__setattr__(batch, "patches", every_byte)
    assert torch.equal(batch.to(CUDA).pixel_values().cpu(), batch.pixel_values())


def slices_are_the_same_on_the_device(data: Path) -> None:
    """A context-parallel slice taken on the device equals the host's."""
    for batch in batches_of(data, context_parallel=4):
        for rank in range(4):
            there = batch.to(CUDA).context_parallel_shard(rank, 4)
            assert {tensor.device for tensor in there.tensors().values()} == {CUDA}
            assert not differences(there.to("cpu"), batch.context_parallel_shard(rank, 4))


def buffers_are_page_locked_in_place(data: Path) -> None:
    """What the mover pins is pinned for torch, is not copied to be sent, and is given up at the end."""
    pool, mover = BufferPool(), DeviceMover(CUDA)
    lease = pool.acquire(1 << 20)
    memory = lease.memory()
    mover.pin(memory)
    mover.pin(memory)  # once is enough
    array = lease.array()
    tensor = torch.from_numpy(array)
    assert tensor.is_pinned()
    assert tensor[4096:].view(torch.int64).is_pinned()
    batch = batches_of(data)[0]
    object.__setattr__(batch, "patches", tensor[: 768 * 100].view(100, 768))
    sent, copy = mover.send(batch)
    assert copy.source.patches is not None
    assert copy.source.patches.data_ptr() == array.ctypes.data
    mover.receive(sent, copy)
    assert not differences(sent.to("cpu"), batch)
    mover.close()
    assert not tensor.is_pinned()
    pool.close()


def memory_that_cannot_be_locked_is_no_error(data: Path) -> None:
    """A refused registration is not remembered by CUDA until the training's next kernel."""
    mover = DeviceMover(CUDA)
    once = np.zeros(1 << 20, np.uint8)
    assert int(torch.cuda.cudart().cudaHostRegister(once.ctypes.data, once.nbytes, 0)) == 0
    mover.pin(once)  # somebody else has it
    torch.ones(1000, device=CUDA).add_(1).sum().item()
    mover.close()
    torch.ones(1000, device=CUDA).add_(1).sum().item()
    assert int(torch.cuda.cudart().cudaHostUnregister(once.ctypes.data)) == 0
    batch = batches_of(data)[0]
    assert not differences(batch.pin_memory().to(CUDA, non_blocking=True).to("cpu"), batch)


def pinned_batches_are_equal(data: Path) -> None:
    """``pin_memory`` page-locks every field, empty ones too."""
    for batch in batches_of(data, global_batch=16):  # with empty packs
        pinned = batch.pin_memory()
        assert all(tensor.is_pinned() for tensor in pinned.tensors().values() if tensor.numel())
        assert not differences(pinned, batch)


def memory_does_not_grow(data: Path) -> None:
    """Neither the device's nor the host's, epoch after epoch."""
    with stream(data, device="cuda", num_workers=2) as loader:
        for _ in range(2):
            for batch in loader:
                assert batch.total_tokens
        torch.cuda.synchronize()
        before = torch.cuda.memory_reserved()
        for _ in range(10):
            for batch in loader:
                assert batch.total_tokens
        torch.cuda.synchronize()
        assert torch.cuda.memory_reserved() <= before + (32 << 20)


def a_loader_uses_the_current_device_of_its_process(data: Path) -> None:
    """``device="cuda"`` is the device set in the training thread, and no context is made on another one."""
    if torch.cuda.device_count() < 2:
        print("  (one device only: nothing to see)")
        return
    with torch.cuda.device(1):
        used = torch.cuda.device_memory_used(0)
        with stream(data, device="cuda", num_workers=1) as loader:
            batches = list(loader)
        assert {tensor.device.index for batch in batches for tensor in batch.tensors().values()} == {1}
        assert torch.cuda.device_memory_used(0) <= used
    for batch, other in zip(batches, batches_of(data), strict=True):
        assert not differences(batch.to("cpu"), other)


CHECKS: tuple[Callable[[Path], None], ...] = (
    a_loader_uses_the_current_device_of_its_process,  # first: later ones make a context on device 0
    same_as_on_the_cpu_and_kept_intact,
    dropped_batches_are_not_overwritten_while_kernels_read_them,
    pixel_values_are_exact,
    slices_are_the_same_on_the_device,
    buffers_are_page_locked_in_place,
    memory_that_cannot_be_locked_is_no_error,
    pinned_batches_are_equal,
    memory_does_not_grow,
)


def main() -> int:
    """Runs all checks; the exit status is the number of those that failed."""
    print(torch.__version__, torch.cuda.get_device_name(0), torch.cuda.device_count(), "device(s)")
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        data = write_dataset(Path(folder) / "data")
        for check in CHECKS:
            begun = time.perf_counter()
            try:
                check(data)
            except Exception:
                failed += 1
                traceback.print_exc(file=sys.stdout)
            print(f"{check.__name__}: {time.perf_counter() - begun:.1f} s", flush=True)
    print(f"{len(CHECKS) - failed} passed, {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(main())
