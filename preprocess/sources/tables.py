"""Rows of Parquet and Arrow files, read fragment by fragment.

Row values are those that ``datasets`` would return: other files are cast to the columns of the first.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vlmdata.errors import SourceError
from vlmdata.preprocess import json_text
from vlmdata.preprocess.reject import RowRejected, excerpt
from vlmdata.preprocess.row import Struct
from vlmdata.preprocess.sources.arrow_ipc import ArrowReader, count_arrow
from vlmdata.preprocess.sources.data_files import DataFile
from vlmdata.preprocess.sources.kept import kept
from vlmdata.preprocess.sources.kinds import Kind
from vlmdata.preprocess.sources.parquet import Fragments, ParquetReader, count_parquet
from vlmdata.preprocess.sources.plain_columns import plain_features
from vlmdata.reasons import Reason

#: Number of files whose fragments are counted in parallel.
_THREADS = 32


class _TableReader(Protocol):
    def batches(self, fragment: int) -> Iterator[pa.RecordBatch]: ...
    def close(self) -> None: ...


_COUNT: Mapping[Kind, Callable[[DataFile], Fragments]] = {Kind.PARQUET: count_parquet, Kind.ARROW: count_arrow}
TABLES = tuple(_COUNT)
_READER: Mapping[Kind, Callable[[DataFile, Sequence[tuple[int, int]]], _TableReader]] = {
    Kind.PARQUET: ParquetReader,
    Kind.ARROW: ArrowReader,
}


@dataclass
class _TableCursor:
    """An open file, a fragment, its next batches, and decoded rows from the ``first`` one on."""

    file: int
    reader: _TableReader
    fragment: int
    batches: Iterator[pa.RecordBatch]
    table: pa.Table
    first: int


@dataclass(eq=False)
class TableRows:
    """Rows of files of one kind. Cheap to pickle, because fragments are numbers."""

    kind: Kind  # parquet or Arrow
    files: Sequence[DataFile]
    schema: pa.Schema  # columns of all rows, with the features of ``datasets`` in its metadata
    #: int64 (files + 1,) number of the first fragment of each file, and the number of fragments.
    first_fragments: npt.NDArray[np.int64]
    #: int64 (fragments + 1,) number of the first row of each fragment, and the number of rows.
    starts: npt.NDArray[np.int64]
    #: int64 (fragments, 2) offset and size of each fragment; (0, 2) for Parquet, whose footers have them.
    places: npt.NDArray[np.int64]
    _cursor: _TableCursor | None = field(default=None, init=False, repr=False)

    @classmethod
    def count(cls, kind: Kind, files: Sequence[DataFile], features: Any = None) -> tuple[TableRows, Sequence[str]]:
        """Counts the rows of files without reading them. Returns the rows, and a hash of each file's metadata.

        Columns are ``features``, those that a dataset card declares, or else those of the first file. A SourceError if
        a file is damaged, or its columns do not fit those of the first file.
        """

        def count() -> list[Fragments]:
            with ThreadPoolExecutor(_THREADS) as threads:
                return list(threads.map(_COUNT[kind], files))

        found = kept(kind.value, files, count, _to_json, _from_json)
        schema = _target(files, [each.schema for each in found], features)
        fragments = np.array([len(each.counts) for each in found], dtype=np.int64)
        rows = np.array([rows for each in found for rows in each.counts], dtype=np.int64)
        places = np.array([place for each in found for place in each.places], dtype=np.int64).reshape(-1, 2)
        return cls(kind, files, schema, _sums(fragments), _sums(rows), places), [each.digest for each in found]

    def __len__(self) -> int:
        return int(self.starts[-1])

    def columns(self) -> tuple[str, ...]:
        """All columns; every row has them."""
        return tuple(self.schema.names)

    def values(self, number: int) -> Mapping[str, Any]:
        """Column values of one row; a SourceError if the file has changed, or cannot be read."""
        cursor = self._at(number)
        record = cursor.table.slice(number - cursor.first, 1).to_pylist()[0]
        return {name: decode_json(value, self._features[name]) for name, value in record.items()}

    def _at(self, number: int) -> _TableCursor:
        """Returns the cursor, moved to decoded rows that contain a row. Rows read in order are decoded once."""
        fragment = int(np.searchsorted(self.starts, number, "right")) - 1
        cursor = self._cursor
        if cursor is None or cursor.fragment != fragment or number < cursor.first:
            cursor = self._cursor = self._begin(fragment)
        while number >= cursor.first + len(cursor.table):
            first = cursor.first + len(cursor.table)
            batch = next(cursor.batches, None)
            if batch is None:
                raise SourceError(
                    f"SOURCE {self.files[cursor.file].place}: it has no row for {number} any more; it was changed "
                    "while it was being read"
                )
            table = pa.Table.from_batches([batch])
            # Skipped rows need no cast.
            wanted = number < first + len(table)
            cursor.table, cursor.first = (_cast(table, self.schema) if wanted else table), first
        return cursor

    def _begin(self, fragment: int) -> _TableCursor:
        file = int(np.searchsorted(self.first_fragments, fragment, "right")) - 1
        cursor = self._cursor
        if cursor is not None and cursor.file == file:
            reader = cursor.reader
        else:
            if cursor is not None:
                cursor.reader.close()
                self._cursor = None
            reader = _READER[self.kind](self.files[file], self._places_in(file))
        batches = reader.batches(fragment - int(self.first_fragments[file]))
        none = pa.Table.from_batches([], self.schema)  # empty_table imports pandas
        return _TableCursor(file, reader, fragment, batches, none, int(self.starts[fragment]))

    def _places_in(self, file: int) -> list[tuple[int, int]]:
        first, after = self.first_fragments[file : file + 2]
        return [(offset, size) for offset, size in self.places[first:after].tolist()]

    @cached_property
    def _features(self) -> Any:
        return _features_of(self.schema)

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "_features"}
        return {**state, "_cursor": None}


def decode_json(value: Any, feature: Any) -> Any:
    """Parses values of ``datasets``' Json features, which are JSON text in Arrow. Other structs become ``Struct``.

    MALFORMED_ROW if the text is not JSON, or an object in it has a duplicate key.
    """
    if value is None:
        return None
    if isinstance(feature, Mapping):
        return Struct({name: decode_json(value.get(name), inner) for name, inner in feature.items()})
    if type(feature).__name__ == "Json":
        return _parsed(value) if isinstance(value, str | bytes) else value
    inner = getattr(feature, "feature", None)
    if inner is not None and isinstance(value, list):
        return [decode_json(item, inner) for item in value]
    return value


def _parsed(text: str | bytes) -> Any:
    try:
        return json_text.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowRejected(Reason.MALFORMED_ROW, f"a column of JSON is not JSON: {error}: {excerpt(text)}") from error


def _to_json(found: Sequence[Fragments]) -> Any:
    # Most files have the columns of the first.
    schemas = [base64.b64encode(each.schema.serialize()).decode() for each in found]
    distinct = {schema: place for place, schema in enumerate(dict.fromkeys(schemas))}
    files = [
        [each.counts, distinct[schema], each.digest, each.places] for each, schema in zip(found, schemas, strict=True)
    ]
    return {"schemas": list(distinct), "files": files}


def _from_json(kept: Any) -> list[Fragments]:
    schemas = [pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text))) for text in kept["schemas"]]
    return [
        Fragments(tuple(counts), schemas[schema], digest, tuple((offset, size) for offset, size in places))
        for counts, schema, digest, places in kept["files"]
    ]


def _target(files: Sequence[DataFile], schemas: Sequence[pa.Schema], features: Any) -> pa.Schema:
    """Returns the columns with which all files are read."""
    for file, schema in zip(files, schemas, strict=True):
        if twice := [name for name, times in Counter(schema.names).items() if times > 1]:
            raise SourceError(f"SOURCE {file.place}: it has several columns {twice[0]!r}. Give each its own name.")
    if features is None and all(each == schemas[0] for each in schemas) and plain_features(schemas[0]) is not None:
        return schemas[0]
    try:
        target = (features or _library_features(schemas[0])).arrow_schema
    except (ValueError, KeyError, TypeError, AttributeError, NotImplementedError) as error:
        raise SourceError(f"SOURCE {files[0].place}: its columns cannot be read: {error}") from error
    seen: list[pa.Schema] = []
    for file, schema in zip(files, schemas, strict=True):
        if schema in seen:
            continue
        seen.append(schema)
        try:
            _cast(schema.empty_table(), target)
        except (pa.ArrowException, ValueError, TypeError) as error:
            raise SourceError(
                f"SOURCE {file.place}: its columns ({', '.join(schema.names)}) do not fit those of {files[0].place} "
                f"({', '.join(target.names)}): {str(error).splitlines()[0]}. Give files of the same columns."
            ) from error
    return target


def _cast(table: pa.Table, schema: pa.Schema) -> pa.Table:
    if table.schema == schema:
        return table
    from datasets.table import table_cast

    return table_cast(table, schema)


def _features_of(schema: pa.Schema) -> Any:
    plain = plain_features(schema)
    return _library_features(schema) if plain is None else plain


def _library_features(schema: pa.Schema) -> Any:
    from datasets import Features

    return Features.from_arrow_schema(schema)


def _sums(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
