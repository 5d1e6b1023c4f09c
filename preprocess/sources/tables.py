"""Rows of Parquet and Arrow files, read fragment by fragment.

Row values are those that ``datasets`` would return: other files are cast to the columns of the first, and those that
they add. Maps, which it does not know, are mappings.
"""

from __future__ import annotations

import base64
import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vlmdata.errors import SourceError
from vlmdata.preprocess import json_text
from vlmdata.preprocess.reject import RowRejected, excerpt
from vlmdata.preprocess.row import Struct
from vlmdata.preprocess.sources.data_files import DataFile
from vlmdata.preprocess.sources.kept import kept
from vlmdata.preprocess.sources.plain_columns import MapOf, has_map, plain_features
from vlmdata.preprocess.sources.reader import FilesRead, Reader, pickled_with_code
from vlmdata.reasons import Reason

#: Number of files whose fragments are counted in parallel.
_THREADS = 32


@dataclass(frozen=True)
class Fragments:
    """Result of counting the rows of a file."""

    counts: tuple[int, ...]  # number of rows of each fragment
    schema: pa.Schema
    #: Hash of the file's metadata, without its rows; None: the file is identified by its bytes.
    digest: str | None = None
    places: tuple[tuple[int, int], ...] = ()  # offset and size of each fragment, if needed to find it


class TableFile(Reader):
    """An open file of columns. A subclass reads a format of fragments of rows with one schema.

    Args:
        file: The file.
        places: Offset and size of each fragment, if :meth:`count` tells them.
    """

    @abstractmethod
    def __init__(self, file: DataFile, places: Sequence[tuple[int, int]]): ...

    @classmethod
    @abstractmethod
    def count(cls, file: DataFile) -> Fragments:
        """Counts the rows of a file without reading them; a SourceError if it is damaged."""

    @abstractmethod
    def batches(self, fragment: int) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a fragment in batches; a SourceError if they cannot be read."""

    @abstractmethod
    def close(self) -> None:
        """Closes the file."""

    @classmethod
    def read(cls, files: Sequence[DataFile], code: str = "") -> FilesRead:
        """Counts the rows of files."""
        rows, digests = TableRows.count(cls, files, code=code)
        return FilesRead(rows, [None] * len(files), digests)


@dataclass
class _TableCursor:
    """An open file, a fragment, its next batches, and decoded rows from the ``first`` one on."""

    file: int
    reader: TableFile
    fragment: int
    batches: Iterator[pa.RecordBatch]
    table: pa.Table
    first: int


@dataclass(eq=False)
class TableRows:
    """Rows of files of one kind. Cheap to pickle, because fragments are numbers."""

    reader: type[TableFile]
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
    def count(
        cls, reader: type[TableFile], files: Sequence[DataFile], features: Any = None, code: str = ""
    ) -> tuple[TableRows, Sequence[str | None]]:
        """Counts the rows of files without reading them. Returns the rows, and a hash of each file's metadata.

        Columns are ``features``, those that a dataset card declares, or else those of the first file. A SourceError if
        a file is damaged, or its columns do not fit those of the first file.
        """

        def count() -> list[Fragments]:
            with ThreadPoolExecutor(_THREADS) as threads:
                return list(threads.map(reader.count, files))

        found = kept(f"{reader.words()} {code}" if code else reader.words(), files, count, _to_json, _from_json)
        schema = _target(files, [each.schema for each in found], features)
        fragments = np.array([len(each.counts) for each in found], dtype=np.int64)
        rows = np.array([rows for each in found for rows in each.counts], dtype=np.int64)
        places = np.array([place for each in found for place in each.places], dtype=np.int64).reshape(-1, 2)
        return cls(reader, files, schema, _sums(fragments), _sums(rows), places), [each.digest for each in found]

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def file_starts(self) -> npt.NDArray[np.int64]:
        """int64 (files + 1,) number of the first row of each file, and of all rows."""
        return self.starts[self.first_fragments]

    def columns(self) -> tuple[str, ...]:
        """All columns; every row has them."""
        return tuple(self.schema.names)

    def values(self, number: int) -> Mapping[str, Any]:
        """Column values of one row; MALFORMED_ROW if a key of a map occurs twice.

        A SourceError if the file has changed, or cannot be read.
        """
        cursor = self._at(number)
        try:
            record = cursor.table.slice(number - cursor.first, 1).to_pylist(maps_as_pydicts="strict")[0]
        except KeyError as error:
            raise RowRejected(Reason.MALFORMED_ROW, f"a key of a map occurs twice: {error.args[0]}") from error
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
            reader = self.reader(self.files[file], self._places_in(file))
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

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return pickled_with_code(self, [self.reader])


def decode_json(value: Any, feature: Any) -> Any:
    """Parses values of ``datasets``' Json features, which are JSON text in Arrow. Other structs become ``Struct``.

    MALFORMED_ROW if the text is not JSON, or an object in it has a duplicate key.
    """
    if value is None:
        return None
    if isinstance(feature, Mapping):
        return Struct({name: decode_json(value.get(name), inner) for name, inner in feature.items()})
    if isinstance(feature, MapOf):
        return {str(key): decode_json(item, feature.values) for key, item in value.items()}
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
        target = features.arrow_schema if features is not None else _readable(_grown(schemas))
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


def _grown(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """Returns the columns of the first file, with those that later files add, also within structs."""
    grown = schemas[0]
    for schema in schemas[1:]:
        if schema == schemas[0]:
            continue
        for column in schema:
            at = grown.get_field_index(column.name)
            if at < 0:
                grown = grown.append(column)
            else:
                grown = grown.set(at, grown.field(at).with_type(_grown_type(grown.field(at).type, column.type)))
    if grown.names == schemas[0].names:
        return grown
    declared: dict[str, Any] = {}
    for schema in reversed(schemas):
        if content := (schema.metadata or {}).get(b"huggingface"):
            declared |= json.loads(content)["info"]["features"]
    return grown.with_metadata({b"huggingface": json.dumps({"info": {"features": declared}})} if declared else None)


def _grown_type(known: pa.DataType, other: pa.DataType) -> pa.DataType:
    if pa.types.is_null(known):
        return other
    if pa.types.is_struct(known) and pa.types.is_struct(other):
        return pa.struct(list(_grown([pa.schema(list(known)), pa.schema(list(other))])))
    if pa.types.is_list(known) and pa.types.is_list(other):
        return pa.list_(known.value_field.with_type(_grown_type(known.value_type, other.value_type)))
    return known


def _readable(schema: pa.Schema) -> pa.Schema:
    """Returns the columns as ``datasets`` stores them; it knows no maps, which stay as they are."""
    if not (maps := _maps_in(schema)):
        stored: pa.Schema = _library_features(schema).arrow_schema
        return stored
    stored = _library_features(_without(schema, maps)).arrow_schema
    return pa.schema([maps.get(name) or stored.field(name) for name in schema.names], stored.metadata)


def _cast(table: pa.Table, schema: pa.Schema) -> pa.Table:
    if table.schema == schema:
        return table
    from datasets.table import table_cast

    maps = _maps_in(schema)
    others = _without(schema, maps)
    cast = table_cast(table.drop_columns([name for name in maps if name in table.column_names]), others)
    columns = {name: cast[name] for name in others.names}
    for name, column in maps.items():
        known = name in table.column_names
        columns[name] = table[name].cast(column.type) if known else pa.nulls(len(table), column.type)
    return pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)


def _features_of(schema: pa.Schema) -> Any:
    plain = plain_features(schema)
    if plain is not None:
        return plain
    maps = _maps_in(schema)
    of_maps = {name: (plain_features(pa.schema([column])) or {name: None})[name] for name, column in maps.items()}
    return {**_library_features(_without(schema, maps)), **of_maps}


def _library_features(schema: pa.Schema) -> Any:
    from datasets import Features

    return Features.from_arrow_schema(schema)


def _maps_in(schema: pa.Schema) -> dict[str, pa.Field]:
    """Returns the columns that are maps, or contain some, by name."""
    return {column.name: column for column in schema if has_map(column.type)}


def _without(schema: pa.Schema, names: Container[str]) -> pa.Schema:
    return pa.schema([column for column in schema if column.name not in names], schema.metadata)


def _sums(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
