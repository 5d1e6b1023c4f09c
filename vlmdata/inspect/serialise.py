"""Descriptions as JSON: one serialiser for ``--json``, the page and the server."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

#: In the metadata of a field with a mapping: its entries become fields of the object.
INLINE = "inline"


def to_jsonable(value: Any) -> Any:
    """Converts a description to dicts, lists and plain values.

    Dataclasses become objects, arrays become lists, and numbers without a JSON form (NaN) become null.

    Raises:
        TypeError: If a value is of another type.
    """
    if value is None or isinstance(value, str | bool | int):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, np.integer | np.bool_):
        return value.item()
    if isinstance(value, np.ndarray):
        return to_jsonable(value.tolist()) if value.dtype.kind == "f" else value.tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made: dict[str, Any] = {}
        for field in dataclasses.fields(value):
            inner = to_jsonable(getattr(value, field.name))
            made |= inner if INLINE in field.metadata else {field.name: inner}
        return made
    if isinstance(value, Mapping):
        return {str(name): to_jsonable(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_jsonable(each) for each in value]
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def to_json(value: Any, indent: int | None = None) -> str:
    """Converts a description to ASCII JSON. Other characters are escaped, so it is safe in any terminal."""
    separators = None if indent else (",", ":")
    return json.dumps(to_jsonable(value), indent=indent, separators=separators, allow_nan=False)
