"""Loss weights of turns and rows, with any of the supported names."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from vlmdata.preprocess.conversation import Role
from vlmdata.preprocess.recipes.chat.tools import json_or_text
from vlmdata.preprocess.recipes.keys import filled
from vlmdata.preprocess.reject import RowRejected, excerpt
from vlmdata.reasons import Reason
from vlmdata.wording import with_article

#: Flags of a turn: ms-swift's ``loss`` and ``loss_scale``, OpenAI's ``weight``, Axolotl's ``train`` and ``training``.
TURN_WEIGHTS = ("loss", "train", "training", "weight", "loss_scale", "loss_weight")
#: Columns with a row's weight.
ROW_WEIGHTS = ("weight", "loss_weight", "loss_scale")


def turn_weight(turn: Mapping[str, Any], role: Role, where: str) -> float | None:
    """Returns the product of a turn's flags; None without flags, and for turns that are never learned.

    Args:
        turn: The turn as in the row, without nulls.
        role: Role of the speaker.
        where: Place of the turn, for messages.

    Raises:
        RowRejected: MALFORMED_MESSAGES for a flag that is not a weight; UNSUPPORTED_CONTENT for a turn of another role
            that should be learned.
    """
    weight = None
    for key in filled(turn, TURN_WEIGHTS):
        factor = _weight(turn[key], f"{where}.{key}")
        if factor > 0 and role != "assistant":
            raise RowRejected(
                Reason.UNSUPPORTED_CONTENT,
                f"{where}.{key} is {turn[key]} in {with_article(role)} turn; only assistant turns are learned. "
                "Set it to 0 or omit it.",
            )
        weight = factor if weight is None else weight * factor
    return weight if role == "assistant" else None


def row_weight(values: Mapping[str, Any]) -> float:
    """Returns the product of a row's weights; 1 without weights.

    Raises:
        RowRejected: MALFORMED_MESSAGES for a value that is not a weight.
    """
    given = filled(values, ROW_WEIGHTS)
    return math.prod((_weight(json_or_text(values[key]), key) for key in given), start=1.0)


def _weight(value: Any, where: str) -> float:
    # Python's whole numbers have no end, and those beyond a float's are none.
    if not isinstance(value, bool | int | float) or not 0 <= value <= sys.float_info.max:
        shown = repr(excerpt(value)) if isinstance(value, str) else excerpt(value)
        raise RowRejected(
            Reason.MALFORMED_MESSAGES,
            f"{where} is {shown}; a loss weight is true, false or a number of at least 0",
        )
    return float(value)
