"""A bounded local cache of remote shards, shared by all processes of a node and safe against being killed.

A download goes to a temporary name under a lock of its own, is checked, and is renamed. Eviction, least recently used
first, happens under one lock for the folder. Locks are the kernel's: a killed process holds none, so a temporary file
whose lock is free is an orphan. A reader gets an open file, which stays readable when its name is evicted.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from vlmdata.errors import DatasetFormatError, ResourceError
from vlmdata.format.atomic import temporary_path, temporary_target
from vlmdata.loader.remote import download
from vlmdata.loader.shards import ShardFile

_LOCKS = "locks"


@dataclass(frozen=True)
class RemoteShards:
    """Shards at an fsspec URL, cached in a folder.

    Attributes:
        url: The dataset's URL, such as ``s3://bucket/cord``.
        cache_dir: Folder of the cache.
        cache_bytes: Most bytes the cache holds, but always room for one shard; those coming in are on top.
        lock_timeout: Seconds to wait for another process's download of the same shard.
    """

    url: str
    cache_dir: Path
    cache_bytes: int
    lock_timeout: float = 1800.0

    def local_path(self, shard: ShardFile) -> Path:
        """Where the shard is cached."""
        # Named by content: a dataset made anew under the same URL is never mistaken for the old one.
        return self.cache_dir / f"{shard.sha256[:32]}.tar"

    def open(self, shard: ShardFile) -> int:
        """Opens the cached file, downloaded first if need be.

        Raises:
            DatasetFormatError: If the remote file is missing or is not the one the manifest describes.
            ResourceError: If the cache cannot be written or another process holds its lock too long.
        """
        path = self.local_path(shard)
        try:
            file = _open_cached(path, shard)
            if file is None:
                locks = self.cache_dir / _LOCKS
                locks.mkdir(parents=True, exist_ok=True)
                with FileLock(locks / path.name, timeout=self.lock_timeout):
                    file = _open_cached(path, shard)
                    if file is None:
                        file = self._fetch(shard, path)
            return file
        except Timeout as error:
            raise ResourceError(
                f"{path}: another process has been fetching this shard for {self.lock_timeout:.0f} s; "
                "if none is, remove the cache folder"
            ) from error
        except OSError as error:
            raise ResourceError(
                f"{self.cache_dir}: cannot cache {self.url}/{shard.name} ({shard.bytes} bytes): {error}. "
                "Make room, or give another cache_dir or a smaller cache_bytes."
            ) from error

    def _fetch(self, shard: ShardFile, path: Path) -> int:
        self._make_room(shard.bytes, path)
        temporary = temporary_path(path)
        try:
            try:
                download(f"{self.url}/{shard.name}", temporary, shard.sha256)
            except FileNotFoundError as error:
                raise DatasetFormatError(f"{self.url}/{shard.name}: no such remote file") from error
            file = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)  # before it has a name that others may evict
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        self._make_room(0, path)  # others may have come in meanwhile
        return file

    def _make_room(self, incoming: int, path: Path) -> None:
        """Evicts files until ``incoming`` more bytes fit, and removes orphans.

        Args:
            incoming: Bytes to come.
            path: The file whose lock this process holds; it is not evicted.
        """
        with FileLock(self.cache_dir / _LOCKS / "evict", timeout=self.lock_timeout):
            files, total = [], 0
            for entry in os.scandir(self.cache_dir):
                target = temporary_target(entry.name)
                if target is not None and (target == path.name or self._is_orphan(target)):
                    Path(entry.path).unlink(missing_ok=True)
                elif target is None and entry.name.endswith(".tar"):
                    stat = entry.stat()
                    total += stat.st_size
                    if entry.name != path.name:
                        files.append((stat.st_mtime_ns, stat.st_size, entry.path))
            for _, size, name in sorted(files):
                if total + incoming <= self.cache_bytes:
                    break
                Path(name).unlink(missing_ok=True)
                total -= size

    def _is_orphan(self, target: str) -> bool:
        """Whether nobody is fetching this file any more."""
        try:
            with FileLock(self.cache_dir / _LOCKS / target, timeout=0):
                return True
        except Timeout:
            return False


def _open_cached(path: Path, shard: ShardFile) -> int | None:
    """Opens a cached file and marks it as just used; None if there is none."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    if os.fstat(file).st_size != shard.bytes:
        os.close(file)
        return None
    with suppress(OSError):  # another user's cache serves as well
        os.utime(file)
    return file
