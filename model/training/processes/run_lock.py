"""A lock that allows one run at a time in a folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from io import FileIO
from pathlib import Path

from vlmdata.errors import ResourceError
from vlmdata.model.training.settings.config import ConfigError


def claim(folder: Path) -> FileIO:
    """Locks a run's folder while the returned file is open. Child processes do not inherit this kind of lock.

    Its file ``.lock`` names the process and machine that hold the lock. A ConfigError if another run uses the folder, a
    ResourceError if it cannot be written.
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
    with contextlib.suppress(OSError):  # on a full disk the lock works, but its owner cannot be written
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
    return lock
