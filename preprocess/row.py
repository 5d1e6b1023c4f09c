"""A row of a source, as recipes get it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """A source row.

    Attributes:
        number: Position in the source split.
        values: Column values; images are undecoded ``{"bytes": …, "path": …}`` mappings, and structs of Arrow and
            Parquet are :class:`Struct`.
    """

    number: int
    values: Mapping[str, Any]


class Struct(dict[str, Any]):
    """A struct of Arrow or Parquet.

    Arrow gives each struct the keys of all structs in its column, so a null may stand for a key that is not there. In
    other mappings, which come from JSON, nulls are those of the data.
    """
