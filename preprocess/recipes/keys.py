"""The columns that tell rows of a recipe, and the keys of a row that it does not use: harmless or unknown."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlmdata.preprocess.row import ReadColumns
from vlmdata.wording import encodable

_NAMES = {"id", "ids", "idx", "index", "uid", "uuid", "guid", "key", "__key__", "__index_level_0__"}  # of the row
_ORIGIN = {"source", "sources", "origin", "dataset", "dataset_name", "data_source", "subset", "split", "channel", "url"}
_ORIGIN |= {"__url__", "__local_path__", "file_name", "filename"}
_TOPIC = {"category", "task", "task_type", "type", "topic", "tags", "difficulty", "language", "lang"}
_OTHERS = {"license", "model", "metadata", "meta", "created", "created_at", "timestamp", "date"}
_SIZES = {"width", "height", "image_width", "image_height"}  # of the file, which contains them
_KINDS = ("relevance", "image_correspondence", "visual_dependency", "formatting")
_RATINGS = {f"{kind}_{what}" for kind in _KINDS for what in ("ratings", "min")}  # FineVision, of whole rows
_TOOLS = {"parallel_tool_calls"}  # OpenAI: execution of tools by its service
#: Columns about the origin or topic of a row that do not affect learning.
HARMLESS_COLUMNS = frozenset(_NAMES | _ORIGIN | _TOPIC | _OTHERS | _SIZES | _TOOLS | _RATINGS)


@dataclass(frozen=True)
class Columns:
    """Columns of the rows that a recipe takes, in one form.

    Attributes:
        needs: Rows have one or more columns of each of these groups.
        also: Other columns that the recipe expects in such rows.
        whole: Whether the needed columns tell all of a sample, whatever columns are beside them.
    """

    needs: tuple[Sequence[str], ...]
    also: Collection[str] = ()
    whole: bool = False

    def taken(self, columns: Collection[str]) -> frozenset[str]:
        """Returns which of a row's columns the recipe takes; none if the row has another form."""
        if not all(any(name in columns for name in group) for group in self.needs):
            return frozenset()
        known = {*self.also, *(name for group in self.needs for name in group)}
        return frozenset(name for name in columns if self.whole or name in known)


def fitting(takes: Mapping[str, Iterable[Columns]], columns: Collection[str]) -> list[str]:
    """Returns the recipes that rows with these columns are meant for.

    A recipe gives way to one that takes all columns that it takes, and others.

    Args:
        takes: What each recipe declares, by name.
        columns: Those of the rows.
    """
    taken = {name: frozenset().union(*(form.taken(columns) for form in forms)) for name, forms in takes.items()}
    return [name for name, own in taken.items() if own and not any(own < other for other in taken.values())]


class KeyLog:
    """Collects the keys of one row that its recipe does not use.

    Keys are named by their place, such as ``messages[].name``. Empty keys are ignored.
    """

    def __init__(self) -> None:
        self._harmless: set[str] = set()
        self._unknown: set[str] = set()

    def note(self, values: Mapping[str, Any], used: frozenset[str], harmless: frozenset[str], where: str = "") -> None:
        """Records the keys of a mapping that are not in ``used``.

        Args:
            values: The mapping. What is noted of a row's columns does not count as read: it changes no sample.
            used: Keys that the recipe reads.
            harmless: Harmless keys. Names that end in ``_id`` are harmless too.
            where: Prefix of the keys, such as ``messages[].``.
        """
        values = values.unrecorded if isinstance(values, ReadColumns) else values
        for key in values.keys() - used:
            if not is_empty(values[key]):
                known = key in harmless or key.endswith("_id")
                (self._harmless if known else self._unknown).add(encodable(where + key))

    def note_padding(self, where: str) -> None:
        """Records that a struct of Arrow, such as ``tools[].``, lost keys without a value."""
        self._harmless.add(f"{where}* (null)")

    @property
    def harmless(self) -> tuple[str, ...]:
        """Returns the harmless keys, sorted."""
        return tuple(sorted(self._harmless))

    @property
    def unknown(self) -> tuple[str, ...]:
        """Returns the other keys, sorted."""
        return tuple(sorted(self._unknown))


def is_empty(value: Any) -> bool:
    """Returns True for null, empty text and containers, and containers with only such values."""
    if isinstance(value, Mapping):
        return all(map(is_empty, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_empty, value))
    return value is None or (isinstance(value, str | bytes) and not value)


def filled(values: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    """Returns the keys with non-empty values."""
    return [key for key in keys if key in values and not is_empty(values[key])]
