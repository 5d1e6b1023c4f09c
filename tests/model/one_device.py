"""One gloo device for all process groups of a process.

By default, each group has a device of its own, whose thread wakes up 100 times a second. A run of few processes has
more than sixty groups: on two cores, these threads take as much time as the tests.
"""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


@cache
def _device() -> Any:
    return dist.ProcessGroupGloo.create_default_device()


class OneDeviceGloo(dist.ProcessGroupGloo):
    """A group on the device that all share."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **newer: Any):
        assert not any(newer.values()), newer  # enable_reconfigure of torch 2.15
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [_device()]
        options._timeout = timeout
        super().__init__(store, rank, size, options)


def share_device() -> None:
    """Makes groups of this process, and of those forked from it, share a device."""
    distributed_c10d.ProcessGroupGloo = OneDeviceGloo  # type: ignore[misc]
