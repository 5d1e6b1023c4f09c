"""A row of a source, as recipes get it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Row:
    """A source row.

    Attributes:
        number: Position in the source split.
        values: Column values; images are undecoded ``{"bytes": …, "path": …}`` mappings, and structs of Arrow and
            Parquet are :class:`Struct`. A run passes :class:`ReadColumns`.
    """

    number: int
    values: Mapping[str, Any]

    @property
    def present(self) -> ReadColumns:
        """The columns that are not null. Reading them counts as reading those of ``values``."""
        known = self.values if isinstance(self.values, ReadColumns) else ReadColumns(self.values)
        return known.present()

    def recorded(self) -> tuple[Row, ColumnReads]:
        """Returns the row with columns that record which of them are read, and the record."""
        columns = ReadColumns(self.values)
        return replace(self, values=columns), columns.reads


class Struct(dict[str, Any]):
    """A struct of Arrow or Parquet.

    Arrow gives each struct the keys of all structs in its column, so a null may stand for a key that is not there. In
    other mappings, which come from JSON, nulls are those of the data.
    """


@dataclass(eq=False)
class ColumnReads:
    """Which columns of a row were read, whether it has them or not."""

    names: set[str] = field(default_factory=set)
    everything: bool = False  # the names of the columns were listed, so that any column may have mattered

    @property
    def columns(self) -> tuple[str, ...] | None:
        """The columns, sorted; None for all, and if none was read, as rows would be equal then."""
        return None if self.everything or not self.names else tuple(sorted(self.names))


class ReadColumns(Mapping[str, Any]):
    """The columns of a row, which records what is read of them.

    Asking for a column records its name, whether the row has it or not. Listing, counting or comparing the columns, as
    ``dict(row.values)`` does, records all of them. It is no ``dict``: libraries in C read those past their methods.

    Attributes:
        reads: What has been read.
        unrecorded: The same columns, of which nothing is recorded: for reports that change no sample.
    """

    def __init__(self, values: Mapping[str, Any], reads: ColumnReads | None = None):
        self.unrecorded = values
        self.reads = ColumnReads() if reads is None else reads

    def present(self) -> ReadColumns:
        """Returns the columns that are not null, with the same record."""
        return ReadColumns({name: value for name, value in self.unrecorded.items() if value is not None}, self.reads)

    def with_values(self, values: Mapping[str, Any]) -> ReadColumns:
        """Returns the columns with other values for some, with the same record."""
        return ReadColumns({**self.unrecorded, **values}, self.reads)

    def __getitem__(self, name: str) -> Any:
        self.reads.names.add(name)
        return self.unrecorded[name]

    def __contains__(self, name: object) -> bool:
        if isinstance(name, str):
            self.reads.names.add(name)
        return name in self.unrecorded

    def __iter__(self) -> Iterator[str]:
        self.reads.everything = True
        return iter(self.unrecorded)

    def __len__(self) -> int:
        self.reads.everything = True
        return len(self.unrecorded)

    def __repr__(self) -> str:
        return repr(dict(self))
