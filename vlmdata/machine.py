"""Resources of this machine."""

from __future__ import annotations

import errno
import os
import resource
import sys
from contextlib import suppress

#: Open files that macOS grants to each process (``OPEN_MAX``).
_FILES_OF_A_MAC = 10240


def available_cores() -> int:
    """Returns the number of cores that this process may use (a container's share, if the system reports it)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def open_file_limit() -> int:
    """Returns how many files this process may have open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def raise_open_file_limit() -> None:
    """Lets this process, and those that it starts, open as many files as the system allows it to ask for."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in (most, max(now, _FILES_OF_A_MAC)):  # a Mac names no limit, and does not grant it
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
            break


def free_descriptors() -> int | None:
    """Returns how many more files this process can open; None if the system does not tell."""
    try:
        return open_file_limit() - len(os.listdir("/dev/fd"))
    except OSError as error:
        return 0 if error.errno in (errno.EMFILE, errno.ENFILE) else None
