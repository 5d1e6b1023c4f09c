"""Downloads files and byte ranges from fsspec URLs, with checks and retries."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmdata.errors import DatasetFormatError, SourceError
from vlmdata.locations import file_system
from vlmdata.wording import counted

_CHUNK = 8 * 1024 * 1024
_ATTEMPTS = 4
#: Seconds before the second, third and fourth attempt.
_PAUSES = (0.25, 0.5, 1.0)
#: Ranges fetched at a time.
_AT_ONCE = 16
#: Missing file, unknown file system or missing package: retries do not help.
_FINAL = (FileNotFoundError, ImportError, ValueError)


class RemoteError(Exception):
    """The remote side failed; its error is the cause."""


def download(url: str, to: Path, sha256: str | None) -> None:
    """Downloads a remote file and checks its hash, if given. After a failure ``to`` may contain part of it.

    Raises:
        FileNotFoundError: If the remote file does not exist.
        DatasetFormatError: If the download fails, or the hash differs.
        OSError: If ``to`` cannot be written, such as on a full disk.
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
        problem = f"its sha256 is {found}, but the manifest says {sha256}"
    raise DatasetFormatError(f"{url}: cannot be fetched, {counted(attempt + 1, 'attempt')}: {problem}")


@dataclass(frozen=True)
class ByteRange:
    """Bytes ``[start, stop)`` of a file."""

    name: str
    start: int
    stop: int


def read_ranges(url: str, ranges: Sequence[ByteRange]) -> list[bytes]:
    """Reads byte ranges, none empty, of files below an fsspec URL, several at a time.

    Raises:
        DatasetFormatError: If a file does not exist, has no such bytes, or cannot be read.
    """
    try:
        files, root = file_system(url)
    except SourceError as error:
        raise DatasetFormatError(str(error)) from error
    # A web server that ignores ranges sends whole files: better one of them than many at once.
    alone = 1 if url.startswith("http") else 0
    return _fetched(url, files, root, ranges[:alone]) + _fetched(url, files, root, ranges[alone:])


def _fetched(url: str, files: Any, root: str, ranges: Sequence[ByteRange]) -> list[bytes]:
    """Reads ranges together, and those that fail again."""
    found: dict[int, bytes] = {}
    for attempt in range(_ATTEMPTS):
        missing = [number for number in range(len(ranges)) if number not in found]
        if not missing:
            break
        if attempt:
            time.sleep(_PAUSES[attempt - 1])
        for number, answer in zip(missing, _ask(files, root, [ranges[each] for each in missing]), strict=True):
            wanted = ranges[number]
            extra = len(answer) - (wanted.stop - wanted.start) if isinstance(answer, bytes) else None
            if extra == 0:
                found[number] = answer
            elif attempt + 1 == _ATTEMPTS or isinstance(answer, _FINAL) or (extra or 0) > 0:
                cause = answer if isinstance(answer, Exception) else None
                raise DatasetFormatError(f"{url}/{wanted.name}: {_problem(wanted, answer, attempt + 1)}") from cause
    return [found[number] for number in range(len(ranges))]


def _problem(wanted: ByteRange, answer: bytes | Exception, attempts: int) -> str:
    asked = f"bytes {wanted.start} to {wanted.stop}"
    if isinstance(answer, FileNotFoundError):
        return "no such remote file"
    if isinstance(answer, Exception):
        why = f"{type(answer).__name__}: {answer}"
    elif len(answer) > wanted.stop - wanted.start:
        return (
            f"the server sends {len(answer)} bytes where {asked} were asked for. It cannot send ranges: use "
            'fetch="shards".'
        )
    else:
        why = f"{len(answer)} bytes came"
    return f"{asked} cannot be fetched, {counted(attempts, 'attempt')}: {why}"


def _ask(files: Any, root: str, ranges: Sequence[ByteRange]) -> list[Any]:
    """Sends requests together; gives contents and errors."""
    at_once = {"batch_size": _AT_ONCE} if files.async_impl else {}
    paths = [f"{root.rstrip('/')}/{each.name}" for each in ranges]
    starts, stops = [each.start for each in ranges], [each.stop for each in ranges]
    answers: list[Any] = files.cat_ranges(paths, starts, stops, on_error="return", **at_once)
    return answers


def _copy(url: str, to: Path) -> str:
    digest = hashlib.sha256()
    with open(to, "wb") as target:
        for chunk in _chunks(url):
            digest.update(chunk)
            target.write(chunk)
    return digest.hexdigest()


def _chunks(url: str) -> Iterator[bytes]:
    """Yields the file's bytes. Raises RemoteError for remote errors, to separate them from local disk errors."""
    import fsspec

    # Reading as a stream needs no range requests.
    options = {"block_size": 0} if url.startswith(("http://", "https://")) else {}
    try:
        files, path = fsspec.url_to_fs(url, **options)
        files.invalidate_cache(path)  # the caller may share the file system, and have listed what was replaced since
        remote: Any = files.open(path, "rb")
        with remote as source:
            while chunk := source.read(_CHUNK):
                yield chunk
    except Exception as error:  # each fsspec back end has its own errors
        raise RemoteError(url) from error
