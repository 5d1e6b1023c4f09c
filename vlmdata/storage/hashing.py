"""Hashes files, and a file while it is written."""

from __future__ import annotations

import hashlib
from collections.abc import Buffer
from pathlib import Path

from vlmdata.format.writing import Writing


def sha256_of(path: Path) -> str:
    """Returns the sha256 of a file, in hexadecimal; empty if it is missing."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (FileNotFoundError, IsADirectoryError):
        return ""


class Hashing:
    """A file being written, with the sha256 of the bytes written so far."""

    closed = False

    def __init__(self, to: Writing):
        self._to = to
        self._sha256 = hashlib.sha256()

    def write(self, data: Buffer) -> int:
        """Appends bytes."""
        self._sha256.update(data)
        return self._to.write(data)

    def tell(self) -> int:
        """Bytes written so far."""
        return self._to.tell()

    def flush(self) -> None:
        """Does nothing."""

    def finish(self) -> None:
        """Waits until all bytes are stored."""
        self._to.finish()

    @property
    def sha256(self) -> str:
        """sha256 of all bytes written so far, in hexadecimal."""
        return self._sha256.hexdigest()
