"""Rows with several answers to one question, or several captions of one image."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from vlmdata.preprocess.reject import RowRejected, excerpt
from vlmdata.reasons import Reason


class Pick(StrEnum):
    """Which of several answers are learned."""

    COMMON = "common"
    FIRST = "first"
    EACH = "each"


#: Key of the text of an answer that is an object: VQAv2's, and that of refCOCO in jxu124's form.
_TEXT_KEYS = ("answer", "sent")


def texts_in(value: Any, field: str) -> list[str]:
    """Returns the texts of a column: a text, or a list of texts or of objects with one.

    Texts are stripped of surrounding white space. Empty ones are left out.

    Raises:
        RowRejected: MALFORMED_MESSAGES for anything else.
    """
    found = []
    for i, each in enumerate(value if isinstance(value, list) else [value]):
        text = each
        if isinstance(each, Mapping):
            text = next((each[key] for key in _TEXT_KEYS if key in each), each)
        if not isinstance(text, str):
            where = f"{field}[{i}]" if isinstance(value, list) else field
            raise RowRejected(Reason.MALFORMED_MESSAGES, f"{where} is not text: {excerpt(each)}")
        if text.strip():
            found.append(text.strip())
    return found


def picked(texts: Sequence[str], pick: Pick, what: str) -> list[str]:
    """Returns the texts to learn: one, or each distinct one.

    Args:
        texts: The texts of a row.
        pick: Which. Of several texts that are equally common, the first counts.
        what: What they are, for messages.

    Raises:
        RowRejected: EMPTY_ANSWER if there is none.
    """
    if not texts:
        raise RowRejected(Reason.EMPTY_ANSWER, f"{what} is empty")
    if pick is Pick.EACH:
        return list(dict.fromkeys(texts))
    return [Counter(texts).most_common(1)[0][0] if pick is Pick.COMMON else texts[0]]
