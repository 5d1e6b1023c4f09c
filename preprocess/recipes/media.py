"""Getting an image file's bytes out of whatever a row holds: bytes, a data URI, a path, or (if allowed) a URL.

Paths begin at the image root, a folder or a URL such as ``s3://bucket/images``.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from preprocess.recipes.image_files import RecordedFile, recorded_file, recorded_path
from preprocess.recipes.remote_root import MAX_FILE_BYTES, FetchProblem, RemoteRoot, require_remote_root
from preprocess.reject import RowRejected, excerpt
from preprocess.sources.kinds import is_image
from vlmdata.errors import SourceError
from vlmdata.locations import is_url, is_web, place_of
from vlmdata.reasons import Reason

#: Images that a worker fetches at a time.
_THREADS = 16
#: Images that are fetched ahead, or wait to be asked for, at a time; others are fetched when they are asked for.
_MOST_IMAGES = 64
_MOST_CHARACTERS = 2048


def require_image_root(image_root: str | None) -> None:
    """Checks that the folder or URL the user named is there, before work is paid for.

    Raises:
        SourceError: If it does not exist or is not a folder.
    """
    if image_root is not None and is_url(place_of(image_root)):
        require_remote_root(place_of(image_root))
    elif image_root is not None and not Path(image_root).is_dir():
        found = "is not a folder" if Path(image_root).exists() else "does not exist"
        raise SourceError(f"--image-root {image_root}: it {found}; give the base folder of the image paths in the data")


def place_with_file(value: Any, field: str) -> str:
    """Returns the place of an image in its row for messages, with the file or URL that the row names there.

    Args:
        value: As in :meth:`MediaLoader.load`.
        field: Place in the row.
    """
    if isinstance(value, Mapping):
        value = None if value.get("bytes") is not None else value.get("path") or value.get("url")
    return f"{field} ({excerpt(value)})" if isinstance(value, str) and not value.startswith("data:") else field


class MediaLoader:
    """Loads image files named by data, within limits.

    Its messages contain no paths of this machine, so the ledger is equal for every copy of a source.

    Args:
        image_root: Folder or URL that paths are relative to and may not leave; None allows no paths.
        allow_urls: Whether http(s) URLs are fetched.
        private_hosts: Hosts in private networks that URLs may name, in addition to that of ``image_root``.
    """

    def __init__(self, image_root: str | None, allow_urls: bool, private_hosts: Sequence[str] = ()):
        place = None if image_root is None else place_of(image_root)
        self._remote = RemoteRoot(place) if place is not None and is_url(place) else None
        self._root = Path(image_root).resolve() if image_root is not None and self._remote is None else None
        self._allow_urls = allow_urls
        named = [urlsplit(place).netloc.rpartition("@")[2]] if place is not None and is_web(place) else []
        self._private_hosts = (*private_hosts, *named)
        self._ahead = Ahead()
        self._of_row: dict[str, bytes] | None = None
        self._files: dict[str, RecordedFile] | None = None

    @contextmanager
    def row(self) -> Iterator[Mapping[str, RecordedFile]]:
        """Yields the files that a row names, by path, as they are read; each is read once.

        So many references to a file take no more memory than one.
        """
        files: dict[str, RecordedFile] = {}
        self._of_row, self._files = {}, files
        try:
            yield files
        finally:
            self._of_row = self._files = None

    @property
    def is_remote(self) -> bool:
        """Whether images may come over a network."""
        return self._remote is not None or self._allow_urls

    def begin(self, values: Mapping[str, Any]) -> list[str]:
        """Begins to fetch the images that a row seems to name; gives what to :meth:`forget` when it is done."""
        wanted: dict[str, Callable[[], bytes]] = {}
        for text in image_names(values):
            if text.startswith(("http://", "https://")):
                if self._allow_urls:
                    wanted[text] = partial(self._download, text)
            elif self._remote is not None:
                try:
                    name = self._remote.name_of(text)
                except FetchProblem:  # told when the image is asked for
                    continue
                wanted[name] = partial(self._remote.fetch, name)
        return self._ahead.begin(wanted) if wanted else []

    def forget(self, begun: Sequence[str]) -> None:
        """Drops images that were fetched ahead."""
        self._ahead.forget(begun)

    def load(self, value: Any, field: str) -> bytes:
        """Returns the file's bytes.

        Args:
            value: bytes, a ``{"bytes", "path"}`` mapping as ``datasets`` stores images, or a string: a data URI, a
                path, a ``file://`` URL, or an http(s) URL.
            field: Place in the row, for messages.

        Raises:
            RowRejected: MISSING_IMAGE, IMAGE_PATH, IMAGE_FETCH or NOT_AN_IMAGE.
        """
        if isinstance(value, Mapping):
            if value.get("bytes") is not None:
                value = value["bytes"]
            else:
                value = value.get("path") or value.get("url")
        if isinstance(value, bytes):
            return value
        if not isinstance(value, str) or not value.strip():
            raise RowRejected(Reason.MISSING_IMAGE, f"{field}: not an image: {excerpt(value)}")
        if value.startswith("data:"):
            return _data_uri(value, field)
        if value.startswith(("http://", "https://")):
            return self._fetch(value, field)
        if value.startswith("file://"):
            value = unquote(value.removeprefix("file://"))
        return self._read(value, field) if self._remote is None else self._read_remote(self._remote, value, field)

    def _read(self, path: str, field: str) -> bytes:
        if self._of_row is not None and path in self._of_row:
            return self._of_row[path]
        shown = excerpt(path)
        if self._root is None:
            raise RowRejected(Reason.IMAGE_PATH, f"{field}: {shown} is a path; set --image-root to its base folder")
        try:
            # Symbolic links are resolved first: neither `..` nor a link may leave the root.
            full = (self._root / path).resolve(strict=True)
        except (OSError, ValueError, RuntimeError) as error:
            self._note(recorded_path(self._root, path, None), None, None)
            raise RowRejected(
                Reason.MISSING_IMAGE, f"{field}: no file {shown} in the image root: {type(error).__name__}"
            ) from error
        if not full.is_relative_to(self._root):
            raise RowRejected(Reason.IMAGE_PATH, f"{field}: {shown} is outside the image root")
        size, data = None, None
        try:
            if not full.is_file():
                raise RowRejected(Reason.MISSING_IMAGE, f"{field}: {shown} is not a regular file")
            if (size := os.path.getsize(full)) > MAX_FILE_BYTES:
                raise RowRejected(Reason.IMAGE_TOO_LARGE, f"{field}: {shown} has {size} bytes, over {MAX_FILE_BYTES}")
            data = full.read_bytes()
            size = len(data)
            if self._of_row is not None:
                self._of_row[path] = data
            return data
        except OSError as error:
            raise RowRejected(Reason.MISSING_IMAGE, f"{field}: cannot read {shown}: {error.strerror}") from error
        finally:
            self._note(recorded_path(self._root, path, full), size, data)

    def _read_remote(self, root: RemoteRoot, path: str, field: str) -> bytes:
        try:
            name = root.name_of(path)
        except FetchProblem as problem:
            raise RowRejected(problem.reason, f"{field}: {problem}") from problem
        named = path.removeprefix(f"{root.url}/")
        try:
            data = self._ahead.get(name, partial(root.fetch, name))
        except FetchProblem as problem:
            if problem.reason in (Reason.MISSING_IMAGE, Reason.IMAGE_TOO_LARGE):
                self._note(named, problem.size, None)
            # As of a file on disk, the ledger tells the path as the row has it.
            said = str(problem).replace(excerpt(name), excerpt(named), 1)
            raise RowRejected(problem.reason, f"{field}: {said}") from problem
        self._note(named, len(data), data)
        return data

    def _note(self, path: str, size: int | None, data: bytes | None) -> None:
        if self._files is not None:
            file = recorded_file(path, size, data)
            self._files[file.path] = file

    def _fetch(self, url: str, field: str) -> bytes:
        if not self._allow_urls:
            raise RowRejected(Reason.IMAGE_FETCH, f"{field}: {excerpt(url)} is a URL; --allow-urls fetches such images")
        try:
            return self._ahead.get(url, partial(self._download, url))
        except FetchProblem as problem:
            raise RowRejected(problem.reason, f"{field}: {problem}") from problem

    def _download(self, url: str) -> bytes:
        from preprocess.recipes.web_images import download

        return download(url, self._private_hosts)


def _data_uri(uri: str, field: str) -> bytes:
    header, comma, payload = uri.partition(",")
    if not comma or not header.endswith(";base64"):
        raise RowRejected(Reason.NOT_AN_IMAGE, f"{field}: a data URI without ;base64: {excerpt(uri)}")
    try:
        return base64.b64decode("".join(payload.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowRejected(Reason.NOT_AN_IMAGE, f"{field}: {excerpt(uri)}: not base64: {error}") from error


class Ahead:
    """Fetches that were begun. One per worker; its methods are for one thread."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._begun: dict[str, Future[bytes]] = {}

    def begin(self, wanted: Mapping[str, Callable[[], bytes]]) -> list[str]:
        """Begins fetches; gives those that were not begun before, for :meth:`forget`.

        Args:
            wanted: What fetches each image, by its name.
        """
        self._threads = self._threads or ThreadPoolExecutor(_THREADS, thread_name_prefix="images")
        missing = [name for name in wanted if name not in self._begun][: _MOST_IMAGES - len(self._begun)]
        new = {name: self._threads.submit(wanted[name]) for name in missing}
        self._begun |= new
        return list(new)

    def get(self, name: str, fetch: Callable[[], bytes]) -> bytes:
        """An image, as it was fetched ahead, or fetched now."""
        begun = self._begun.get(name)
        return fetch() if begun is None else begun.result()

    def forget(self, names: Sequence[str]) -> None:
        """Drops images that are no longer needed."""
        for name in names:
            self._begun.pop(name).cancel()


def image_names(value: Any) -> list[str]:
    """Texts in a row that look like paths or URLs of images, in their order; at most so many."""
    found: dict[str, None] = {}
    for text in _texts(value):
        if len(text) <= _MOST_CHARACTERS and is_image(text.partition("?")[0]):
            found[text] = None
        if len(found) == _MOST_IMAGES:
            break
    return list(found)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        if not isinstance(value.get("bytes"), bytes):  # a stored image needs no file
            for inner in value.values():
                yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
