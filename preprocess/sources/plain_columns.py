"""Finds columns that ``datasets`` would leave unchanged. Without others, it need not be imported (1 s of CPU time)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

#: Arrow types of plain values, and their names in ``datasets``.
_VALUES = {
    pa.bool_(): "bool",
    **{make(): make.__name__ for make in (pa.int8, pa.int16, pa.int32, pa.int64)},
    **{make(): make.__name__ for make in (pa.uint8, pa.uint16, pa.uint32, pa.uint64)},
    **{make(): make.__name__ for make in (pa.float32, pa.float64)},
    **{make(): make.__name__ for make in (pa.string, pa.large_string, pa.binary, pa.large_binary)},
}
_IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})


@dataclass(frozen=True)
class _ListOf:
    feature: Any


@dataclass(frozen=True)
class MapOf:
    """Features of a column of maps, which ``datasets`` does not have: their keys are text or numbers."""

    values: Any  # features of their values


class _NotPlainError(Exception):
    pass


def plain_features(schema: pa.Schema) -> Mapping[str, Any] | None:
    """Returns the features of all columns, nested like those of ``datasets``, or None if that library must read them.

    A struct is a mapping, a list has the attribute ``feature``, a map is a :class:`MapOf`, and anything else is None.
    """
    try:
        _require_distinct(schema.names)
        declared = _declared(schema)
        return {
            field.name: _of_declared(declared[field.name], field) if field.name in declared else _of_type(field)
            for field in schema
        }
    except _NotPlainError:
        return None


def has_map(kind: pa.DataType) -> bool:
    """Returns whether a type is a map, or contains one."""
    return pa.types.is_map(kind) or any(has_map(kind.field(n).type) for n in range(kind.num_fields))


def _declared(schema: pa.Schema) -> Mapping[str, Any]:
    """Returns the features in a schema's metadata; empty if there are none."""
    content = (schema.metadata or {}).get(b"huggingface")
    if content is None:
        return {}
    try:
        found = json.loads(content)["info"]["features"]
    except (ValueError, KeyError, TypeError):
        raise _NotPlainError from None
    if not isinstance(found, dict):
        raise _NotPlainError
    return found


def _require_distinct(names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        raise _NotPlainError


def _of_type(field: pa.Field) -> Any:
    kind = field.type
    if not field.nullable:
        raise _NotPlainError
    if kind in _VALUES:
        return None
    if pa.types.is_struct(kind):
        _require_distinct([each.name for each in kind.fields])
        return {each.name: _of_type(each) for each in kind.fields}
    if pa.types.is_list(kind):
        return _ListOf(_of_type(kind.value_field))
    if pa.types.is_map(kind) and kind.key_type in _VALUES:
        return MapOf(_of_type(kind.item_field))
    raise _NotPlainError


def _of_declared(declared: Any, field: pa.Field) -> Any:
    kind = field.type
    if not field.nullable or not isinstance(declared, dict):
        raise _NotPlainError
    if "_type" not in declared and pa.types.is_struct(kind) and list(declared) == [each.name for each in kind.fields]:
        return {each.name: _of_declared(declared[each.name], each) for each in kind.fields}
    name, options = declared.get("_type"), {key for key, value in declared.items() if value is not None} - {"_type"}
    if name == "Value" and options == {"dtype"} and _VALUES.get(kind) == declared["dtype"]:
        return None
    if name == "Image" and not options and kind == _IMAGE:
        return None
    if name == "List" and options == {"feature"} and pa.types.is_list(kind):
        return _ListOf(_of_declared(declared["feature"], kind.value_field))
    raise _NotPlainError
