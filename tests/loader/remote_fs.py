"""A file system for the tests of the cache: local files, with failures and delays, and a log of what was opened."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem


class TroubledFileSystem(LocalFileSystem):
    """Local files as ``troubled:///path``. What goes wrong is set on the class."""

    protocol = "troubled"
    cachable = False
    #: Opens that still fail, and how.
    failures = 0
    failure: Exception = ConnectionError("the line is down")
    #: Seconds before every read.
    delay = 0.0
    #: Written over the first bytes of every shard.
    forged = b""
    #: Every open appends a line with the file's name; also from other processes.
    log: Path

    @classmethod
    def reset(cls, log: Path) -> None:
        cls.failures, cls.failure, cls.delay, cls.forged = 0, ConnectionError("the line is down"), 0.0, b""
        cls.log = log
        log.touch()

    @classmethod
    def opened(cls, suffix: str = ".tar") -> list[str]:
        """Names of files that were opened."""
        return [name for name in cls.log.read_text().split() if name.endswith(suffix)]

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **options: Any) -> Any:
        kind = type(self)
        if kind.failures:
            kind.failures -= 1
            raise kind.failure
        with open(kind.log, "a") as log:
            log.write(os.path.basename(path) + "\n")
        return _Slow(super()._open(path, mode, block_size, **options), kind, path.endswith(".tar"))


class _Slow:
    def __init__(self, file: Any, kind: type[TroubledFileSystem], shard: bool):
        self._file, self._kind, self._shard, self._at_start = file, kind, shard, True

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._file.read(size if not self._kind.delay else 512)
        time.sleep(self._kind.delay)
        if self._at_start and self._shard:
            data = self._kind.forged + data[len(self._kind.forged) :]
        self._at_start = False
        return data

    def __enter__(self) -> _Slow:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def close(self) -> None:
        self._file.close()


fsspec.register_implementation("troubled", TroubledFileSystem, clobber=True)
