"""How decoding and resizing say that an item's bytes cannot be used."""

from __future__ import annotations

from vlmdata.errors import VlmdataError
from vlmdata.format.ledger import Reason


class MediaError(VlmdataError):
    """An item cannot be decoded, or not brought to the size that is asked for.

    Args:
        reason: What it is in the ledger of rejected rows.
        message: What was found: field, value, and where it helps the remedy.
    """

    def __init__(self, reason: Reason, message: str):
        super().__init__(f"{reason.value}: {message}")
        self.reason = reason
        self.message = message

    def __reduce__(self) -> tuple[type[MediaError], tuple[Reason, str]]:
        return type(self), (self.reason, self.message)  # a loader's worker sends it to the trainer's process
