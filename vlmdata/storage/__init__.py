"""Where datasets lie: local folders and object stores behind one interface, the cache of remote shards, and reading."""

from os import PathLike
from pathlib import Path

from vlmdata.format.writing import Writing
from vlmdata.locations import is_url, place_of
from vlmdata.storage.base import Lock, LockedError, Store
from vlmdata.storage.folder import Folder

__all__ = ["Lock", "LockedError", "Store", "Writing", "open_store"]


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
