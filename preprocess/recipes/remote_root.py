"""Media files in a bucket: confined to a root URL and fetched with retries."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote, unquote

from vlmdata.attempts import FAILED, AttemptsFailed, attempts
from vlmdata.errors import SourceError
from vlmdata.locations import file_system, is_web
from vlmdata.preprocess.recipes.file_kinds import IMAGES, FileKind
from vlmdata.preprocess.reject import excerpt
from vlmdata.reasons import Reason

#: Names that fsspec file systems use for the time of an object's last change.
_TIMES = ("LastModified", "last_modified", "mtime", "updated")
#: A path that is still encoded after so many decodings is refused.
_DECODINGS = 4
#: What the user can do about a missing file.
IF_MISSING = "Correct the path, or name the folder that it begins in with --image-root"


class FetchProblem(Exception):
    """A file cannot be fetched.

    Attributes:
        reason: Reason for the ledger.
        size: Size of the file in bytes, if known.
    """

    def __init__(self, reason: Reason, message: str, size: int | None = None):
        super().__init__(message)
        self.reason = reason
        self.size = size


@dataclass(frozen=True)
class RemoteRoot:
    """The root URL of paths in the data."""

    url: str  # the URL, without a trailing slash

    def name_of(self, path: str, kind: FileKind = IMAGES) -> str:
        """Returns a path relative to the root, without ``.`` and ``..``.

        Args:
            path: The path in the row: relative, or a full URL.
            kind: What the file should be.

        Raises:
            FetchProblem: If it is outside the root.
        """
        inside = path.removeprefix(f"{self.url}/") if path.startswith(f"{self.url}/") else path
        name = posixpath.normpath(inside)
        outside = name == ".." or name.startswith(("../", "/")) or "://" in inside or "\0" in name
        if outside or (is_web(self.url) and _climbs(name)):
            raise FetchProblem(kind.path, f"{excerpt(path)} is outside the image root")
        return name

    def _address(self, name: str) -> str:
        """Returns the URL of a name. In a web address, ``?``, ``#`` and ``%`` of the name are quoted."""
        return f"{self.url}/{quote(name, errors='surrogatepass') if is_web(self.url) else name}"

    def fetch(self, name: str, kind: FileKind) -> bytes:
        """Fetches the bytes of an object.

        Raises:
            FetchProblem: If it is missing, too large or not to be had.
        """
        shown, url = excerpt(name), self._address(name)
        try:
            data = attempts(lambda: _read(url, kind.most_bytes))
        except (FileNotFoundError, IsADirectoryError) as error:
            raise FetchProblem(
                kind.missing, f"no file {shown} in the image root: FileNotFoundError. {IF_MISSING}"
            ) from error
        except FAILED as error:
            said = error if isinstance(error, AttemptsFailed) else f"{type(error).__name__}: {error}"
            raise FetchProblem(kind.fetch, f"{excerpt(url)}: {said}") from error
        if len(data) > kind.most_bytes:
            raise FetchProblem(
                kind.too_large, f"{shown} has more than {kind.most_bytes} bytes; {kind.smaller}", len(data)
            )
        return data

    def state(self, path: str) -> tuple[int | None, float | None]:
        """Returns an object's size (None if missing) and last change in seconds (None if the store does not report it).

        Raises:
            SourceError: If the store does not respond.
        """
        url = self._address(self.name_of(path))
        files, place = file_system(url)
        try:
            details: Mapping[str, Any] = attempts(lambda: files.info(place))
        except FileNotFoundError:
            return None, None
        except FAILED as error:
            raise SourceError(f"{url}: cannot be compared with the file in a shard: {error}") from error
        if details["type"] != "file":
            return None, None
        changed = next((details[name] for name in _TIMES if details.get(name)), None)
        seconds = changed.timestamp() if isinstance(changed, datetime) else None
        return int(details["size"]), seconds


def require_remote_root(url: str) -> None:
    """Checks that the URL contains something.

    Raises:
        SourceError: If it is empty, or the store does not respond.
    """
    files, path = file_system(url)
    try:
        found = attempts(lambda: files.isdir(path))
    except FAILED as error:
        raise SourceError(f"--image-root {url}: {error}. Check the name, endpoint and credentials.") from error
    if not found:
        raise SourceError(f"--image-root {url}: nothing found below it; give the base of the image paths in the data")


def _climbs(path: str) -> bool:
    """Returns whether a server that decodes a path, even more than once, may find ``..`` in it."""
    for _ in range(_DECODINGS):
        path = unquote(path)
    return unquote(path) != path or ".." in path.replace("\\", "/").split("/") or "\0" in path


def _read(url: str, most: int) -> bytes:
    files, path = file_system(url)
    try:
        data: bytes = files.cat_file(path, start=0, end=most + 1)
    except FileNotFoundError:
        raise
    except OSError:
        # An empty object has no valid range.
        if files.info(path)["size"] == 0:
            return b""
        raise
    return data
