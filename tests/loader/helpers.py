"""What the tests of the loader share."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from vlmdata.batch import HostArrays, PackedBatch
from vlmdata.loader.loader import StreamingLoader

#: Small enough for about ten packs of the chats.
OPTIONS: dict[str, Any] = {"capacity": 832, "global_batch": 4, "max_patches": 200}


def stream(data: Any, **options: Any) -> StreamingLoader:
    """A loader over small packs; of rank 0, if not said otherwise."""
    rank = {"dp_rank": 0} if "dp_size" in options else {}
    return StreamingLoader(data, **{**OPTIONS, **rank, **options})


def epoch_of(data: Any, **options: Any) -> list[PackedBatch]:
    """The batches of the first epoch."""
    with stream(data, **options) as loader:
        return list(loader)


def differences(one: PackedBatch, other: PackedBatch) -> list[str]:
    """Fields that differ, in value, dtype, shape or device."""
    different = []
    for field in dataclasses.fields(PackedBatch):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            same = a.dtype == b.dtype and a.device == b.device and a.shape == b.shape and bool((a == b).all())
        elif isinstance(a, HostArrays):
            same = all(np.array_equal(x, getattr(b, name)) for name, x in vars(a).items())
        else:
            same = type(a) is type(b) and a == b
        if not same:
            different.append(field.name)
    return different


def assert_same(these: Iterable[PackedBatch], those: Iterable[PackedBatch]) -> None:
    """Two runs of batches are equal in every field."""
    for one, other in zip(these, those, strict=True):
        assert not differences(one, other), (one.epoch, one.step, one.micro_batch)


Steps = dict[tuple[int, int], Counter[tuple[int, str]]]


def sample_names(batch: PackedBatch) -> list[tuple[int, str]]:
    """Dataset number and key of every sample."""
    return [(origin.dataset, key) for origin, key in zip(batch.origins, batch.sample_keys, strict=True)]


def steps_of(batches: Iterable[PackedBatch]) -> Steps:
    """The samples of every (epoch, step), whichever rank and micro-batch they were in."""
    found: Steps = {}
    for batch in batches:
        found.setdefault((batch.epoch, batch.step), Counter()).update(sample_names(batch))
    return found


def packs_of(batches: Iterable[PackedBatch]) -> list[tuple[int, int, tuple[str, ...]]]:
    """Epoch, step and keys of batches in order: what stands for them where content is not at stake."""
    return [(batch.epoch, batch.step, batch.sample_keys) for batch in batches]


#: Child processes that were there before the test: another test of this process may have left one.
_EARLIER: set[int] = set()


def forget_earlier_children() -> None:
    """From now on :func:`worker_pids` tells of children that are started from now on."""
    _EARLIER.clear()
    _EARLIER.update(worker_pids())


def worker_pids() -> list[int]:
    """Worker processes of this process that the test has started."""
    pids = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
    return [pid for pid in pids if pid not in _EARLIER]


def buffer_files() -> int:
    """Shared buffers that this process holds open."""
    found = set()
    for file in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            if "vlmdata-batch" in os.readlink(f"/proc/self/fd/{file}"):
                found.add(os.stat(f"/proc/self/fd/{file}").st_ino)
    return len(found)


def wait_until(true: Callable[[], bool], seconds: float) -> bool:
    """Whether something becomes true in time."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
