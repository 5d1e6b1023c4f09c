"""Rows of any source: identified by content, read by number, not decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vlmdata.preprocess.row import Row


class Rows(Protocol):
    """Reads rows by number. One implementation per kind of source; cheap to pickle to worker processes."""

    def __len__(self) -> int:
        """Number of rows."""

    def columns(self) -> tuple[str, ...] | None:
        """Returns the columns that every row has; None if rows may differ."""

    def values(self, number: int) -> Mapping[str, Any]:
        """Returns the column values of one row; images are undecoded ``{"bytes": …, "path": …}`` mappings.

        MALFORMED_ROW rejects a row that cannot be read. A SourceError if the source has changed since it was opened.
        """


#: Names of columns that tell rows apart, most usual first.
ID_COLUMNS = ("id", "uid", "uuid", "guid", "_id", "key", "__key__")


def id_of(values: Mapping[str, Any], column: str | None = None) -> str | int | None:
    """Returns what the data calls a row; None if the column, or one of a usual name, has no text or whole number."""
    found = (column_value(values, name) for name in (ID_COLUMNS if column is None else (column,)))
    return next((each for each in found if type(each) is int or (isinstance(each, str) and each)), None)


def column_value(values: Any, name: str) -> Any:
    """Returns a value by its name, or by the names of mappings within each other; None if there is none."""
    if not isinstance(values, Mapping):
        return None
    if name in values:
        return values[name]
    first, dot, rest = name.partition(".")
    return column_value(values.get(first), rest) if dot else None


@dataclass(frozen=True, eq=False)
class FileRows:
    """Which rows of a source are in which of its files."""

    names: Sequence[str]  # of the files, below the folder of the source
    starts: npt.NDArray[np.int64]  # int64 (files + 1,) number of the first row of each file, and of all rows

    def places(self, numbers: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns the files of rows by number, and the numbers of the rows in them: int64 (n,) each."""
        files = np.searchsorted(self.starts, numbers, "right") - 1
        return files, numbers - self.starts[files]


@dataclass(frozen=True, eq=False)
class Source:
    """An opened source, or a part of its rows. Cheap to pickle."""

    rows: Rows  # reads any row of the source
    #: Numbers of the rows of this source, ascending: all, the first few (``--limit``), or one side of ``--holdout``.
    numbers: Sequence[int]
    identity: Mapping[str, Any]  # identity of the source, by content, for the manifest
    #: Folder or URL that relative image paths mean when the user names none; None for sources of the hub.
    image_root: str | None
    #: Modification times of files on disk whose bytes the identity does not tell, by name (or of many files a hash):
    #: an unfinished run is continued only if they are the same.
    times: Mapping[str, str] = field(default_factory=dict)
    is_remote: bool = False  # whether rows come over a network
    #: Number that the first row gets in keys, index and ledger, and the others after it. None: those in the source.
    first_number: int | None = None
    files: FileRows | None = None  # None if its rows are not in files, or in unknown ones

    @classmethod
    def whole(
        cls, rows: Rows, identity: Mapping[str, Any], image_root: str | None, times: Mapping[str, str] | None = None
    ) -> Source:
        """Creates a source of all rows."""
        return cls(rows, range(len(rows)), identity, image_root, times or {})

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.numbers)

    def allotted(self, position: int, number: int) -> int:
        """Returns the number in keys, index and ledger of the row with a number in the source and a position here."""
        return number if self.first_number is None else self.first_number + position

    def place(self, number: int) -> dict[str, Any]:
        """Returns the file of a row by its number in the source, and its number there; empty if unknown."""
        if self.files is None:
            return {}
        (file,), (row,) = self.files.places(np.array([number]))
        return {"file": self.files.names[file], "file_row": int(row)}

    def row(self, number: int) -> Row:
        """Reads one row by its number in the source; errors as of :meth:`Rows.values`."""
        return Row(number, self.rows.values(number))
