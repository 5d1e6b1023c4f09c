"""A bounded local cache of remote shards, shared by all processes of a node and safe against being killed.

A download goes to a temporary name under a lock of its own, is checked for size and sha256, and is renamed. Eviction,
least recently used first, happens under one lock for the folder. A file that is evicted while a process has it open
stays readable for that process, as POSIX promises.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from vlmdata.errors import DatasetFormatError, ResourceError
from vlmdata.format.atomic import temporary_path, temporary_target
from vlmdata.loader.shards import ShardFile

_CHUNK = 8 * 1024 * 1024
_ATTEMPTS = 4
_LOCKS = "locks"


@dataclass(frozen=True)
class RemoteShards:
    """Shards at an fsspec URL, cached in a folder.

    Attributes:
        url: The dataset's URL, such as ``s3://bucket/cord``.
        cache_dir: Folder of the cache.
        cache_bytes: Most bytes the cache holds; one shard more while it comes in.
        lock_timeout: Seconds to wait for another process's download of the same shard.
    """

    url: str
    cache_dir: Path
    cache_bytes: int
    lock_timeout: float = 1800.0

    def local_path(self, shard: ShardFile) -> Path:
        """The cached file, downloaded first if need be.

        Raises:
            DatasetFormatError: If the remote file is missing or is not the one the manifest describes.
            ResourceError: If the cache cannot be written or another process holds its lock too long.
        """
        # Named by content: a dataset made anew under the same URL is never mistaken for the old one.
        path = self.cache_dir / f"{shard.sha256[:32]}.tar"
        try:
            if self._touch(path, shard):
                return path
            locks = self.cache_dir / _LOCKS
            locks.mkdir(parents=True, exist_ok=True)
            with FileLock(locks / path.name, timeout=self.lock_timeout):
                if not self._touch(path, shard):
                    self._make_room(shard.bytes)
                    self._download(shard, path)
            return path
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

    def _touch(self, path: Path, shard: ShardFile) -> bool:
        """Marks a cached file as just used; False if there is none."""
        try:
            if path.stat().st_size != shard.bytes:
                return False
            os.utime(path)
        except FileNotFoundError:
            return False
        return True

    def _download(self, shard: ShardFile, path: Path) -> None:
        problem: Exception | None = None
        for attempt in range(_ATTEMPTS):
            temporary = temporary_path(path)
            try:
                digest = self._copy(shard, temporary)
                if digest == shard.sha256:
                    os.replace(temporary, path)
                    return
                problem = DatasetFormatError(f"sha256 is {digest}, the manifest says {shard.sha256}")
            except FileNotFoundError as error:
                raise DatasetFormatError(f"{self.url}/{shard.name}: no such remote file") from error
            except OSError as error:
                if error.errno is not None and not isinstance(error, ConnectionError | TimeoutError):
                    raise  # a full or read-only disk does not get better by trying again
                problem = error
            except Exception as error:  # each fsspec back end has its own
                problem = error
            finally:
                temporary.unlink(missing_ok=True)
            time.sleep(min(2**attempt, 8) * 0.25)
        raise DatasetFormatError(
            f"{self.url}/{shard.name}: {_ATTEMPTS} downloads failed, the last with {type(problem).__name__}: {problem}"
        )

    def _copy(self, shard: ShardFile, to: Path) -> str:
        import fsspec

        digest = hashlib.sha256()
        remote: Any = fsspec.open(f"{self.url}/{shard.name}", "rb")
        with remote as source, open(to, "wb") as target:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                target.write(chunk)
        return digest.hexdigest()

    def _make_room(self, incoming: int) -> None:
        """Removes the least recently used files until ``incoming`` more bytes fit, and dead processes' leftovers."""
        with FileLock(self.cache_dir / _LOCKS / "evict", timeout=self.lock_timeout):
            files = []
            for entry in os.scandir(self.cache_dir):
                if temporary_target(entry.name) is not None:
                    _remove_if_orphaned(Path(entry.path))
                elif entry.name.endswith(".tar"):
                    try:
                        stat = entry.stat()
                    except FileNotFoundError:
                        continue
                    files.append((stat.st_mtime, stat.st_size, entry.path))
            total = sum(size for _, size, _ in files)
            for _, size, path in sorted(files):
                if total + incoming <= self.cache_bytes:
                    break
                Path(path).unlink(missing_ok=True)
                total -= size


def _remove_if_orphaned(temporary: Path) -> None:
    """Removes what a killed download left. The process id stands in the name: ``.<name>.<pid>.tmp``."""
    pid = temporary.name.split(".")[-2]
    if pid.isdigit() and int(pid) != os.getpid():
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            temporary.unlink(missing_ok=True)
        except PermissionError:  # alive, somebody else's
            return
