"""Differences of two nested configurations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final


class _Absent:
    def __repr__(self) -> str:
        return "absent"


#: Marks a setting that one side lacks.
ABSENT: Final = _Absent()


def differing(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Compares two JSON-like dictionaries.

    A tuple equals the corresponding list, as in JSON.

    Yields:
        Dotted name and both values, :data:`ABSENT` for a missing one; sorted by name within each dictionary.
    """
    for key in sorted(old.keys() | new.keys()):
        name, before, after = f"{prefix}{key}", old.get(key, ABSENT), new.get(key, ABSENT)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from differing(before, after, f"{name}.")
        elif _listed(before) != _listed(after):
            yield name, before, after


def _listed(value: Any) -> Any:
    return [_listed(each) for each in value] if isinstance(value, list | tuple) else value
