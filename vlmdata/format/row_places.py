"""Where the rows of a dataset are in its source, and what the data calls them, as ``rows.parquet`` records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from vlmdata.format.ledger import place_text
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import ROWS_NAME

_COLUMNS = ("row", "file", "file_row", "id")


@dataclass(frozen=True, eq=False)
class RowPlaces:
    """The places of rows. Empty for datasets that do not record them: earlier ones, and those of select and join.

    Attributes:
        table: ``row`` (int64, ascending), ``file`` and ``id`` (text), ``file_row`` (int64).
    """

    table: pa.Table

    @classmethod
    def read(cls, directory: Path, manifest: Manifest) -> RowPlaces:
        """Reads the places of a dataset with this manifest; a damaged record, or one of another dataset, is as none."""
        try:
            with pq.ParquetFile(directory / ROWS_NAME) as file:
                metadata = file.schema_arrow.metadata or {}
                is_of = metadata.get(b"index_sha256", b"").decode() == manifest.index_sha256
                if is_of and set(_COLUMNS) <= set(file.schema_arrow.names):
                    return cls(file.read(columns=list(_COLUMNS)))
        except (OSError, ValueError, pa.ArrowException):
            pass
        return cls(pa.table({name: pa.array([], pa.int64()) for name in _COLUMNS}))

    def text(self, row: int) -> str:
        """Returns where a row is, in words, such as ``b.jsonl, row 12, id x7``; empty if unknown."""
        at = pa.compute.index(self.table["row"], row).as_py()
        if at < 0:
            return ""
        (found,) = self.table.slice(at, 1).select(_COLUMNS[1:]).to_pylist()
        return place_text(**found)

    def ids(self, rows: Sequence[int]) -> list[str | None]:
        """Returns the ids of rows; None if unknown."""
        known = dict(zip(self.table["row"].to_pylist(), self.table["id"].to_pylist(), strict=True))
        return [known.get(row) for row in rows]
