"""Places that the user names: folders, and URLs of any file system that fsspec knows.

Credentials and endpoints come from where each store's own tools find them (``AWS_*``,
``GOOGLE_APPLICATION_CREDENTIALS``, ``AZURE_STORAGE_*``, ``HF_TOKEN``) or from fsspec's configuration
(``FSSPEC_S3='{"endpoint_url": …}'``, ``~/.config/fsspec``). So they are on no command line and in no manifest, and
worker processes have them, too.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from os import PathLike, fspath
from typing import Any

from vlmdata.errors import SourceError, UsageError

_FILE_URL = re.compile(r"file://(?:localhost)?(?=/)", re.IGNORECASE)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_WEB = re.compile(r"https?://", re.IGNORECASE)
_AUTHORITY = re.compile(r"[^/]*//[^/]*")
#: What must be installed to read a kind of URL.
_EXTRAS = {
    **dict.fromkeys(("s3", "s3a"), "vlmdata[s3]"),
    **dict.fromkeys(("gs", "gcs"), "vlmdata[gs]"),
    **dict.fromkeys(("az", "abfs", "abfss"), "vlmdata[az]"),
    **dict.fromkeys(("http", "https"), "vlmdata[http]"),
}


def without_file_scheme(location: str) -> str:
    """Returns the location. A ``file:///…`` URL becomes a path."""
    # Nothing is unquoted, because fsspec maps such a URL to the same path.
    return _FILE_URL.sub("", location, count=1)


def place_of(location: str | PathLike[str]) -> str:
    """Returns the location of a dataset without a trailing slash. A ``file:///…`` URL becomes a path.

    Raises:
        UsageError: If it is empty, as ``"$OUT"`` is without that variable.
    """
    if not (place := without_file_scheme(fspath(location))):
        raise UsageError('a folder or URL is empty, like "$OUT" if OUT is not set; "." is the current folder')
    return place.rstrip("/") or place


def within(folder: str, name: str) -> str:
    """Returns the path or URL of a file or folder by its name in a folder, without a slash at its end.

    Each ``../`` that begins the name leaves a folder.
    """
    name = name.rstrip("/")
    while name == ".." or name.startswith("../"):
        folder, name = folder.rpartition("/")[0], name[3:]
    return f"{folder}/{name}" if name else folder


def is_url(place: str) -> bool:
    """True if a place is a URL, not a path."""
    return _URL.match(place) is not None


def is_web(place: str) -> bool:
    """True if a place is a web address, ``http://`` or ``https://``."""
    return _WEB.match(place) is not None


def file_system(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, one for all threads of this process, and the URL's path there.

    Raises:
        SourceError: If no installed package reads such URLs.
    """
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()  # as in RFC 3986; fsspec knows lower case only
    url = f"{scheme}://{rest}"
    try:
        files = _instance(url[: _AUTHORITY.match(url).end()], os.getpid())  # type: ignore[union-attr]
    except (ImportError, ValueError) as error:
        remedy = f"pip install '{_EXTRAS[scheme]}'" if scheme in _EXTRAS else "these are known: " + ", ".join(_EXTRAS)
        raise SourceError(f"{url}: {scheme}:// cannot be opened here ({error}); {remedy}") from error
    return files, files._strip_protocol(url)


@lru_cache(maxsize=256)
def _instance(authority: str, process: int) -> Any:
    """A file system.

    fsspec's own cache has one for each thread, with connections and listings of its own.
    """
    import fsspec

    return fsspec.url_to_fs(authority)[0]


def forget_file_systems() -> None:
    """Makes :func:`file_system` look at the environment again."""
    _instance.cache_clear()
