"""JSON in the data, read strictly: a key that stands twice in an object is an error.

Python keeps the last of the two without a word, and other readers the first.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any


def loads(text: str | bytes) -> Any:
    """The value of JSON text.

    Raises:
        ValueError: If it is not JSON, or an object has a key twice.
        RecursionError: If it is nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        repeated = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"the key {repeated!r} stands twice in one object")
    return value
