"""Reads JSON in the data strictly: a duplicate key in an object is an error.

Python silently keeps the last of two equal keys; other readers keep the first.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any


def loads(text: str | bytes) -> Any:
    """Parses JSON text.

    Raises:
        ValueError: If the text is not JSON, or an object has a duplicate key.
        RecursionError: If the JSON is nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        repeated = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"the key {repeated!r} occurs twice in one object")
    return value
