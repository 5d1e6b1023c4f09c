"""A bounded local cache of remote shards, shared by all processes of a node and safe if a process is killed.

A download goes to a temporary name under its own lock, is checked, flushed to disk, and renamed. Eviction, least
recently used first, happens under one lock for the folder. Locks belong to the kernel: a killed process holds none, so
a temporary file with a free lock is an orphan. A reader gets an open file, which stays readable after its name is
evicted.

The cache is a folder of its own within the one that the user names, and removes only files with names that it gives:
the user's folder may hold anything else.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from vlmdata.errors import DatasetFormatError, ResourceError
from vlmdata.format.atomic import sync, temporary_path, temporary_target
from vlmdata.format.manifest import ShardInfo
from vlmdata.locations import within
from vlmdata.storage.download import download

_log = logging.getLogger("vlmdata.storage.cache")

#: Name of the cache's own folder.
CACHE_FOLDER = "vlmdata-cache"
_LOCKS = "locks"
#: A shard in the cache, as :meth:`RemoteShards.local_path` names it.
_CACHED = re.compile(r"shard-[0-9a-f]{32}\.tar")


def cache_folder(cache_dir: Path | None = None) -> Path:
    """Returns the cache's own folder: in ``cache_dir``, else in ``$VLMDATA_CACHE`` or the user's cache folder."""
    if cache_dir is None:
        if not (named := os.environ.get("VLMDATA_CACHE")):
            from platformdirs import user_cache_path

            named = str(user_cache_path("vlmdata"))
        cache_dir = Path(named)
    return cache_dir / CACHE_FOLDER


@dataclass(frozen=True)
class RemoteShards:
    """Shards at an fsspec URL, cached in a folder."""

    url: str  # of the dataset, such as s3://bucket/cord
    folder: Path  # of the cache; see cache_folder
    cache_bytes: int  # largest size of the cache, but at least one shard; current downloads come on top
    lock_timeout: float = 1800.0  # seconds to wait for another process's download of the same shard

    def local_path(self, shard: ShardInfo) -> Path:
        """Returns the path of the shard in the cache."""
        # Named by content, so a recreated dataset at the same URL is never mistaken for the old one.
        return self.folder / f"shard-{shard.sha256[:32]}.tar"

    def open(self, shard: ShardInfo) -> int:
        """Opens the cached file, after downloading it if necessary.

        Raises:
            DatasetFormatError: If the remote file is missing or does not match the manifest.
            ResourceError: If the cache cannot be written or another process holds its lock too long.
        """
        path = self.local_path(shard)
        with self._explained(shard):
            file = _open_cached(path, shard)
            if file is None:
                with self._locked(path):
                    file = _open_cached(path, shard)
                    if file is None:
                        file = self._fetch(shard, path)
            return file

    def open_sound(self, shard: ShardInfo) -> int:
        """As :meth:`open`, but compares the cached file with the manifest, and downloads a damaged one again."""
        path = self.local_path(shard)
        with self._explained(shard), self._locked(path):
            file = _open_cached(path, shard)
            if file is not None:
                if _has_sha256(file, shard.sha256):
                    return file  # also if another process has just replaced it
                os.close(file)
                _log.warning("%s: the cached copy is damaged. %s/%s is fetched again.", path, self.url, shard.name)
                path.unlink(missing_ok=True)
            return self._fetch(shard, path)

    @contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        """Keeps other processes from writing a file of the cache."""
        locks = self.folder / _LOCKS
        locks.mkdir(parents=True, exist_ok=True)
        with FileLock(locks / path.name, timeout=self.lock_timeout):
            yield

    @contextmanager
    def _explained(self, shard: ShardInfo) -> Iterator[None]:
        """Names file and remedy in errors of the cache."""
        try:
            yield
        except Timeout as error:
            raise ResourceError(
                f"{self.local_path(shard)}: another process has been downloading this shard for "
                f"{self.lock_timeout:.0f} s; if none is, remove the cache folder"
            ) from error
        except OSError as error:
            raise ResourceError(
                f"{self.folder}: cannot cache {self.url}/{shard.name} ({shard.bytes} bytes): {error}. "
                "Free space, or set another cache_dir or a smaller cache_bytes."
            ) from error

    def _fetch(self, shard: ShardInfo, path: Path) -> int:
        self._make_room(shard.bytes, path)
        temporary = temporary_path(path)
        try:
            try:
                download(within(self.url, shard.name), temporary, shard.sha256)
            except FileNotFoundError as error:
                raise DatasetFormatError(f"{self.url}/{shard.name}: no such remote file") from error
            sync(temporary)  # otherwise the name may survive a power cut, and the content not
            file = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)  # before it has a name that other processes may evict
            try:
                os.replace(temporary, path)
                sync(path.parent)
            except OSError:
                os.close(file)
                raise
        finally:
            temporary.unlink(missing_ok=True)
        self._make_room(0, path)  # others may have been added meanwhile
        return file

    def _make_room(self, incoming: int, path: Path) -> None:
        """Evicts files except ``path``, which is locked here, until ``incoming`` more bytes fit. Removes orphans."""
        with FileLock(self.folder / _LOCKS / "evict", timeout=self.lock_timeout):
            files, total = [], 0
            for entry in os.scandir(self.folder):
                target = temporary_target(entry.name)
                if not _CACHED.fullmatch(target or entry.name) or not entry.is_file(follow_symlinks=False):
                    continue  # not a file of this cache
                if target is not None:
                    if target == path.name or self._is_orphan(target):
                        Path(entry.path).unlink(missing_ok=True)
                    continue
                stat = entry.stat(follow_symlinks=False)
                total += stat.st_size
                if entry.name != path.name:
                    files.append((stat.st_mtime_ns, stat.st_size, entry.path))
            for _, size, name in sorted(files):
                if total + incoming <= self.cache_bytes:
                    break
                Path(name).unlink(missing_ok=True)
                total -= size

    def _is_orphan(self, target: str) -> bool:
        """True if no process is downloading this file any more."""
        try:
            with FileLock(self.folder / _LOCKS / target, timeout=0):
                return True
        except Timeout:
            return False


def _open_cached(path: Path, shard: ShardInfo) -> int | None:
    """Opens a cached file and marks it as used; None if it is not cached."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    if os.fstat(file).st_size != shard.bytes:
        os.close(file)
        return None
    with suppress(OSError):  # another user's cache works too
        os.utime(file)
    return file


def _has_sha256(file: int, sha256: str) -> bool:
    """True if an open file has this hash. False if it cannot be read."""
    try:
        with open(file, "rb", closefd=False) as content:
            return hashlib.file_digest(content, "sha256").hexdigest() == sha256
    except OSError:
        return False
