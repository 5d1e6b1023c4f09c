"""A recipe, alone in its module: workers import what is here."""

from __future__ import annotations

from vlmdata.errors import SourceError
from vlmdata.preprocess.conversation import Conversation
from vlmdata.preprocess.row import Row


class Refusing:
    """A recipe that cannot start."""

    def __init__(self) -> None:
        raise SourceError("the word list is not installed")

    def __call__(self, row: Row) -> Conversation:
        raise NotImplementedError
