"""Resources of this machine."""

from __future__ import annotations

import errno
import os
import resource
import sys
from contextlib import suppress


def available_cores() -> int:
    """Returns the number of cores that this process may use (a container's share, if the system reports it)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def open_file_limit() -> int:
    """Returns how many files this process may have open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def raise_open_file_limit() -> None:
    """Lets this process, and those that it starts, open as many files as the system allows it to ask for."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # some systems name a limit that they do not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def free_descriptors() -> int | None:
    """Returns how many more files this process can open; None if the system does not tell."""
    try:
        return open_file_limit() - len(os.listdir("/proc/self/fd"))
    except OSError as error:
        return 0 if error.errno in (errno.EMFILE, errno.ENFILE) else None
