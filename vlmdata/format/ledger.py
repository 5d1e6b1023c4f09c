"""``rejected.jsonl``: one line for each rejected candidate, with the reason.

A candidate is a row, or an element of a row's list.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from vlmdata.errors import DatasetFormatError
from vlmdata.reasons import Reason
from vlmdata.wording import encodable


@dataclass(frozen=True)
class Rejection:
    """A rejected row, or a rejected sample of a row's list."""

    row: int  # source row
    reason: Reason  # reason for the rejection
    message: str  # description of the problem, with field and value. Halves of characters in it become text.
    sample: int | None = None  # number within the row's list; None if the whole row was rejected
    file: str | None = None  # name of its file in the source; None if unknown
    file_row: int | None = None  # number of the row in that file, from 0
    id: str | int | None = None  # what the data calls the row, if a column tells

    @property
    def place(self) -> str:
        """Returns where the row is in the source, in words; empty if unknown."""
        return place_text(self.file, self.file_row, self.id)

    def __post_init__(self) -> None:
        for name in ("message", "file", "id"):
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, encodable(value))

    def to_line(self) -> bytes:
        """Returns the ledger line with its newline, without fields that are None."""
        fields = {name: value for name, value in asdict(self).items() if value is not None}
        return (json.dumps(fields, ensure_ascii=False) + "\n").encode()


def place_text(file: str | None = None, file_row: int | None = None, id: str | int | None = None) -> str:
    """Returns where a row is in its source, in words, as far as known: ``b.jsonl, row 12, id x7``."""
    parts = [] if file is None else [f"{file}, row {file_row}"]
    return ", ".join([*parts, *([] if id is None else [f"id {id}"])])


def read_ledger(path: Path) -> Iterator[Rejection]:
    """Reads the rejections of a ledger file, in row order.

    Raises:
        DatasetFormatError: If a line is not a rejection.
    """
    with open(path, "rb") as file:  # as bytes: invalid UTF-8 is then a fault of one line
        for number, line in enumerate(file, start=1):
            try:
                fields = json.loads(line)
                row, sample = fields["row"], fields.get("sample")
                for name, value in (("row", row), ("sample", sample)):
                    if not (_is_number(value) or (name == "sample" and value is None)):
                        raise ValueError(f"{name} is {value!r}")
                place = {name: fields.get(name) for name in ("file", "file_row", "id")}
                yield Rejection(row, Reason(fields["reason"]), str(fields["message"]), sample, **place)
            except (KeyError, RecursionError, TypeError, ValueError) as error:
                raise DatasetFormatError(f"{path}:{number}: not a ledger line: {error}") from error


def first_rejections(path: Path, counts: Mapping[str, int], most: int) -> dict[str, list[Rejection]]:
    """Returns the first rejections, at most so many, of each reason in ``counts``, which has the number of all.

    Reads only as much of the ledger as needed.
    """
    found: dict[str, list[Rejection]] = {reason: [] for reason in counts}
    missing = sum(min(count, most) for count in counts.values())
    for rejection in read_ledger(path) if missing else ():
        if rejection.reason in found and len(found[rejection.reason]) < most:
            found[rejection.reason].append(rejection)
            missing -= 1
            if not missing:
                break
    return found


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63
