"""Getting a media file's bytes out of whatever a row holds: bytes, a data URI, a path, or (if allowed) a URL.

Paths of images and videos begin at the image root, a folder or a URL such as ``s3://bucket/images``.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from vlmdata.errors import SourceError
from vlmdata.locations import is_url, is_web, place_of
from vlmdata.preprocess.recipes.file_kinds import IMAGES, VIDEOS, FileKind
from vlmdata.preprocess.recipes.image_files import RecordedFile, recorded_file, recorded_path
from vlmdata.preprocess.recipes.remote_root import IF_MISSING, FetchProblem, RemoteRoot, require_remote_root
from vlmdata.preprocess.reject import RowRejected, excerpt
from vlmdata.preprocess.sources.kinds import is_image, is_video
from vlmdata.wording import with_article

#: Files that a worker fetches at a time.
_THREADS = 16
_MOST_CHARACTERS = 2048
#: Keys under which a GIF is a video.
_VIDEO_KEYS = ("video", "videos", "video_url")


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
    """Returns the place of a file in its row for messages, with the file or URL that the row names there.

    Args:
        value: As in :meth:`MediaLoader.load`.
        field: Place in the row.
    """
    if isinstance(value, Mapping):
        value = None if value.get("bytes") is not None else value.get("path") or value.get("url")
    return f"{field} ({excerpt(value)})" if isinstance(value, str) and not value.startswith("data:") else field


class MediaLoader:
    """Loads image and video files named by data, within limits.

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
        """Whether files may come over a network."""
        return self._remote is not None or self._allow_urls

    def begin(self, values: Mapping[str, Any]) -> list[Wanted]:
        """Begins to fetch the files that a row seems to name; gives what to :meth:`forget` when it is done."""
        wanted: dict[Wanted, Callable[[], bytes]] = {}
        for kind, text in file_names(values):
            if text.startswith(("http://", "https://")):
                if self._allow_urls:
                    wanted[kind, text] = partial(self._download, text, kind)
            elif self._remote is not None:
                try:
                    name = self._remote.name_of(text, kind)
                except FetchProblem:  # told when the file is asked for
                    continue
                wanted[kind, name] = partial(self._remote.fetch, name, kind)
        return self._ahead.begin(wanted) if wanted else []

    def forget(self, begun: Sequence[Wanted]) -> None:
        """Drops files that were fetched ahead."""
        self._ahead.forget(begun)

    def load(self, value: Any, field: str, kind: FileKind = IMAGES) -> bytes:
        """Returns the file's bytes.

        Args:
            value: bytes, a ``{"bytes", "path"}`` mapping as ``datasets`` stores images, or a string: a data URI, a
                path, a ``file://`` URL, or an http(s) URL.
            field: Place in the row, for messages.
            kind: What the file should be.

        Raises:
            RowRejected: For one of the reasons of the kind.
        """
        if isinstance(value, Mapping):
            if value.get("bytes") is not None:
                value = value["bytes"]
            else:
                value = value.get("path") or value.get("url")
        if isinstance(value, bytes):
            return value
        if not isinstance(value, str) or not value.strip():
            raise RowRejected(kind.missing, f"{field}: not {with_article(kind.name)}: {excerpt(value)}")
        if value.startswith("data:"):
            return _data_uri(value, field, kind)
        if value.startswith(("http://", "https://")):
            return self._fetch(value, field, kind)
        if value.startswith("file://"):
            value = unquote(value.removeprefix("file://"))
        if self._remote is not None:
            return self._read_remote(self._remote, value, field, kind)
        return self._read(value, field, kind)

    def _read(self, path: str, field: str, kind: FileKind) -> bytes:
        if self._of_row is not None and path in self._of_row:
            return self._of_row[path]
        shown = excerpt(path)
        if self._root is None:
            raise RowRejected(kind.path, f"{field}: {shown} is a path; set --image-root to its base folder")
        try:
            # Symbolic links are resolved first: neither `..` nor a link may leave the root.
            full = (self._root / path).resolve(strict=True)
        except (OSError, ValueError, RuntimeError) as error:
            self._note(recorded_path(self._root, path, None), None, None)
            raise RowRejected(
                kind.missing, f"{field}: no file {shown} in the image root: {type(error).__name__}. {IF_MISSING}"
            ) from error
        if not full.is_relative_to(self._root):
            raise RowRejected(kind.path, f"{field}: {shown} is outside the image root")
        size, data = None, None
        try:
            if not full.is_file():
                raise RowRejected(kind.missing, f"{field}: {shown} is not a regular file. {IF_MISSING}")
            if (size := os.path.getsize(full)) > kind.most_bytes:
                raise RowRejected(
                    kind.too_large, f"{field}: {shown} has {size} bytes, over {kind.most_bytes}; {kind.smaller}"
                )
            data = full.read_bytes()
            size = len(data)
            if self._of_row is not None:
                self._of_row[path] = data
            return data
        except OSError as error:
            raise RowRejected(kind.missing, f"{field}: cannot read {shown}: {error.strerror}") from error
        finally:
            self._note(recorded_path(self._root, path, full), size, data)

    def _read_remote(self, root: RemoteRoot, path: str, field: str, kind: FileKind) -> bytes:
        try:
            name = root.name_of(path, kind)
        except FetchProblem as problem:
            raise RowRejected(problem.reason, f"{field}: {problem}") from problem
        named = path.removeprefix(f"{root.url}/")
        try:
            data = self._ahead.get((kind, name), partial(root.fetch, name, kind))
        except FetchProblem as problem:
            if problem.reason in (kind.missing, kind.too_large):
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

    def _fetch(self, url: str, field: str, kind: FileKind) -> bytes:
        if not self._allow_urls:
            raise RowRejected(kind.fetch, f"{field}: {excerpt(url)} is a URL; --allow-urls fetches such {kind.name}s")
        try:
            return self._ahead.get((kind, url), partial(self._download, url, kind))
        except FetchProblem as problem:
            raise RowRejected(problem.reason, f"{field}: {problem}") from problem

    def _download(self, url: str, kind: FileKind) -> bytes:
        from vlmdata.preprocess.recipes.web_images import download

        return download(url, kind, self._private_hosts)


def _data_uri(uri: str, field: str, kind: FileKind) -> bytes:
    header, comma, payload = uri.partition(",")
    if not comma or not header.endswith(";base64"):
        raise RowRejected(kind.wrong, f"{field}: a data URI without ;base64: {excerpt(uri)}")
    try:
        return base64.b64decode("".join(payload.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowRejected(kind.wrong, f"{field}: {excerpt(uri)}: not base64: {error}") from error


#: A file that is fetched ahead: what it should be, and its name.
type Wanted = tuple[FileKind, str]


class Ahead:
    """Fetches that were begun. One per worker; its methods are for one thread."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._begun: dict[Wanted, Future[bytes]] = {}

    def begin(self, wanted: Mapping[Wanted, Callable[[], bytes]]) -> list[Wanted]:
        """Begins fetches; gives those that were not begun before, for :meth:`forget`.

        Args:
            wanted: What fetches each file. Those beyond the ``most_ahead`` of their kind are not begun.
        """
        self._threads = self._threads or ThreadPoolExecutor(_THREADS, thread_name_prefix="media")
        held, new = Counter(kind for kind, _ in self._begun), list[Wanted]()
        for each, fetch in wanted.items():
            if each not in self._begun and held[each[0]] < each[0].most_ahead:
                held[each[0]] += 1
                self._begun[each] = self._threads.submit(fetch)
                new.append(each)
        return new

    def get(self, wanted: Wanted, fetch: Callable[[], bytes]) -> bytes:
        """A file, as it was fetched ahead, or fetched now."""
        begun = self._begun.get(wanted)
        return fetch() if begun is None else begun.result()

    def forget(self, names: Sequence[Wanted]) -> None:
        """Drops files that are no longer needed."""
        for name in names:
            self._begun.pop(name).cancel()


def file_names(row: Any) -> list[Wanted]:
    """Returns the texts in a row that look like paths or URLs of media files, in their order, at most so many."""
    found: dict[Wanted, None] = {}
    held = Counter[FileKind]()
    for text, as_video in _texts(row, as_video=False):
        if len(text) > _MOST_CHARACTERS or (kind := _kind_of(text.partition("?")[0], as_video)) is None:
            continue
        if (kind, text) not in found and held[kind] < kind.most_ahead:
            held[kind] += 1
            found[kind, text] = None
    return list(found)


def _kind_of(name: str, as_video: bool) -> FileKind | None:
    if is_video(name) or (as_video and name.lower().endswith(".gif")):
        return VIDEOS
    return IMAGES if is_image(name) else None


def _texts(value: Any, as_video: bool) -> Iterator[tuple[str, bool]]:
    """Yields the texts in a value, and whether each is in the place of a video."""
    if isinstance(value, str):
        yield value, as_video
    elif isinstance(value, Mapping):
        if not isinstance(value.get("bytes"), bytes):  # a stored file needs no other
            for key, inner in value.items():
                yield from _texts(inner, as_video or key in _VIDEO_KEYS)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner, as_video)
