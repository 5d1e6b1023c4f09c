"""What a reader of data files is: a class for each format, found by the endings of names or named by the user."""

from __future__ import annotations

import pickle
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from vlmdata.errors import SourceError
from vlmdata.preprocess.registries import READERS
from vlmdata.preprocess.sources.data_files import DataFile
from vlmdata.preprocess.sources.rows import Rows
from vlmdata.registry import code_digest, files_of, module_named

_SHOWN = 3


class RowsOfFiles(Rows, Protocol):
    """Rows of several files, in order."""

    @property
    def file_starts(self) -> npt.NDArray[np.int64]:
        """int64 (files + 1,) number of the first row of each file, and of all rows."""


@dataclass(frozen=True, eq=False)
class FilesRead:
    """The rows of files, and what counting them told of each file."""

    rows: RowsOfFiles
    contents: Sequence[str | None]  # hash of the file's bytes; None unless all were read from disk
    metadata: Sequence[str | None]  # hash of the file's own metadata; None if it has none


class Reader:
    """Reads files of one format. To add one, subclass ``RecordFile`` or ``TableFile`` (docs/extend/reader.md).

    Attributes:
        name: What ``--reader`` and identities call it.
        endings: Endings of its files' names, in lower case.
        title: Its files in messages; by default its name.
        identity: What identities of its sources have besides the files.
    """

    name: ClassVar[str]
    endings: ClassVar[tuple[str, ...]]
    title: ClassVar[str] = ""
    identity: ClassVar[Mapping[str, str]] = {}

    @classmethod
    @abstractmethod
    def read(cls, files: Sequence[DataFile], code: str = "") -> FilesRead:
        """Counts the rows of files.

        Args:
            files: Files of this format.
            code: Hash of the reader's source code, on which cached counts depend; empty for a built-in one.

        Raises:
            SourceError: If a file cannot be read.
        """

    @classmethod
    def words(cls) -> str:
        """Its files in messages."""
        return cls.title or cls.name


def pickled_with_code(made: Any, classes: Iterable[type]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the result of ``__reduce__`` for an object with instances of classes that may be of a user's file.

    Another process loads the files before it unpickles the object's state.
    """
    return _unpickled, (type(made), files_of(dict.fromkeys(classes)), pickle.dumps(made.__getstate__()))


def _unpickled(kind: type, files: Sequence[str], state: bytes) -> Any:
    for file in files:
        module_named(file)
    made: Any = object.__new__(kind)
    made.__dict__.update(pickle.loads(state))
    return made


@dataclass(frozen=True)
class Formats:
    """The readers of a command: the one that the user names, or the built-in ones. Others never run.

    Args:
        readers: The readers, in the order of their endings in messages.
        are_given: Whether the user named the reader, so that its files are those to read whatever else is beside them.
        identity: What identities have besides the files if the reader is not built in: its name, and its code's hash.
    """

    readers: tuple[type[Reader], ...]
    are_given: bool = False
    identity: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, given: str | None) -> Formats:
        """Returns the built-in ones, or the one with a name, as ``module:attribute`` or as ``file.py:attribute``.

        Raises:
            SourceError: If it is unknown or cannot be loaded.
        """
        if given is None:
            return cls(tuple(READERS.find(name) for name in READERS))
        reader = READERS.find(given)
        own = {} if given in READERS else {"reader": reader.name, "reader_source": code_digest(reader)}
        return cls((reader,), True, own)

    @property
    def endings(self) -> str:
        """The endings of data files, for messages."""
        return ", ".join(ending for reader in self.readers for ending in reader.endings)

    def ending_of(self, name: str) -> str | None:
        """Returns the ending of a data file's name; None if it has none of them."""
        endings = (ending for reader in self.readers for ending in reader.endings)
        return next((ending for ending in endings if name.lower().endswith(ending)), None)

    def reader_of(self, name: str) -> type[Reader] | None:
        """Returns the reader of a file; None if its name is not that of a data file."""
        return next((reader for reader in self.readers if name.lower().endswith(reader.endings)), None)

    def common(self, names: Iterable[str]) -> type[Reader] | None:
        """Returns the reader of all files; None if they have several, or none."""
        readers = {self.reader_of(name) for name in names}
        return readers.pop() if len(readers) == 1 else None

    def require_common(self, what: str, names: Sequence[str]) -> type[Reader]:
        """Returns the reader of all files that the user gave; a SourceError if there is none."""
        if (reader := self.common(names)) is not None:
            return reader
        if unknown := [name for name in names if self.reader_of(name) is None]:
            raise SourceError(f"{what}: {unknown[0]} is no data file; these are read: {self.endings}")
        raise SourceError(f"{what}: files of several kinds: {self.listing(names)}. Name files of one kind.")

    def listing(self, names: Iterable[str]) -> str:
        """Lists files by kind for a message: ``2 parquet (a.parquet, b.parquet), 1 JSON lines (c.jsonl)``."""
        by_reader: dict[type[Reader], list[str]] = {}
        for name in sorted(names):
            if (reader := self.reader_of(name)) is not None:
                by_reader.setdefault(reader, []).append(name)
        parts = []
        for reader, files in by_reader.items():
            more = ", …" if len(files) > _SHOWN else ""
            parts.append(f"{len(files):,} {reader.words()} ({', '.join(files[:_SHOWN])}{more})")
        return ", ".join(parts)
