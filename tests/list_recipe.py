"""A recipe whose rows say what it returns, and a source of such rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.chat_rows import write_jsonl
from tests.conftest import build_dataset
from vlmdata.preprocess.conversation import Conversation, Message, TextPart
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.row import Row
from vlmdata.reasons import Reason

NAME = "tests.list_recipe:Lists"

#: Every shape of row; :data:`LIST_KEYS` and :data:`LIST_REJECTS` say what becomes of them.
LIST_ROWS: list[dict[str, Any]] = [
    {"form": "bare", "samples": ["One."]},
    {"form": "list", "samples": ["Two.", "", "Three.", None]},
    {"form": "list", "samples": []},
    {"form": "tuple", "samples": ["Four."]},
    {"form": "bare", "samples": [""]},
    {"form": "generator", "samples": ["Five.", "Six."]},
    {"form": "generator", "samples": ["Seven.", "raise"]},
    {"form": "list", "samples": ["", "Eight."]},
]
LIST_KEYS = [
    "000000000",
    "000000001-000",
    "000000001-002",
    "000000003-000",
    "000000005-000",
    "000000005-001",
    "000000007-001",
]
LIST_REJECTS: list[tuple[int, int | None, str]] = [
    (1, 1, "empty_answer"),
    (1, 3, "missing_column"),
    (2, None, "no_samples"),
    (4, None, "empty_answer"),
    (6, None, "unexpected_error"),
    (7, 0, "empty_answer"),
]


class Lists:
    """Answers in ``samples``: as a bare conversation, list, tuple or generator, by ``form``."""

    def __call__(self, row: Row) -> Any:
        """A null is refused, ``raise`` raises."""
        made = self._made(row.values["samples"])
        forms = {"bare": next, "list": list, "tuple": tuple, "generator": iter}
        return forms[row.values["form"]](made)  # type: ignore[operator]

    def _made(self, answers: list[str | None]) -> Iterator[Conversation | RowRejected]:
        for answer in answers:
            if answer is None:
                yield RowRejected(Reason.MISSING_COLUMN, "a null")
            elif answer == "raise":
                raise KeyError("answer")
            else:
                question = Message("user", (TextPart("What?"),))
                yield Conversation((question, Message("assistant", (TextPart(answer),))))


def build_lists(folder: Path, rows: list[dict[str, Any]] | None = None, **options: Any) -> Path:
    """A dataset of :data:`LIST_ROWS`, or of other rows."""
    source = write_jsonl(folder / "lists.jsonl", LIST_ROWS if rows is None else rows)
    return build_dataset(source, folder / "dataset", recipe=NAME, **options)
