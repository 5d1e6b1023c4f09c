"""Fetching a file from any fsspec URL, checked, and tried again where that can help."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vlmdata.errors import DatasetFormatError
from vlmdata.wording import counted

_CHUNK = 8 * 1024 * 1024
_ATTEMPTS = 4
#: Seconds before the second, third and fourth attempt.
_PAUSES = (0.25, 0.5, 1.0)
#: No such file, no such file system, or a package for it that is not installed: trying again changes nothing.
_FINAL = (FileNotFoundError, ImportError, ValueError)


class RemoteError(Exception):
    """The remote side failed; its own error is the cause."""


def download(url: str, to: Path, sha256: str | None) -> None:
    """Fetches a remote file.

    Args:
        url: Any fsspec URL.
        to: Where its bytes go; on failure there may be part of them.
        sha256: What they must hash to; None is anything.

    Raises:
        FileNotFoundError: If there is no such remote file.
        DatasetFormatError: If it cannot be fetched, or is another one.
        OSError: If ``to`` cannot be written: the disk is full, say.
    """
    problem = ""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSES[attempt - 1])
        try:
            found = _copy(url, to)
        except RemoteError as error:
            cause = error.__cause__
            problem = f"{type(cause).__name__}: {cause}"
            if isinstance(cause, FileNotFoundError):
                raise FileNotFoundError(url) from cause
            if isinstance(cause, _FINAL):
                break
            continue
        if sha256 in (None, found):
            return
        problem = f"its sha256 is {found}, the manifest says {sha256}"
    raise DatasetFormatError(f"{url}: cannot be fetched, {counted(attempt + 1, 'attempt')}: {problem}")


def _copy(url: str, to: Path) -> str:
    digest = hashlib.sha256()
    with open(to, "wb") as target:
        for chunk in _chunks(url):
            digest.update(chunk)
            target.write(chunk)
    return digest.hexdigest()


def _chunks(url: str) -> Iterator[bytes]:
    """The file's bytes. Every error of the remote side becomes a RemoteError, so that it is told from our disk's."""
    import fsspec

    # Servers need not know range requests if the file is read as a stream.
    options = {"block_size": 0} if url.startswith(("http://", "https://")) else {}
    try:
        remote: Any = fsspec.open(url, "rb", **options)
        with remote as source:
            while chunk := source.read(_CHUNK):
                yield chunk
    except Exception as error:  # each fsspec back end has its own
        raise RemoteError(url) from error
