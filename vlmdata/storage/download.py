"""Downloads files and byte ranges from fsspec URLs, with checks and retries."""

from __future__ import annotations

import bisect
import hashlib
import time
from collections.abc import Buffer, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vlmdata.errors import DatasetFormatError, SourceError
from vlmdata.locations import file_system, within
from vlmdata.wording import counted

_CHUNK = 8 * 1024 * 1024
_ATTEMPTS = 4
#: Seconds before the second, third and fourth attempt.
_PAUSES = (0.25, 0.5, 1.0)
#: Ranges fetched at a time.
_AT_ONCE = 16
#: Missing file, unknown file system or missing package: retries do not help.
_FINAL = (FileNotFoundError, ImportError, ValueError)
#: Bytes between two ranges of a shard that are fetched, too, to save a request.
_READ_THROUGH = 256 * 1024


class RemoteError(Exception):
    """The remote side failed; its error is the cause."""


def download(url: str, to: Path, sha256: str | None) -> None:
    """Downloads a remote file and checks its hash, if given. After a failure ``to`` may contain part of it.

    Raises:
        FileNotFoundError: If the remote file does not exist.
        DatasetFormatError: If the download fails, or the hash differs.
        OSError: If ``to`` cannot be written, such as on a full disk.
    """
    problem, cause = "", None
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
    raise DatasetFormatError(f"{url}: cannot be fetched, {counted(attempt + 1, 'attempt')}: {problem}") from cause


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
    paths = [within(root.rstrip("/"), each.name) for each in ranges]
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


@dataclass(frozen=True)
class RemoteRanges:
    """Shards at a dataset's fsspec URL of which byte ranges are read. Nothing is cached."""

    url: str


@dataclass(frozen=True, eq=False)
class Extents:
    """Byte ranges ``[start, stop)`` of numbered datasets and shards, as columns (r,) of int64."""

    dataset: npt.NDArray[np.int64]
    shard: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    stop: npt.NDArray[np.int64]

    def joined(self) -> Extents:
        """Returns these bytes in order, and in few ranges: near ones are joined."""
        order = np.lexsort((self.start, self.shard, self.dataset))
        dataset, shard, start = self.dataset[order], self.shard[order], self.start[order]
        # Within a shard, the furthest byte so far. Adding a shard's number times more than any offset separates shards.
        apart = np.cumsum(np.concatenate([[0], (np.diff(dataset) != 0) | (np.diff(shard) != 0)])[: len(order)])
        stride = int(self.stop.max(initial=0)) + _READ_THROUGH + 1
        furthest = np.maximum.accumulate(self.stop[order] + apart * stride)
        begins = np.concatenate([[True], (start + apart * stride)[1:] > furthest[:-1] + _READ_THROUGH])[: len(order)]
        first = np.flatnonzero(begins)
        last = np.concatenate([first[1:], [len(order)]])[: len(first)] - 1
        return Extents(dataset[first], shard[first], start[first], (furthest - apart * stride)[last])


class FetchedRanges:
    """Bytes of shards in memory, fetched from ``urls`` by dataset; ``names`` are all shards of each dataset."""

    def __init__(self, urls: Mapping[int, str], names: Sequence[Sequence[str]]):
        self._urls = urls
        self._names = names
        self._found: dict[tuple[int, int], tuple[list[int], list[bytes | bytearray]]] = {}

    def fetch(self, extents: Extents) -> None:
        """Fetches ranges at once. Forgets those of earlier calls.

        Raises:
            DatasetFormatError: If a range cannot be fetched.
        """
        self._found = {}
        joined = extents.joined()
        for dataset, url in self._urls.items():
            own = joined.dataset == dataset
            columns = (joined.shard[own], joined.start[own], joined.stop[own])
            wanted = [(shard, start, stop) for shard, start, stop in zip(*(c.tolist() for c in columns), strict=True)]
            contents = read_ranges(url, [ByteRange(self._names[dataset][n], a, b) for n, a, b in wanted])
            for (shard, start, _), content in zip(wanted, contents, strict=True):
                starts, pieces = self._found.setdefault((dataset, shard), ([], []))
                starts.append(start)
                pieces.append(content)

    def forget(self) -> None:
        """Frees the memory."""
        self._found = {}

    def copy(self, dataset: int, shard: int, offset: int, into: memoryview) -> None:
        """Copies bytes that were fetched."""
        pieces, at, begin = self._piece(dataset, shard, offset)
        into[:] = memoryview(pieces[at])[begin : begin + into.nbytes]

    def fetch_again(
        self, dataset: int, shard: int, offset: int, into: memoryview, is_sound: Callable[[Buffer], bool]
    ) -> bool:
        """Fetches bytes again that arrived damaged, and keeps them. Returns False if the store itself has such bytes.

        It does if it sends the same bytes twice, or others each time.

        Raises:
            DatasetFormatError: If they cannot be fetched.
        """
        wanted = ByteRange(self._names[dataset][shard], offset, offset + into.nbytes)
        for pause in (0.0, *_PAUSES[:-1]):
            time.sleep(pause)
            (found,) = read_ranges(self._urls[dataset], [wanted])
            is_same = found == into
            into[:] = found
            if is_sound(into):
                pieces, at, begin = self._piece(dataset, shard, offset)
                pieces[at] = bytearray(pieces[at])
                memoryview(pieces[at])[begin : begin + into.nbytes] = into
                return True
            if is_same:
                break
        return False

    def _piece(self, dataset: int, shard: int, offset: int) -> tuple[list[bytes | bytearray], int, int]:
        """Returns the pieces of a shard, the number of the one with a byte, and the byte's place there."""
        starts, pieces = self._found[dataset, shard]
        at = bisect.bisect_right(starts, offset) - 1
        return pieces, at, offset - starts[at]
