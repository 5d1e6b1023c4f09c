"""Rows of a source, whatever it is made of: known by content, read by number, nothing decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from preprocess.recipes.base import Row


class Rows(Protocol):
    """Reads rows by number. One implementation per kind of source; cheap to pickle to worker processes."""

    def __len__(self) -> int:
        """Number of rows."""

    def columns(self) -> tuple[str, ...] | None:
        """The columns that every row has; None if rows may differ."""

    def values(self, number: int) -> Mapping[str, Any]:
        """Column values of one row; images are undecoded ``{"bytes": …, "path": …}`` mappings.

        Raises:
            RowRejected: MALFORMED_ROW if this row cannot be read; its neighbours can.
            SourceError: If the source has changed since it was opened.
        """


@dataclass(frozen=True, eq=False)
class Source:
    """An opened source, or a part of its rows. Cheap to pickle.

    Attributes:
        rows: Reads any row of the source.
        numbers: Numbers of the rows that belong to this source, ascending: all of them, the first few
            (``--limit``), or one side of ``--holdout``.
        identity: What the source is, by content, for the manifest.
        image_root: Folder that relative image paths mean when the user names none; None for remote sources.
    """

    rows: Rows
    numbers: Sequence[int]
    identity: Mapping[str, Any]
    image_root: str | None

    @classmethod
    def whole(cls, rows: Rows, identity: Mapping[str, Any], image_root: str | None) -> Source:
        """A source of all rows."""
        return cls(rows, range(len(rows)), identity, image_root)

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.numbers)

    def row(self, number: int) -> Row:
        """Reads one row by its number in the source.

        Raises:
            RowRejected: MALFORMED_ROW if it cannot be read.
            SourceError: If the source has changed since it was opened.
        """
        return Row(number, self.rows.values(number))
