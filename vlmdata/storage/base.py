"""The store interface: files that are written atomically, and a lock against a second run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from vlmdata.format.writing import Writing


class LockedError(Exception):
    """Another process has locked the store.

    Attributes:
        holder: Short description of that process; empty if unknown.
    """

    def __init__(self, holder: str = ""):
        super().__init__(holder)
        self.holder = holder


class Lock(Protocol):
    """The lock of a store."""

    def check(self) -> None:
        """Checks that this process still has the lock.

        Raises:
            LockedError: If another run took it over because this process was suspended, or could not reach the
                store, for too long.
            ResourceError: If that cannot be found out.
        """

    def commit(self, name: str, content: bytes) -> None:
        """Writes the small file that completes a dataset, while this process still has the lock.

        Raises:
            LockedError: If another run took it over. The file is not written.
        """


class Store(Protocol):
    """A place for the files of a dataset. Small and picklable: every worker has a copy.

    Names are relative to the place, with ``/`` between folders. ``str(store)`` is the place as the user named it.
    A file is complete and durable when the call that writes it returns. Until then its name leads to the previous
    content.

    A failed operation raises OSError (folder) or ResourceError (object store) with the name of the file.
    """

    @property
    def keeps_times(self) -> bool:
        """Whether :meth:`stamp` has an effect."""

    def path(self, name: str) -> str:
        """Returns the full path or URL of a file."""

    def below(self, folder: str) -> Store:
        """Returns the store of a folder in this one."""

    def within(self, folder: str) -> Store:
        """Returns the same for a folder that a dataset's files name.

        Raises:
            DatasetFormatError: If it is a link that leaves the place.
        """
        return self.below(folder)

    def prepare(self, *folders: str) -> None:
        """Creates the place and these folders in it, if the store needs that."""
        return

    def listing(self, folder: str = "") -> Mapping[str, int | None]:
        """Returns names in a folder -> bytes, None for folders. May include files being written; see :meth:`tidy`."""

    def size(self, name: str) -> int | None:
        """Returns the bytes of a file; None if it is missing."""

    def read(self, name: str) -> bytes:
        """Reads a small file; FileNotFoundError if it is missing."""

    def read_all(self, names: Iterable[str]) -> Iterator[bytes]:
        """Reads small files in this order, several in parallel, and keeps few in memory; errors as of :meth:`read`."""

    def sha256(self, name: str) -> str:
        """Returns the sha256 of a file, in hexadecimal; empty if it is missing."""

    def local(self, *names: str) -> AbstractContextManager[Path]:
        """Yields a local folder with these files under their names, except missing ones."""

    def modified_ns(self, name: str) -> int:
        """Returns when a file was written, in nanoseconds since 1970 by the store's clock."""

    def stamp(self, name: str, ns: int) -> None:
        """Sets the time that :meth:`modified_ns` returns. Has no effect in a store that does not keep times."""
        return

    def put(self, name: str, content: bytes) -> None:
        """Writes a small file."""

    def create(self, name: str, content: bytes) -> bool:
        """Writes a small file unless it exists. Returns False if it exists.

        Atomic in a folder and in stores with conditional puts. Elsewhere, two simultaneous calls may both succeed.
        """

    def writing(self, name: str) -> AbstractContextManager[Writing]:
        """Writes a file of any size. It gets its name when the block succeeds; otherwise nothing is left."""

    def writing_folder(self, name: str) -> AbstractContextManager[Path]:
        """Yields an empty local folder. When the block succeeds, its files become those of the folder ``name``."""

    def move(self, name: str, to: str) -> None:
        """Renames a file, replacing an existing one."""

    def delete(self, names: Iterable[str]) -> None:
        """Removes files. Ignores missing ones."""

    def delete_folder(self, folder: str, keep: Iterable[str] = ()) -> None:
        """Removes everything in a folder except the files ``keep``, and the folder if it is then empty."""

    def tidy(self, *folders: str) -> None:
        """Removes partial files of killed processes in the place and in these folders."""

    def final_name(self, name: str) -> str:
        """Returns the final name of a file in :meth:`listing`, which may still be in progress."""
        return name

    def is_locked(self, name: str) -> bool:
        """Returns whether a process has locked the store with this name.

        Takes half a minute if that process may have died on another machine. A simultaneous :meth:`lock` of another
        process may fail because of this check.
        """

    def lock(self, name: str) -> AbstractContextManager[Lock]:
        """Locks the store against other runs, with a file of this name.

        Raises:
            LockedError: If another process has the lock.
        """
