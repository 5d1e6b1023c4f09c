"""Values of source columns that are carried into the index (``--keep-columns``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlmdata.errors import SourceError, UsageError
from vlmdata.format.source_columns import storable
from vlmdata.preprocess.row import Row
from vlmdata.preprocess.sources.rows import Source, column_value


def kept_values(row: Row, names: Sequence[str]) -> dict[str, Any]:
    """Returns the values of some columns of a row, without those that are missing.

    Raises:
        UsageError: If one holds what is no value: a file, or a mapping.
    """
    found = {}
    for name in names:
        try:
            value = storable(column_value(row.values, name))
        except TypeError as error:
            raise UsageError(
                f"--keep-columns {name}: row {row.number} has {error} there. Name columns of numbers, text, truth "
                "values or lists of these; parts of mappings with a dot, such as meta.lang."
            ) from None
        if value is not None:
            found[name] = value
    return found


def require_columns(source: Source, names: Sequence[str], option: str = "--keep-columns") -> None:
    """Checks names that an option has against the columns that every row has; nothing if rows may differ.

    Raises:
        SourceError: If there is no such column.
    """
    columns = source.rows.columns()
    for name in names:
        if columns and name not in columns and name.partition(".")[0] not in columns:
            raise SourceError(f"{option} {name}: the source has no such column. Columns: {', '.join(columns)}")
