"""The exception that rejects a row, or one sample of its list."""

from __future__ import annotations

from vlmdata.reasons import Reason
from vlmdata.wording import encodable, excerpt

__all__ = ["RowRejected", "excerpt"]


class RowRejected(Exception):
    """Rejects the current row, or the current sample of its list. The run continues.

    Args:
        reason: Reason in the ledger.
        message: Description with field, value and, if helpful, the remedy.
    """

    def __init__(self, reason: Reason, message: str):
        self.reason = reason
        self.message = encodable(message)
        super().__init__(f"{reason.value}: {self.message}")
