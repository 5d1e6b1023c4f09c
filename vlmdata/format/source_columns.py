"""Columns of the source in the index (``--keep-columns``): one Arrow type for each, whatever its values."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

#: Field of a sample's metadata with the values, and column of the records of a shard with them as JSON.
SOURCE = "source"
#: Field of a sample's metadata with the arguments of the chat template that its row gave.
TEMPLATE_ARGUMENTS = "chat_template_kwargs"
_PREFIX = f"{SOURCE}."
_INT64 = range(-(1 << 63), 1 << 63)
#: Whole numbers beyond these are not all floating-point numbers. Beside a fraction, they are text.
EXACT = 1 << 53


def column_name(name: str) -> str:
    """Returns the name of a source column in the index: ``source.lang``."""
    return f"{_PREFIX}{name}"


def source_fields(schema: pa.Schema) -> list[pa.Field]:
    """Returns the fields of the source columns of an index."""
    return [field for field in schema if field.name.startswith(_PREFIX)]


def source_names(schema: pa.Schema) -> list[str]:
    """Returns the names of the source columns of an index, as the source has them."""
    return list(source_types(schema))


def source_types(schema: pa.Schema) -> dict[str, pa.DataType]:
    """Returns the types of the source columns of an index, by their name in the source."""
    return {field.name.removeprefix(_PREFIX): field.type for field in source_fields(schema)}


def values_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of source columns in a row of an index, by their name in the source, without nulls."""
    found = {name.removeprefix(_PREFIX): value for name, value in row.items() if name.startswith(_PREFIX)}
    return {name: value for name, value in found.items() if value is not None}


def storable(value: Any) -> Any:
    """Returns a value as JSON holds it: numbers, text, truth values, lists of these; others as text; None if missing.

    Raises:
        TypeError: If it is bytes or a mapping.
    """
    if isinstance(value, bytes | Mapping):
        raise TypeError("bytes" if isinstance(value, bytes) else "a mapping")
    if isinstance(value, list | tuple):
        return [storable(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float):
        return value
    return str(value).encode("utf-8", "backslashreplace").decode()


class SourceTypes:
    """Finds the type of each column from the values of all samples."""

    def __init__(self, names: Iterable[str]):
        self._kinds: dict[str, set[str]] = {name: set() for name in names}

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Notes the values of some samples."""
        for row in rows:
            for name, value in row.items():
                if name in self._kinds:
                    self._kinds[name].add(_kind(value))

    @property
    def types(self) -> dict[str, pa.DataType]:
        """The Arrow type of each column. Columns of several kinds of values, and of none, are text."""
        return {name: _type(kinds - {""}) for name, kinds in self._kinds.items()}


def columns_of(rows: Sequence[Mapping[str, Any]], types: Mapping[str, pa.DataType]) -> dict[str, pa.Array]:
    """Returns the source columns of some samples, by their name in the index."""
    return {
        column_name(name): pa.array([_as(row.get(name), kind) for row in rows], kind) for name, kind in types.items()
    }


def as_text(row: Mapping[str, Any]) -> str:
    """Returns the values of a sample as JSON."""
    return json.dumps(dict(row), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _kind(value: Any) -> str:
    """Names the kind of a value; empty if it is missing."""
    if isinstance(value, list):
        inner = {_kind(each) for each in value} - {""}
        return "list " + " ".join(sorted(inner))
    if isinstance(value, int) and not isinstance(value, bool) and value not in _INT64:
        return "str"
    if isinstance(value, int) and not -EXACT <= value <= EXACT:
        return "id"
    return "" if value is None else type(value).__name__


def _type(kinds: set[str]) -> pa.DataType:
    lists = {kind for kind in kinds if kind.startswith("list ")}
    if lists and lists == kinds:
        return pa.list_(_type({inner for kind in lists for inner in kind.split()[1:]}))
    if kinds == {"bool"}:
        return pa.bool_()
    if kinds and kinds <= {"int", "id"}:
        return pa.int64()
    return pa.float64() if kinds and kinds <= {"int", "float"} else pa.string()


def _as(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_list(kind):
        return [_as(each, kind.value_type) for each in value]
    if pa.types.is_string(kind):
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return float(value) if pa.types.is_float64(kind) else value
