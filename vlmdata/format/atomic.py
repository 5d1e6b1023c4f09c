"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TEMPORARY_SUFFIX = ".tmp"


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside ``path``; renames it into place when the block ends well.

    The temporary name holds the process id, so two processes making the same file do not meet. The file is
    flushed to disk before the rename and the folder after it: after a power cut the name leads to whole content.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    try:
        yield temporary
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
        sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces ``path`` with ``content`` in one step."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def sync_directory(directory: Path) -> None:
    """Makes renames in ``directory`` durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
