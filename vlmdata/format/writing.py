"""Files that are being written, become durable when they are complete, and are hashed meanwhile."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Buffer
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

#: Bytes written between two flushes to the disk.
_FLUSH_BYTES = 16 * 1024 * 1024


class Writing(Protocol):
    """A file that is being written. Its name appears only when the file is complete."""

    closed: bool = False  # some libraries read it

    def write(self, data: Buffer) -> int:
        """Appends all bytes. Returns their number.

        Raises:
            OSError: If the disk is full or not writable; possibly for bytes of an earlier call.
        """

    def tell(self) -> int:
        """Returns the number of bytes written so far."""

    def flush(self) -> None:
        """Does nothing: written bytes become durable when the file gets its name."""
        return

    def finish(self) -> None:
        """Waits until all bytes are stored and only the name is missing.

        Raises:
            OSError: If some could not be stored.
        """


class FileWriting(Writing):
    """A local file that is being written.

    A thread flushes written data in the background, so that the end does not wait for all of it.
    """

    def __init__(self, path: Path):
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 (held over the object's life)
        self._position = 0
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="vlmdata-flush")
        self._flush: Future[None] | None = None
        self._next_flush = _FLUSH_BYTES

    def write(self, data: Buffer) -> int:
        """Appends bytes."""
        view = memoryview(data).cast("B")
        written = 0
        while written < view.nbytes:  # an unbuffered write may be short, especially on a nearly full disk
            written += self._file.write(view[written:])
        self._position += written
        if self._position >= self._next_flush and (self._flush is None or self._flush.done()):
            self._flushed()
            self._flush = self._flusher.submit(os.fsync, self._file.fileno())
            self._next_flush = self._position + _FLUSH_BYTES
        return written

    def tell(self) -> int:
        """Bytes written so far."""
        return self._position

    def finish(self) -> None:
        """Flushes everything to the disk."""
        self._flushed()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        self._flusher.shutdown(wait=True)  # otherwise another file may reuse the closed descriptor
        self._file.close()

    def _flushed(self) -> None:
        """Waits for the current flush. The system reports a failed write once, possibly to that flush."""
        flush, self._flush = self._flush, None
        if flush is not None:
            flush.result()


def sha256_of(path: Path) -> str:
    """Returns the sha256 of a file, in hexadecimal; empty if it is missing."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (FileNotFoundError, IsADirectoryError):
        return ""


class Hashing(Writing):
    """A file being written, with the sha256 of the bytes written so far."""

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

    def finish(self) -> None:
        """Waits until all bytes are stored."""
        self._to.finish()

    @property
    def sha256(self) -> str:
        """sha256 of all bytes written so far, in hexadecimal."""
        return self._sha256.hexdigest()
