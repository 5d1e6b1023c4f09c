"""Places that the user names: folders, and URLs of any file system that fsspec knows."""

from __future__ import annotations

import re
from os import PathLike, fspath

_FILE_URL = re.compile(r"file://(?:localhost)?(?=/)", re.IGNORECASE)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def without_file_scheme(location: str) -> str:
    """The location; a ``file:///…`` URL becomes a path."""
    # Nothing is unquoted: fsspec takes such a URL for the same path.
    return _FILE_URL.sub("", location, count=1)


def place_of(location: str | PathLike[str]) -> str:
    """The location of a dataset, without a slash at its end; a ``file:///…`` URL becomes a path."""
    place = without_file_scheme(fspath(location))
    return place.rstrip("/") or place


def is_url(place: str) -> bool:
    """Whether a place is a URL, not a path."""
    return _URL.match(place) is not None
