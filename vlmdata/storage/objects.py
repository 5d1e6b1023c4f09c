"""A store in an object store. An object appears, complete, when its upload is completed.

A thread uploads files of any size in parts while they are written. Neither the disk nor the memory of this machine
holds more than a few parts. An incomplete upload leaves no object, however the process ends.
"""

from __future__ import annotations

import hashlib
import posixpath
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vlmdata.errors import ResourceError, UsageError
from vlmdata.format.stored_names import path_inside
from vlmdata.locations import file_system, within
from vlmdata.storage.base import Lock, Store
from vlmdata.storage.lease import StoreLease
from vlmdata.storage.upload import Upload, told

#: Stores in which a put or a completed upload replaces an object in one step.
ATOMIC = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
#: Bytes read at a time of a large object.
_READ_BYTES = 16 * 1024 * 1024
#: Number of small objects read or removed in parallel.
_AT_ONCE = 32
#: A folder within a temporary one: shards of earlier versions are named by ``../../``.
_AS_DEEP = "versions/N"
#: Characters that fsspec interprets as patterns.
_PATTERNS = frozenset("*?[]")


@dataclass(frozen=True)
class Objects(Store):
    """A folder (a prefix) in an object store; its URL has no slash at its end."""

    url: str

    keeps_times = False

    @classmethod
    def at(cls, url: str) -> Objects:
        """Returns the store at a URL.

        Raises:
            UsageError: If writes to such a URL are not atomic.
            SourceError: If no installed package supports such URLs.
        """
        scheme = url.partition("://")[0].lower()
        if scheme not in ATOMIC:
            raise UsageError(
                f"{url}: datasets are made in local folders and in object stores ({', '.join(ATOMIC)}), where a file "
                f"appears whole or not at all; {scheme}:// does not promise that. Give a local folder and copy it."
            )
        if found := _PATTERNS.intersection(url):
            raise UsageError(f"{url}: no dataset can be made at a URL with {' '.join(sorted(found))}")
        file_system(url)
        return cls(url)

    def __str__(self) -> str:
        return self.url

    def path(self, name: str) -> str:
        """URL of an object."""
        return within(self.url, name)

    def below(self, folder: str) -> Objects:
        """Returns the store of a folder in this one."""
        return Objects(self.path(folder))

    def listing(self, folder: str = "") -> Mapping[str, int | None]:
        """Returns names -> bytes, None for folders."""
        with self._at(folder, "listed") as (files, path):
            try:
                entries = files.ls(path, detail=True)
            except FileNotFoundError:
                return {}
            finally:  # a listing that is kept would deny what other processes write from now on
                files.invalidate_cache(path)
        found = {}
        for entry in entries:
            name = entry["name"].rstrip("/").removeprefix(f"{path}/")
            if name and "/" not in name and name != path:
                found[name] = None if entry["type"] == "directory" else int(entry["size"])
        return found

    def size(self, name: str) -> int | None:
        """Bytes of an object; None if there is none."""
        with self._at(name, "read") as (files, path):
            try:
                info = files.info(path)
            except FileNotFoundError:
                return None
        return None if info["type"] == "directory" else int(info["size"])

    def read(self, name: str) -> bytes:
        """Content of an object."""
        with self._at(name, "read") as (files, path):
            content: bytes = files.cat_file(path)
            return content

    def read_all(self, names: Iterable[str]) -> Iterator[bytes]:
        """Contents of objects, in this order."""
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="vlmdata-read") as pool:
            waiting: deque[Future[bytes]] = deque()
            for name in names:
                waiting.append(pool.submit(self.read, name))
                if len(waiting) > 2 * _AT_ONCE:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def sha256(self, name: str) -> str:
        """sha256 of an object; empty if there is none."""
        digest = hashlib.sha256()
        try:
            for chunk in self._chunks(name):
                digest.update(chunk)
        except FileNotFoundError:
            return ""
        return digest.hexdigest()

    def _chunks(self, name: str) -> Iterator[bytes]:
        with self._at(name, "read") as (files, path), files.open(path, "rb", block_size=_READ_BYTES) as file:
            while content := file.read(_READ_BYTES):
                yield content

    @contextmanager
    def local(self, *names: str) -> Iterator[Path]:
        """Yields a temporary folder with copies of objects."""
        with TemporaryDirectory(prefix="vlmdata-") as whole:
            folder = Path(whole) / _AS_DEEP
            folder.mkdir(parents=True)
            for name in names:
                target = path_inside(Path(whole), posixpath.normpath(f"{_AS_DEEP}/{name}"))
                target.parent.mkdir(parents=True, exist_ok=True)
                with self._at(name, "read") as (files, path):
                    try:
                        files.get_file(path, str(target))
                    except FileNotFoundError:
                        target.unlink(missing_ok=True)
            yield folder

    def modified_ns(self, name: str) -> int:
        """Returns when an object was written, by the store's clock, to the second."""
        with self._at(name, "read") as (files, path):
            return int(files.modified(path).timestamp()) * 10**9

    def put(self, name: str, content: bytes) -> None:
        """Writes an object, replacing an existing one."""
        with self._at(name, "written") as (files, path):
            files.pipe_file(path, content)

    def create(self, name: str, content: bytes) -> bool:
        """Writes an object unless it exists, by a conditional put."""
        with self._at(name, "written") as (files, path):
            try:
                files.pipe_file(path, content, mode="create")
            except OSError as error:
                if not _exists_already(error):
                    raise
                # If the response to a put is lost, the retry finds the object that the put wrote.
                return self.size(name) == len(content) and self.read(name) == content
        return True

    @contextmanager
    def writing(self, name: str) -> Iterator[Upload]:
        """Uploads an object in parts while it is written; it appears when the upload is completed."""
        with self._at(name, "written") as (files, path):
            upload = Upload(files, path, self.path(name))
        try:
            yield upload
            try:
                upload.complete()
            except (ResourceError, FileNotFoundError):
                # If the response to a completion is lost, the retry no longer finds the upload. The object's size does
                # not tell: an older object of this name may have it, too.
                if self.size(name) != upload.tell() or not upload.is_stored_in(self._chunks(name)):
                    raise
        finally:
            upload.abandon()

    @contextmanager
    def writing_folder(self, name: str) -> Iterator[Path]:
        """Yields a temporary folder; uploads its files."""
        with TemporaryDirectory(prefix="vlmdata-") as folder:
            yield Path(folder)
            paths = [path for path in Path(folder).rglob("*") if path.is_file() and not path.is_symlink()]
            new = {path.relative_to(folder).as_posix(): path for path in paths}
            self.delete_folder(name, keep=new)
            for each, path in sorted(new.items()):
                self.put(f"{name}/{each}", path.read_bytes())

    def move(self, name: str, to: str) -> None:
        """Copies an object within the store and removes it."""
        self.copy(name, to)
        self.delete([name])

    def copy(self, name: str, to: str) -> None:
        """Copies an object within the store, in one step."""
        with self._at(to, "written") as (files, path):
            files.cp_file(self._path(name), path)

    def delete(self, names: Iterable[str]) -> None:
        """Removes objects."""
        paths = [self._path(name) for name in names]
        if not paths:
            return
        files, _ = file_system(self.url)
        with told(self.url, "written"):
            if _is_s3(files):
                files.rm(paths)  # a thousand per request
                return

            def remove(path: str) -> None:
                with suppress(FileNotFoundError):
                    files.rm_file(path)

            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(remove, paths))

    def delete_folder(self, folder: str, keep: Iterable[str] = ()) -> None:
        """Removes all objects in a folder except those to keep."""
        with self._at(folder, "listed") as (files, path):
            found = [each.removeprefix(f"{path}/") for each in files.find(path)]
        kept = tuple(keep)
        gone = [each for each in found if not any(each == name or each.startswith(f"{name}/") for name in kept)]
        self.delete(f"{folder}/{each}" if folder else each for each in gone)

    def tidy(self, *folders: str) -> None:
        """Aborts uploads of killed processes. They leave no object, but the store would keep and bill their parts."""
        files, _ = file_system(self.url)
        if not _is_s3(files):
            return  # the other stores remove them after a week
        bucket, key, _ = files.split_path(self._path(""))
        for folder in ("", *folders):
            prefix = "".join(f"{part}/" for part in (key, folder) if part)
            # Permission to list uploads is often missing.
            with suppress(OSError, ResourceError), told(self.path(folder), "listed"):
                found = files.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix)
                for each in found.get("Uploads", ()):
                    if "/" in each["Key"].removeprefix(prefix):
                        continue  # of another dataset, in a folder below
                    with suppress(FileNotFoundError):
                        files.call_s3(
                            "abort_multipart_upload", Bucket=bucket, Key=each["Key"], UploadId=each["UploadId"]
                        )

    def is_locked(self, name: str) -> bool:
        """Whether a process renews the lock object, or may."""
        return StoreLease(self, name).is_locked()

    def lock(self, name: str) -> AbstractContextManager[Lock]:
        """Locks the store with a renewed lock object; see :mod:`vlmdata.storage.lease`."""
        return StoreLease(self, name).acquired()

    def _path(self, name: str) -> str:
        """Returns the path of a name in the file system."""
        root = file_system(self.url)[1].rstrip("/")
        return within(root, name) if root else name

    @contextmanager
    def _at(self, name: str, what: str) -> Iterator[tuple[Any, str]]:
        """Yields the file system, without a kept listing, and a path in it; errors say what cannot be done."""
        files, path = file_system(self.url)[0], self._path(name)
        with told(self.path(name), what):
            files.invalidate_cache(path)
            yield files, path


def _is_s3(files: Any) -> bool:
    return "s3" in files.protocol


def _exists_already(error: OSError) -> bool:
    """Returns whether a conditional put failed because the object exists (HTTP 412) or is being written (409)."""
    told = f"{error} {error.__cause__}"
    return isinstance(error, FileExistsError) or any(
        word in told for word in ("PreconditionFailed", "pre-conditions", "ConditionalRequestConflict")
    )
