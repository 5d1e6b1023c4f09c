"""Resources of this machine."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Returns the number of cores that this process may use (a container's share, if the system reports it)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
