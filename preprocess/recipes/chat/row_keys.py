"""Rejects rows with columns that change the learning in unsupported ways. Such columns are never ignored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vlmdata.preprocess.conversation import Message
from vlmdata.preprocess.recipes.chat.images import BOUND_KEYS
from vlmdata.preprocess.recipes.chat.tools import ARGUMENTS
from vlmdata.preprocess.recipes.chat.weights import ROW_WEIGHTS
from vlmdata.preprocess.recipes.keys import is_empty
from vlmdata.preprocess.reject import RowRejected, excerpt
from vlmdata.reasons import Reason

#: Columns that are read with every form of turns.
USED_COLUMNS = frozenset(
    {
        "system",
        "system_prompt",
        "images",
        "image",
        "videos",
        "video",
        "tools",
        "functions",
        ARGUMENTS,
        *BOUND_KEYS,
        *ROW_WEIGHTS,
    }
)

_VIDEOS, _AUDIOS = frozenset({"videos", "video"}), frozenset({"audios", "audio"})
_PREFERENCE = frozenset(
    {
        "rejected_response",
        "rejected",
        "rejected_messages",
        "rejected_images",
        "chosen",
        "preferred_output",
        "non_preferred_output",
    }
)
_LABELS = frozenset({"label", "kto_tag"})
_FLAGS = frozenset({"loss", "train", "training"})
_BOX_COLUMN = "bbox"
_BOX_MARKS = ("<bbox>", "<ref-object>")
_REFUSED = _AUDIOS | _PREFERENCE | _LABELS


def refuse_row(values: Mapping[str, Any], *, reads_videos: bool = False) -> None:
    """Rejects rows with columns that a recipe does not support.

    Args:
        values: The row.
        reads_videos: Whether the recipe reads videos.

    Raises:
        RowRejected: UNSUPPORTED_CONTENT for videos that are not read and audio;
            PREFERENCE_DATA for pairs of a better and a worse answer, and for answers labelled good or bad; NO_TARGETS
            for rows marked as not learned.
    """
    for key in sorted(values.keys() & _FLAGS):
        if str(values[key]).lower() == "false":  # numbers may be measurements, such as a loss
            raise RowRejected(Reason.NO_TARGETS, f"nothing to learn: {key} of the row is {values[key]}")
    for key in sorted(values.keys() & (_REFUSED if reads_videos else _REFUSED | _VIDEOS)):
        value = values[key]
        if is_empty(value):
            continue
        if key in _AUDIOS | _VIDEOS:
            reads = "text, images and videos" if reads_videos else "text and images"
            raise RowRejected(
                Reason.UNSUPPORTED_CONTENT, f"{key} holds {excerpt(value)}; the recipe reads {reads} only"
            )
        if key in _PREFERENCE:
            raise RowRejected(
                Reason.PREFERENCE_DATA,
                f"{key} holds {excerpt(value)}: preference data, of which supervised training would learn only one "
                "side. To learn the better answer, make it the assistant's turn and drop this column.",
            )
        if key == "kto_tag" or str(value).lower() in ("true", "false"):  # other labels are classes
            raise RowRejected(
                Reason.PREFERENCE_DATA,
                f"{key} is {value}: the answer is labelled good or bad (KTO), which supervised training does not "
                "learn. Keep the rows with good answers and drop this column.",
            )


def refuse_box_marks(values: Mapping[str, Any], messages: Iterable[Message]) -> None:
    """Rejects text with marks for boxes of a column of their own. Those of ``objects`` are read.

    Raises:
        RowRejected: UNSUPPORTED_CONTENT.
    """
    if _BOX_COLUMN not in values or "objects" in values:
        return
    text = "".join(message.text for message in messages)
    mark = next((mark for mark in _BOX_MARKS if mark in text), None)
    if mark is not None:
        raise RowRejected(
            Reason.UNSUPPORTED_CONTENT,
            f"the text holds the mark {mark} for the content of {_BOX_COLUMN}; the recipe reads boxes from objects. "
            f'Write them there: {{"objects": {{"bbox": …, "ref": …}}}}',
        )
