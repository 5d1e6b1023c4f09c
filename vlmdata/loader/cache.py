"""A bounded local cache of remote shards, shared by all processes of a node and safe if a process is killed.

A download goes to a temporary name under its own lock, is checked, and is renamed. Eviction, least recently used first,
happens under one lock for the folder. Locks belong to the kernel: a killed process holds none, so a temporary file with
a free lock is an orphan. A reader gets an open file, which stays readable after its name is evicted.
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
        cache_bytes: Largest size of the cache, but at least one shard; current downloads come on top.
        lock_timeout: Seconds to wait for another process's download of the same shard.
    """

    url: str
    cache_dir: Path
    cache_bytes: int
    lock_timeout: float = 1800.0

    def local_path(self, shard: ShardFile) -> Path:
        """Returns the path of the shard in the cache."""
        # Named by content, so a recreated dataset at the same URL is never mistaken for the old one.
        return self.cache_dir / f"{shard.sha256[:32]}.tar"

    def open(self, shard: ShardFile) -> int:
        """Opens the cached file, after downloading it if necessary.

        Raises:
            DatasetFormatError: If the remote file is missing or does not match the manifest.
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
                f"{path}: another process has been downloading this shard for {self.lock_timeout:.0f} s; "
                "if none is, remove the cache folder"
            ) from error
        except OSError as error:
            raise ResourceError(
                f"{self.cache_dir}: cannot cache {self.url}/{shard.name} ({shard.bytes} bytes): {error}. "
                "Free space, or set another cache_dir or a smaller cache_bytes."
            ) from error

    def _fetch(self, shard: ShardFile, path: Path) -> int:
        self._make_room(shard.bytes, path)
        temporary = temporary_path(path)
        try:
            try:
                download(f"{self.url}/{shard.name}", temporary, shard.sha256)
            except FileNotFoundError as error:
                raise DatasetFormatError(f"{self.url}/{shard.name}: no such remote file") from error
            file = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)  # before it has a name that other processes may evict
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        self._make_room(0, path)  # others may have been added meanwhile
        return file

    def _make_room(self, incoming: int, path: Path) -> None:
        """Evicts files until ``incoming`` more bytes fit, and removes orphans.

        Args:
            incoming: Bytes to add.
            path: The file locked by this process, which is not evicted.
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
        """True if no process is downloading this file any more."""
        try:
            with FileLock(self.cache_dir / _LOCKS / target, timeout=0):
                return True
        except Timeout:
            return False


def _open_cached(path: Path, shard: ShardFile) -> int | None:
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
