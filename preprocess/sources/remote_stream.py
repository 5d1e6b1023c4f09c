"""A remote object as a stream. Each read is a range request for one version of the object."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from preprocess.sources.web_object import Changed, WebVersion, read_range
from vlmdata.attempts import FAILED, FINAL, AttemptsFailed, attempts
from vlmdata.errors import SourceError
from vlmdata.locations import file_system

#: Names that fsspec file systems use for the checksum or version of an object, best first.
_CHECKSUMS = ("md5Hash", "sha256", "ETag", "etag", "blob_id", "crc32c")


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
