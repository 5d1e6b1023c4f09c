"""How code deep in a row's processing says that the row, or one sample of its list, cannot be used."""

from __future__ import annotations

from vlmdata.format.ledger import Reason
from vlmdata.wording import excerpt

__all__ = ["RowRejected", "excerpt"]


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
