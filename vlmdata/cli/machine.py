"""What this machine lets a process use."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Cores this process may run on (a container's share, where the system tells)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
