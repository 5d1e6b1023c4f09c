"""Atomic file writes: a file appears complete or not at all."""

from __future__ import annotations

import os
import platform
import re
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TEMPORARY = re.compile(r"\.(?P<target>.+)\.\d+\.tmp")


def temporary_path(path: Path) -> Path:
    """The name under which this thread makes ``path``; its number is of host and thread, so two do not meet."""
    return path.with_name(f".{path.name}.{zlib.crc32(platform.node().encode())}{threading.get_native_id():07}.tmp")


def temporary_target(name: str) -> str | None:
    """Returns the final name of a file with a temporary name; None for any other file."""
    match = _TEMPORARY.fullmatch(name)
    return match["target"] if match else None


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yields a temporary path next to ``path``, and renames it into place if the block succeeds.

    The file is flushed to disk before the rename, and the folder after it. After a power cut, the name thus refers to
    complete content.
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
