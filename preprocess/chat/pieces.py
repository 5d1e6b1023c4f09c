"""Finds pieces of data in what a chat template wrote."""

from __future__ import annotations

from collections.abc import Sequence

from vlmdata.preprocess.reject import RowRejected
from vlmdata.reasons import Reason


def template_error(message: str) -> RowRejected:
    """Returns the rejection of a row whose template wrote something else."""
    return RowRejected(Reason.TEMPLATE_ERROR, f"the chat template {message}")


def missing_piece(pieces: Sequence[str], text: str) -> str | None:
    """Returns the first piece that is not in ``text`` after the previous pieces, ignoring whitespace."""
    cursor = 0
    for piece in pieces:
        at = text.find(piece.strip(), cursor)
        if at < 0:
            return _missing_words(pieces, text)
        cursor = at + len(piece.strip())
    return None


def _missing_words(pieces: Sequence[str], text: str) -> str | None:
    """Like :func:`missing_piece`, if the template changed the whitespace within a piece."""
    cursor, words = 0, "".join(text.split())
    for piece in pieces:
        squeezed = "".join(piece.split())
        at = words.find(squeezed, cursor)
        if at < 0:
            return piece
        cursor = at + len(squeezed)
    return None
