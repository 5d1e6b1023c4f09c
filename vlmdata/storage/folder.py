"""A store in a local folder: renames make writes atomic, and a file lock prevents a second run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from vlmdata.format.atomic import atomic_path, sync, temporary_path, temporary_target, write_atomically
from vlmdata.format.schema import MANIFEST_NAME
from vlmdata.format.stored_names import path_inside
from vlmdata.format.writing import FileWriting, sha256_of
from vlmdata.storage.base import Lock, LockedError, Store


@dataclass(frozen=True)
class Folder(Store):
    """A local folder."""

    directory: Path

    keeps_times = True

    def __str__(self) -> str:
        return str(self.directory)

    def path(self, name: str) -> str:
        """Path of a file."""
        return str(self.directory / name)

    def below(self, folder: str) -> Folder:
        """Returns the store of a folder in this one."""
        return Folder(self.directory / folder)

    def within(self, folder: str) -> Folder:
        """Returns the same, unless the folder is a link that leaves this one."""
        return Folder(path_inside(self.directory, f"{folder}/{MANIFEST_NAME}").parent) if folder else self

    def prepare(self, *folders: str) -> None:
        """Creates the folder and these folders in it."""
        for each in ("", *folders):
            (self.directory / each).mkdir(parents=True, exist_ok=True)

    def listing(self, folder: str = "") -> Mapping[str, int | None]:
        """Returns names -> bytes, None for folders; empty if the folder does not exist."""
        try:
            with os.scandir(self.directory / folder) as entries:
                return {entry.name: None if entry.is_dir() else entry.stat().st_size for entry in entries}
        except FileNotFoundError:
            return {}

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if there is none."""
        path = self.directory / name
        return path.stat().st_size if path.is_file() else None

    def read(self, name: str) -> bytes:
        """Content of a file."""
        return (self.directory / name).read_bytes()

    def read_all(self, names: Iterable[str]) -> Iterator[bytes]:
        """Contents of files, one after another."""
        return map(self.read, names)

    def sha256(self, name: str) -> str:
        """sha256 of a file; empty if there is none."""
        return sha256_of(self.directory / name)

    @contextmanager
    def local(self, *names: str) -> Iterator[Path]:
        """Yields the folder itself."""
        yield self.directory

    def is_link(self, name: str) -> bool:
        """Returns whether a name is that of a link."""
        return (self.directory / name).is_symlink()

    def modified_ns(self, name: str) -> int:
        """Modification time of a file."""
        return (self.directory / name).stat().st_mtime_ns

    def stamp(self, name: str, ns: int) -> None:
        """Sets the modification time of a file."""
        os.utime(self.directory / name, ns=(ns, ns))

    def put(self, name: str, content: bytes) -> None:
        """Writes a file, replacing an existing one."""
        write_atomically(path_inside(self.directory, name), content)

    def create(self, name: str, content: bytes) -> bool:
        """Writes a file unless it exists."""
        path = path_inside(self.directory, name)
        temporary = temporary_path(path)
        try:
            temporary.write_bytes(content)
            sync(temporary)
            os.link(temporary, path)
            sync(path.parent)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        return True

    @contextmanager
    def writing(self, name: str) -> Iterator[FileWriting]:
        """Writes a file under a temporary name, flushes it to disk and renames it, then flushes the folder."""
        with atomic_path(path_inside(self.directory, name)) as temporary:
            file = FileWriting(temporary)
            try:
                yield file
                file.finish()
            finally:
                file.close()

    @contextmanager
    def writing_folder(self, name: str) -> Iterator[Path]:
        """Writes a folder under a temporary name, flushes it to disk and renames it."""
        final = path_inside(self.directory, name)
        partial = temporary_path(final)
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()
            yield partial
            for entry in [*partial.rglob("*"), partial]:
                sync(entry)
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            sync(final.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def move(self, name: str, to: str) -> None:
        """Renames a file."""
        path = path_inside(self.directory, to)
        os.replace(self.directory / name, path)
        sync(path.parent)

    def delete(self, names: Iterable[str]) -> None:
        """Removes files."""
        for name in names:
            path_inside(self.directory, name).unlink(missing_ok=True)

    def delete_folder(self, folder: str, keep: Iterable[str] = ()) -> None:
        """Removes the contents of a folder, and the folder if nothing is kept."""
        kept, path = set(keep), self.within(folder).directory
        if not kept:
            shutil.rmtree(path, ignore_errors=True)
            return
        for name, size in self.listing(folder).items():
            if name not in kept and size is None:
                shutil.rmtree(path / name)
            elif name not in kept:
                (path / name).unlink()

    def tidy(self, *folders: str) -> None:
        """Removes files and folders with temporary names."""
        for folder in ("", *folders):
            path = self.within(folder).directory
            for name, size in self.listing(folder).items():
                if temporary_target(name) is None:
                    continue
                if size is None:
                    shutil.rmtree(path / name, ignore_errors=True)
                else:
                    (path / name).unlink(missing_ok=True)

    def final_name(self, name: str) -> str:
        """Returns the final name of a file with a temporary name; other names unchanged."""
        return temporary_target(name) or name

    def is_locked(self, name: str) -> bool:
        """Returns whether a process has the lock."""
        if not (self.directory / name).exists():
            return False
        try:
            with FileLock(self.directory / name, timeout=0):
                return False
        except Timeout:
            return True

    @contextmanager
    def lock(self, name: str) -> Iterator[Lock]:
        """Takes a kernel lock, which ends with the process, even if it is killed."""
        lock = FileLock(path_inside(self.directory, name))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise LockedError from None
        try:
            yield _KernelLock(self)
        finally:
            lock.release()


@dataclass(frozen=True)
class _KernelLock:
    """A kernel lock, which cannot be taken over."""

    store: Folder

    def check(self) -> None:
        """Does nothing."""

    def commit(self, name: str, content: bytes) -> None:
        """Writes a file."""
        self.store.put(name, content)
