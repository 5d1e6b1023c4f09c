"""One run at a time in a folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from io import FileIO
from pathlib import Path

from model.training.config import ConfigError
from vlmdata.errors import ResourceError


def claim(folder: Path) -> FileIO:
    """Has a run's folder to itself while the returned file is open: children do not inherit locks of this kind.

    Args:
        folder: ``run.out``; the lock is ``.lock`` in it, with the process and machine that hold it.

    Raises:
        ConfigError: If another run is at work there.
        ResourceError: If the folder cannot be written.
    """
    path = folder / ".lock"
    try:
        lock = path.open("ab+", buffering=0)
    except OSError as error:
        raise ResourceError(f"{path.resolve()} cannot be written: {error.strerror}; choose another --out") from error
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        lock.seek(0)
        who = lock.read().decode() or "which just started"
        raise ConfigError(
            f"{folder} is in use by another run ({who}): stop that one first, or choose another --out"
        ) from error
    except OSError:  # a file system without locks
        return lock
    with contextlib.suppress(OSError):  # a full disk has room for the lock, if not for whose it is
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
    return lock
