"""A store in an object store. An object appears, complete, when its upload is completed.

A thread uploads files of any size in parts while they are written. Neither the disk nor the memory of this machine
holds more than a few parts. An incomplete upload leaves no object, however the process ends.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vlmdata.errors import ResourceError, UsageError
from vlmdata.locations import file_system
from vlmdata.storage.base import Lock
from vlmdata.storage.lease import Lease
from vlmdata.storage.upload import Upload, told

#: Stores in which a put or a completed upload replaces an object in one step.
ATOMIC = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
#: Bytes read at a time of a large object.
_READ_BYTES = 16 * 1024 * 1024
#: Number of small objects read or removed in parallel.
_AT_ONCE = 32
#: Characters that fsspec interprets as patterns.
_PATTERNS = frozenset("*?[]")


@dataclass(frozen=True)
class Objects:
    """A folder (a prefix) in an object store.

    Attributes:
        url: Its URL, without a slash at its end.
    """

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

    @property
    def place(self) -> str:
        """The URL."""
        return self.url

    def path(self, name: str) -> str:
        """URL of an object."""
        return f"{self.url}/{name}"

    def below(self, folder: str) -> Objects:
        """Returns the store of a folder in this one."""
        return Objects(self.path(folder))

    def prepare(self, *folders: str) -> None:
        """Does nothing: folders are only parts of names."""

    def listing(self, folder: str = "") -> Mapping[str, int | None]:
        """Returns names -> bytes, None for folders."""
        files, path = self._at(folder)
        with told(self.path(folder), "listed"):
            files.invalidate_cache(path)
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
        files, path = self._at(name)
        with told(self.path(name), "read"):
            files.invalidate_cache(path)
            try:
                info = files.info(path)
            except FileNotFoundError:
                return None
        return None if info["type"] == "directory" else int(info["size"])

    def read(self, name: str) -> bytes:
        """Content of an object."""
        files, path = self._at(name)
        with told(self.path(name), "read"):
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
        files, path = self._at(name)
        with told(self.path(name), "read"):
            files.invalidate_cache(path)
            with files.open(path, "rb", block_size=_READ_BYTES) as file:
                while content := file.read(_READ_BYTES):
                    yield content

    @contextmanager
    def local(self, *names: str) -> Iterator[Path]:
        """Yields a temporary folder with copies of objects."""
        with TemporaryDirectory(prefix="vlmdata-") as folder:
            for name in names:
                files, path = self._at(name)
                target = Path(folder) / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with told(self.path(name), "read"):
                    try:
                        files.get_file(path, str(target))
                    except FileNotFoundError:
                        target.unlink(missing_ok=True)
            yield Path(folder)

    def modified_ns(self, name: str) -> int:
        """Returns when an object was written, by the store's clock, to the second."""
        files, path = self._at(name)
        with told(self.path(name), "read"):
            files.invalidate_cache(path)
            return int(files.modified(path).timestamp()) * 10**9

    def stamp(self, name: str, ns: int) -> None:
        """Does nothing: an object's time cannot be set."""

    def put(self, name: str, content: bytes) -> None:
        """Writes an object, replacing an existing one."""
        files, path = self._at(name)
        with told(self.path(name), "written"):
            files.pipe_file(path, content)

    def create(self, name: str, content: bytes) -> bool:
        """Writes an object unless it exists, by a conditional put."""
        files, path = self._at(name)
        with told(self.path(name), "written"):
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
        files, path = self._at(name)
        with told(self.path(name), "written"):
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
            new = {path.relative_to(folder).as_posix(): path for path in Path(folder).rglob("*") if path.is_file()}
            self.delete_folder(name, keep=new)
            for each, path in sorted(new.items()):
                self.put(f"{name}/{each}", path.read_bytes())

    def move(self, name: str, to: str) -> None:
        """Copies an object within the store and removes it."""
        self.copy(name, to)
        self.delete([name])

    def copy(self, name: str, to: str) -> None:
        """Copies an object within the store, in one step."""
        files, path = self._at(name)
        with told(self.path(to), "written"):
            files.cp_file(path, self._at(to)[1])

    def delete(self, names: Iterable[str]) -> None:
        """Removes objects."""
        files, _ = self._at("")
        paths = [self._at(name)[1] for name in names]
        if not paths:
            return
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
        files, path = self._at(folder)
        with told(self.path(folder), "listed"):
            files.invalidate_cache(path)
            found = [each.removeprefix(f"{path}/") for each in files.find(path)]
        kept = tuple(keep)
        gone = [each for each in found if not any(each == name or each.startswith(f"{name}/") for name in kept)]
        self.delete(f"{folder}/{each}" if folder else each for each in gone)

    def tidy(self, *folders: str) -> None:
        """Aborts uploads of killed processes. They leave no object, but the store would keep and bill their parts."""
        files, path = self._at("")
        if not _is_s3(files):
            return  # the other stores remove them after a week
        bucket, key, _ = files.split_path(path)
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

    def final_name(self, name: str) -> str:
        """Returns the name itself: an object that is being written is not listed."""
        return name

    def is_locked(self, name: str) -> bool:
        """Whether a process renews the lock object, or may."""
        return Lease(self, name).is_locked()

    @contextmanager
    def lock(self, name: str) -> Iterator[Lock]:
        """Locks the store with a renewed lock object; see :mod:`vlmdata.storage.lease`."""
        with Lease(self, name).acquired() as lock:
            yield lock

    def _at(self, name: str) -> tuple[Any, str]:
        """Returns the file system and the path of a name in it."""
        files, root = file_system(self.url)
        return files, f"{root.rstrip('/')}/{name}" if name else root.rstrip("/")


def _is_s3(files: Any) -> bool:
    return "s3" in files.protocol


def _exists_already(error: OSError) -> bool:
    """Returns whether a conditional put failed because the object exists (HTTP 412) or is being written (409)."""
    told = f"{error} {error.__cause__}"
    return isinstance(error, FileExistsError) or any(
        word in told for word in ("PreconditionFailed", "pre-conditions", "ConditionalRequestConflict")
    )
