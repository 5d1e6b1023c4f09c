"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TEMPORARY = re.compile(r"\.(?P<target>.+)\.\d+\.tmp")


def temporary_path(path: Path) -> Path:
    """The name under which this process makes ``path``; it holds the process id, so two processes do not meet."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def temporary_target(name: str) -> str | None:
    """The final name of a file with a temporary name, None for any other file."""
    match = _TEMPORARY.fullmatch(name)
    return match["target"] if match else None


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside ``path``; renames it into place when the block ends well.

    The file is flushed to disk before the rename and the folder after it: after a power cut the name leads to whole
    content.
    """
    temporary = temporary_path(path)
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces ``path`` with ``content`` in one step."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def sync(path: Path) -> None:
    """Makes a file's content, or the renames in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
