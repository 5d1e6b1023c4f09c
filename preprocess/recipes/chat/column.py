"""The files of a row's column, which content items and marks take in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlmdata.preprocess.recipes.chat.tools import parse_json
from vlmdata.preprocess.recipes.keys import filled
from vlmdata.preprocess.reject import RowRejected, excerpt
from vlmdata.reasons import Reason
from vlmdata.wording import counted, with_article


@dataclass(frozen=True)
class ColumnKind:
    """What a column holds.

    Attributes:
        noun: A file of it, for messages.
        mark: Stands for a file in text.
        columns: Names of the column.
        mismatch: Reason if files and places differ in number.
        sources: Keys with the file of a content item.
        foreign: Keys with the file in other forms: such an item must not take another file.
    """

    noun: str
    mark: str
    columns: tuple[str, str]
    mismatch: Reason
    sources: tuple[str, ...]
    foreign: tuple[str, ...]


class FileColumn:
    """The files of one row, and a check that each has its place.

    Attributes:
        name: The column with the files.
        files: The files, as in the row.
    """

    def __init__(self, values: Mapping[str, Any], kind: ColumnKind):
        self.name = _column(values, kind)
        self.files = _as_list(values.get(self.name), self.name)
        self._kind = kind
        self._taken = self._named = 0

    def named_by(self, item: Mapping[str, Any], where: str) -> str | None:
        """Returns the key of a content item that names its file; None if the item takes the next file of the column.

        Raises:
            RowRejected: If the item contradicts itself.
        """
        kind = self._kind
        sources = filled(item, kind.sources) or [key for key in kind.sources if key in item]
        if not sources:
            if foreign := filled(item, kind.foreign):
                held = f"{where} holds {foreign[0]}: {excerpt(item[foreign[0]])}"
                raise RowRejected(
                    Reason.UNSUPPORTED_CONTENT,
                    f"{held}; {with_article(kind.noun)} item names its file in one of {', '.join(kind.sources)}",
                )
            return None
        if any(item[key] != item[sources[0]] for key in sources[1:]):
            raise RowRejected(Reason.UNSUPPORTED_CONTENT, f"{where} names several {kind.noun}s: {', '.join(sources)}")
        self._named += 1
        return sources[0]

    def take(self, where: str, index: Any = None, remedy: str = "") -> tuple[str, Any]:
        """Returns the place and value of the next file.

        Args:
            where: The placeholder, for messages.
            index: The file's number in the data, which must match.
            remedy: Remedy if there is none.

        Raises:
            RowRejected: The kind's ``mismatch`` if there is none.
        """
        number, noun = self._taken, self._kind.noun
        if number >= len(self.files):
            there = f"{where} is placeholder {number + 1}, but the row has {counted(len(self.files), noun)}"
            raise RowRejected(self._kind.mismatch, f"{there}. {remedy}" if remedy else there)
        if index not in (None, number):
            raise RowRejected(
                self._kind.mismatch,
                f"{where}.index is {excerpt(index)}, but placeholders take the {noun}s of {self.name} in order and "
                f"this one takes {number}",
            )
        self._taken += 1
        return f"{self.name}[{number}]", self.files[number]

    @property
    def is_unmarked(self) -> bool:
        """Whether there are files, and the row has no place for any."""
        return bool(self.files) and not self._taken and not self._named

    def require_all_used(self, or_else: str = "") -> None:
        """Checks that every file has its place. ``or_else`` is a remedy if none has.

        Raises:
            RowRejected: The kind's ``mismatch``.
        """
        count, noun = len(self.files), self._kind.noun
        if self._taken == count or (self._taken == 0 and self._named == count):
            return  # a column that repeats the items' files (Qwen style) is not a mismatch
        if self._named:
            found = f"{counted(self._named, noun)} named by content items and {counted(self._taken, 'placeholder')}"
        else:
            found = f"{counted(self._taken, f'{noun} placeholder')} in the text"
        raise RowRejected(
            self._kind.mismatch,
            f"{found} for {counted(count, noun)} in {self.name}; write {self._kind.mark} where each belongs"
            f"{f', or {or_else}' if or_else and self.is_unmarked else ''}",
        )


def _column(values: Mapping[str, Any], kind: ColumnKind) -> str:
    """Returns the column with files. Both columns may have files if they are equal."""
    several, one = kind.columns
    given = filled(values, kind.columns)
    if len(given) == 2 and _as_list(values[several], several) != _as_list(values[one], one):
        raise RowRejected(
            kind.mismatch, f"the columns {several} and {one} have different {kind.noun}s; keep one of the columns"
        )
    return next((name for name in (*given, *kind.columns) if name in values), several)


def _as_list(value: Any, column: str) -> Sequence[Any]:
    if isinstance(value, str) and value.startswith("["):
        value = parse_json(value, column)
    if isinstance(value, list):
        return value
    return [value] if filled({column: value}, [column]) else []
