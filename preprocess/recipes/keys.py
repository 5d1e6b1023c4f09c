"""Keys of a row that its recipe does not use: known to be harmless, or unknown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

#: Columns that say where a row comes from or what it is about, and nothing about how it is learned.
HARMLESS_COLUMNS = frozenset(
    {
        # names of the row
        "id",
        "ids",
        "idx",
        "index",
        "uid",
        "uuid",
        "guid",
        "key",
        "__key__",
        "__index_level_0__",
        # where it comes from
        "source",
        "sources",
        "origin",
        "dataset",
        "dataset_name",
        "data_source",
        "subset",
        "split",
        "channel",
        "url",
        "__url__",
        "__local_path__",
        "file_name",
        "filename",
        # what it is about
        "category",
        "task",
        "task_type",
        "type",
        "topic",
        "tags",
        "difficulty",
        "language",
        "lang",
        "license",
        "model",
        # other metadata
        "metadata",
        "meta",
        "created",
        "created_at",
        "timestamp",
        "date",
        # sizes of the file, which the file says itself
        "width",
        "height",
        "image_width",
        "image_height",
        # OpenAI: how its service runs tools
        "parallel_tool_calls",
    }
)


class KeyLog:
    """Collects the keys of one row that its recipe leaves aside.

    Keys are named by their place, such as ``messages[].name``. Keys without content say nothing and are left out.
    """

    def __init__(self) -> None:
        self._harmless: set[str] = set()
        self._unknown: set[str] = set()

    def note(self, values: Mapping[str, Any], used: frozenset[str], harmless: frozenset[str], where: str = "") -> None:
        """Notes the keys of a mapping that are not among ``used``.

        Args:
            values: The mapping.
            used: Keys that the recipe reads.
            harmless: Keys that may be left aside. Names that end in ``_id`` are harmless too.
            where: What stands before the keys in messages, such as ``messages[].``.
        """
        for key in values.keys() - used:
            if not is_empty(values[key]):
                known = key in harmless or key.endswith("_id")
                (self._harmless if known else self._unknown).add(where + key)

    @property
    def harmless(self) -> tuple[str, ...]:
        """The harmless keys, sorted."""
        return tuple(sorted(self._harmless))

    @property
    def unknown(self) -> tuple[str, ...]:
        """The other keys, sorted."""
        return tuple(sorted(self._unknown))


def is_empty(value: Any) -> bool:
    """True for null, empty text and containers, and containers that hold only such."""
    if isinstance(value, Mapping):
        return all(map(is_empty, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_empty, value))
    return value is None or (isinstance(value, str | bytes) and not value)


def filled(values: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    """Those of the keys that hold something."""
    return [key for key in keys if key in values and not is_empty(values[key])]
