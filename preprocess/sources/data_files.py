"""Files of a source, on disk or in a bucket. Opening them checks that they are unchanged."""

from __future__ import annotations

import glob
import io
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from vlmdata.attempts import FAILED, FINAL, AttemptsFailed, attempts
from vlmdata.errors import SourceError
from vlmdata.locations import file_system, is_url, is_web
from vlmdata.preprocess.sources.web_object import Changed, WebVersion, look_up, read_range

#: Bytes per request of a sequential reader of a remote object.
STREAM_BYTES = 8 << 20
_THREADS = 16
#: Names that fsspec file systems use for the checksum or version of an object, best first.
_CHECKSUMS = ("md5Hash", "sha256", "ETag", "etag", "blob_id", "crc32c")


@dataclass(frozen=True)
class DataFile:
    """A file and its state when the source was opened. Cheap to pickle."""

    place: str  # path or URL
    size: int  # size in bytes
    #: On disk, the modification time. In a bucket, the store's checksum or version; None if it reports neither.
    version: str | None
    web: WebVersion | None = None  # on a web server, its version in full

    @classmethod
    def local(cls, path: Path | str) -> DataFile:
        """Returns a file on disk with its current state."""
        status = os.stat(path)
        return cls(str(path), status.st_size, str(status.st_mtime_ns))

    @property
    def is_remote(self) -> bool:
        """Whether it is in a bucket or at another URL."""
        return is_url(self.place)

    @property
    def file_name(self) -> str:
        """The last part of its place, without the query of a web address, which may contain secrets."""
        return without_query(self.place).rpartition("/")[2]

    def open(self, buffered: int = STREAM_BYTES, *, counting: bool = False) -> BinaryIO:
        """Opens a stream of the file's bytes; a SourceError if a file on disk is missing or has changed.

        A request to a remote object has ``buffered`` bytes or more; with 0, exactly those that are read. ``counting``
        omits the request that compares a remote object's version. A changed object is then detected when its first row
        is read.
        """
        if self.is_remote:
            raw = RemoteStream(self.place, self.size, self.version, pinned=not counting, web=self.web)
            return cast(BinaryIO, io.BufferedReader(raw, buffered) if buffered else raw)
        self.require_unchanged()
        return open(self.place, "rb")

    def require_unchanged(self) -> None:
        """Raises a SourceError if a file on disk is missing or has changed since the source was opened."""
        try:
            now = DataFile.local(self.place)
        except OSError as error:
            raise SourceError(f"SOURCE {self.place}: {error.strerror}; the file existed when the run began") from error
        if now != self:
            sizes = f"{self.size} bytes, then {now.size}"
            raise SourceError(f"SOURCE {self.place}: the file was changed while it was being read ({sizes})")


@dataclass(frozen=True)
class Listing:
    """Files below a folder or URL by their names there, with forward slashes, ascending."""

    root: str
    files: dict[str, DataFile]


def relative_name(place: str, root: str) -> str:
    """Returns a file's name below a folder or URL; for files elsewhere, the last part. Resolves links."""
    if is_url(place):
        place, prefix = without_query(place), f"{root.rstrip('/')}/"
        return place.removeprefix(prefix) if place.startswith(prefix) else place.rpartition("/")[2]
    full, base = Path(place).resolve(), Path(root).resolve()
    return full.relative_to(base).as_posix() if full.is_relative_to(base) else full.name


def is_pattern(place: str) -> bool:
    """Returns whether a path or URL has wildcards. Web addresses have none, because their query starts with ``?``."""
    return not is_web(place) and glob.has_magic(place)


def without_query(place: str) -> str:
    """Returns the place; for a web address, without its query."""
    return place.partition("?")[0] if is_web(place) else place


def list_remote(url: str) -> Listing:
    """Lists all objects below a URL in one pass; a SourceError if there are none, or they cannot be listed."""
    found = _asked(url, lambda files, path: files.find(path, detail=True))
    prefix = f"{_path(url)}/"
    names = {name.partition(prefix)[2]: _data_file(url, entry) for name, entry in found.items()}
    if not names:
        raise SourceError(f"SOURCE {url}: no objects below it")
    return Listing(url, dict(sorted(names.items())))


def matching(pattern: str) -> list[DataFile]:
    """Returns the files that match a pattern, or the file of exactly this name; ascending by name.

    An existing local name is taken literally, including brackets. A SourceError if there is none.
    """
    if is_url(pattern):
        files = _remote_matching(pattern)
    else:
        names = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        files = [DataFile.local(name) for name in names if Path(name).is_file()]
    if not files:
        raise SourceError(f"SOURCE {pattern}: no file matches")
    return files


def at_addresses(urls: Sequence[str]) -> list[DataFile]:
    """Looks up objects of one file system by URL, in parallel; a SourceError if one cannot be looked up."""

    def look(files: Any, _: str) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(_THREADS) as threads:
            return list(threads.map(lambda url: files.info(file_system(url)[1]), urls))

    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(_data_file, urls, _asked(urls[0], look)))


def beside(files: Sequence[DataFile], ending: str) -> dict[str, DataFile]:
    """Finds files named like the given ones plus an ending. Returns them by the given file's place."""
    found: dict[str, DataFile] = {}
    # Web servers do not list folders.
    for folder in sorted({parent(file.place) for file in files if file.is_remote and not is_web(file.place)}):
        for entry in _asked(folder, lambda fs, path: fs.ls(path, detail=True)):
            if entry["type"] == "file" and entry["name"].endswith(ending):
                file = _data_file(folder, entry)
                found[file.place.removesuffix(ending)] = file
    for file in files:
        if not file.is_remote and os.path.isfile(f"{file.place}{ending}"):
            found[file.place] = DataFile.local(f"{file.place}{ending}")
    return found


def is_remote_folder(url: str) -> bool:
    """Returns whether a URL is a folder: objects exist below the name, but none has the name itself."""
    return bool(_asked(url, lambda files, path: files.info(path))["type"] == "directory")


def _remote_matching(pattern: str) -> list[DataFile]:
    if not is_pattern(pattern):
        entry = _asked(pattern, lambda files, path: files.info(path))
        return [_data_file(pattern, entry)] if entry["type"] == "file" else []
    found = _asked(pattern, lambda files, path: files.glob(path, detail=True))
    return [_data_file(pattern, entry) for _, entry in sorted(found.items()) if entry["type"] == "file"]


def _asked(url: str, ask: Any) -> Any:
    """Queries the file system of a URL without cached listings."""
    files, path = file_system(url)
    files.invalidate_cache()
    try:
        return attempts(lambda: ask(files, path), (*FINAL, SourceError))
    except FileNotFoundError as error:
        raise SourceError(f"SOURCE {url}: there is no such object") from error
    except FAILED as error:
        raise SourceError(
            f"SOURCE {url}: cannot be listed: {error}. Check the name, endpoint and credentials."
        ) from error


def _data_file(near: str, entry: dict[str, Any]) -> DataFile:
    """Creates the data file of an object in a URL's file system."""
    files, _ = file_system(near)
    if entry.get("size") is None:
        raise SourceError(f"SOURCE {entry['name']}: the server does not report its size; download the file")
    place, size, version = files.unstrip_protocol(entry["name"]), int(entry["size"]), version_of(entry)
    if not is_web(place):
        return DataFile(place, size, version)
    web: WebVersion = _asked(place, lambda files, path: look_up(files, path, size))
    # The version is that of the bytes that are read, if the object was replaced since it was listed.
    return DataFile(place, size, version_of({"ETag": web.etag}) or version, web)


def _path(url: str) -> str:
    path: str = file_system(url)[1]
    return path.rstrip("/")


def parent(place: str) -> str:
    """Returns the folder or URL that contains a file."""
    return without_query(place).rpartition("/")[0] if is_url(place) else str(Path(place).parent)


def version_of(details: Mapping[str, Any]) -> str | None:
    """Returns the store's checksum, else version, of an object by fsspec's details; None if it reports neither."""
    found = next((str(details[name]) for name in _CHECKSUMS if details.get(name)), None)
    return found.strip('"') if found else None


class RemoteStream(io.RawIOBase):
    """Reads ranges of an object. Retries failed requests.

    With ``pinned``, only this version (:func:`version_of`) is read, which takes one more request. On a web server, only
    the version ``web`` is read, without further requests.
    """

    def __init__(self, url: str, size: int, version: str | None, *, pinned: bool = True, web: WebVersion | None = None):
        super().__init__()
        self._url, self._size, self._version, self._pinned, self._web = url, size, version, pinned, web
        self._at = 0
        self._file: Any = None

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def tell(self) -> int:
        """Returns the position in bytes."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Moves the position, without a request, and returns it."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fills the buffer, or less at the end of the object; a SourceError if it has changed, or cannot be read."""
        view = memoryview(buffer).cast("B")
        wanted = max(0, min(len(view), self._size - self._at))
        if not wanted:
            return 0
        where = f"SOURCE {self._url}"
        try:
            data = attempts(lambda: self._fetch(wanted), (*FINAL, Changed, SourceError))
        except (Changed, FileNotFoundError) as error:
            raise SourceError(
                f"{where}: the object was replaced or removed while it was being read ({error}). Restore it, or give "
                "another --out and start over."
            ) from error
        except FAILED as error:
            message = error if isinstance(error, AttemptsFailed) else f"{type(error).__name__}: {error}"
            raise SourceError(
                f"{where}: bytes {self._at} to {self._at + wanted - 1} cannot be read: {message}. Finished work is "
                "kept; run the same command again to continue."
            ) from error
        view[:wanted] = data
        self._at += wanted
        return wanted

    def _fetch(self, wanted: int) -> bytes:
        data: bytes
        try:
            if self._web is not None:
                data = read_range(*file_system(self._url), self._size, self._web, self._at, self._at + wanted)
            elif self._pinned:
                if self._file is None:
                    self._file = self._opened()
                self._file.seek(self._at)
                data = self._file.read(wanted)
            else:
                files, path = file_system(self._url)
                data = files.cat_file(path, start=self._at, end=self._at + wanted)
        except Exception as error:
            self._close_file()
            if type(error).__name__ == "FileExpired":  # s3fs: the ETag differs from that at opening
                raise Changed(str(error)) from error
            raise
        if len(data) != wanted:
            self._close_file()
            raise ConnectionError(f"received {len(data)} of {wanted} bytes")
        return data

    def _opened(self) -> Any:
        files, path = file_system(self._url)
        file = files.open(path, "rb", cache_type="none")
        details = getattr(file, "details", None) or {}
        if version_of(details) is None:
            details = files.info(path)
        found, size = version_of(details), details.get("size")
        if (self._version is not None and found != self._version) or size not in (None, self._size):
            file.close()
            raise Changed(f"version {found}, {size} bytes; it was {self._version}, {self._size} bytes")
        return file

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def close(self) -> None:
        """Closes the stream and its connection."""
        self._close_file()
        super().close()
