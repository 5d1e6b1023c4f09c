"""How code deep in a row's processing says that the row, or one sample of its list, cannot be used."""

from __future__ import annotations

from vlmdata.format.ledger import Reason


class RowRejected(Exception):
    """This row, or this sample of the list that the row gave, is rejected; the run goes on.

    Args:
        reason: Which ledger reason.
        message: What was found: field, value, and where it helps the remedy.
    """

    def __init__(self, reason: Reason, message: str):
        super().__init__(f"{reason.value}: {message}")
        self.reason = reason
        self.message = message


def excerpt(value: object, limit: int = 80) -> str:
    """A value for an error message, cut to ``limit`` characters."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"
