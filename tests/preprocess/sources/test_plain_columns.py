"""Columns that are read without ``datasets`` are what that library would make of them."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from datasets import Features
from datasets.table import table_cast

from vlmdata.preprocess.sources.plain_columns import plain_features
from vlmdata.preprocess.sources.tables import decode_json

_IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})
_TURN = pa.struct({"role": pa.string(), "content": pa.string()})
_TEXT = {"dtype": "string", "_type": "Value"}


def _declaring(schema: pa.Schema, **features: Any) -> pa.Schema:
    return schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})})


_PLAIN = {
    "values": (
        pa.schema([("a", pa.string()), ("b", pa.int64()), ("c", pa.float64()), ("d", pa.bool_()), ("e", pa.binary())]),
        {"a": "x", "b": 1, "c": 0.5, "d": True, "e": b"y"},
    ),
    "structs and lists": (
        pa.schema([("image", _IMAGE), ("turns", pa.list_(pa.field("element", _TURN))), ("n", pa.list_(pa.int8()))]),
        {"image": {"bytes": b"z", "path": None}, "turns": [{"role": "user", "content": "?"}, None], "n": [1, None]},
    ),
    "an image": (
        _declaring(pa.schema([("image", _IMAGE), ("text", pa.string())]), image={"_type": "Image"}, text=_TEXT),
        {"image": {"bytes": b"z", "path": "p.png"}, "text": None},
    ),
    "declared structs and lists": (
        _declaring(
            pa.schema([("turns", pa.list_(_TURN)), ("image", _IMAGE)]),
            turns={"feature": {"role": _TEXT, "content": {**_TEXT, "id": None}}, "_type": "List"},
            image={"bytes": {"dtype": "binary", "_type": "Value"}, "path": _TEXT},
        ),
        {"turns": [{"role": "user", "content": "?"}], "image": None},
    ),
}


@pytest.mark.parametrize("name", _PLAIN)
def test_values_equal_those_by_the_library(name: str) -> None:
    schema, row = _PLAIN[name]
    library, plain = Features.from_arrow_schema(schema), plain_features(schema)
    assert plain is not None
    table = pa.Table.from_pylist([row], schema)
    cast = table_cast(table, library.arrow_schema)
    assert cast.schema == table.schema
    wanted, made = (
        {column: decode_json(value, features[column]) for column, value in each.to_pylist()[0].items()}
        for each, features in ((cast, library), (table, plain))
    )
    assert made == wanted
    assert _kinds(made) == _kinds(wanted)


def _kinds(value: Any) -> Any:
    """The types of a value and all in it."""
    if isinstance(value, dict):
        return type(value), {name: _kinds(each) for name, each in value.items()}
    return (type(value), [_kinds(each) for each in value]) if isinstance(value, list) else type(value)


@pytest.mark.parametrize(
    "schema",
    [
        pa.schema([("a", pa.timestamp("s"))]),
        pa.schema([("a", pa.list_(pa.int8(), 2))]),
        pa.schema([pa.field("a", pa.string(), nullable=False)]),
        _declaring(pa.schema([("a", pa.string())]), a={"_type": "Json"}),
        _declaring(pa.schema([("a", pa.string())]), a={"dtype": "int64", "_type": "Value"}),
        _declaring(pa.schema([("a", pa.string())]), a={"_type": "Image"}),
        _declaring(pa.schema([("a", pa.int64())]), a={"names": ["x"], "_type": "ClassLabel"}),
        _declaring(pa.schema([("a", pa.list_(pa.string()))]), a=[_TEXT]),
        pa.schema([("a", pa.string())]).with_metadata({"huggingface": "{"}),
        pa.schema([("a", pa.struct([("b", pa.int8()), ("b", pa.int8())]))]),
    ],
    ids=str,
)
def test_others_are_left_to_the_library(schema: pa.Schema) -> None:
    assert plain_features(schema) is None
