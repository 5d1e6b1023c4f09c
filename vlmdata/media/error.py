"""The error of decoding and resizing for unusable items."""

from __future__ import annotations

from vlmdata.errors import VlmdataError
from vlmdata.reasons import Reason


class MediaError(VlmdataError):
    """An item cannot be decoded, or not resized as requested.

    Args:
        reason: Reason in the ledger of rejected rows.
        message: Description with field, value and, if helpful, the remedy.
    """

    def __init__(self, reason: Reason, message: str):
        super().__init__(f"{reason.value}: {message}")
        self.reason = reason
        self.message = message

    def __reduce__(self) -> tuple[type[MediaError], tuple[Reason, str]]:
        return type(self), (self.reason, self.message)  # a loader's worker sends it to the trainer's process
