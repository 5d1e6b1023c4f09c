"""Opens a store from a path or URL."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from vlmdata.locations import is_url, place_of
from vlmdata.storage.base import Store
from vlmdata.storage.folder import Folder


def open_store(place: str | PathLike[str]) -> Store:
    """Returns the store at a folder or the URL of one (``s3://bucket/prefix``), without reading or creating anything.

    Raises:
        UsageError: If writes to such a URL are not atomic.
        SourceError: If no installed package supports such URLs.
    """
    named = place_of(place)
    if is_url(named):
        from vlmdata.storage.objects import Objects  # for URLs only

        return Objects.at(named)
    return Folder(Path(named))
