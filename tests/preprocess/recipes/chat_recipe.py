"""Calling the chat recipe in tests, and showing what came of a row."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from vlmdata.preprocess.conversation import Conversation, TextPart
from vlmdata.preprocess.recipes.chat import Chat
from vlmdata.preprocess.recipes.chat.content import StrayMarks
from vlmdata.preprocess.recipes.media import MediaLoader
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.row import Row
from vlmdata.reasons import Reason


def convert(values: dict[str, Any], root: Path | None = None, stray: StrayMarks = StrayMarks.REJECT) -> Conversation:
    """What the recipe makes of a row."""
    media = MediaLoader(None if root is None else str(root), allow_urls=False)
    return Chat(Chat.Options(stray), media)(Row(0, values))


def check_rejected(values: dict[str, Any], reason: Reason, message: str) -> None:
    """Checks that a row is rejected with a reason and a message that matches a pattern."""
    with pytest.raises(RowRejected) as rejected:
        convert(values)
    found = rejected.value
    assert (found.reason, re.search(message, found.message) is not None) == (reason, True), found.message


def seen(conversation: Conversation) -> list[tuple[str, list[str]]]:
    """Every turn with its parts in order; an image is shown as its bytes in brackets."""
    return [
        (
            message.role,
            [part.text if isinstance(part, TextPart) else f"[{part.data.decode()}]" for part in message.parts],
        )
        for message in conversation.messages
    ]


def user(content: Any, **more: Any) -> list[dict[str, Any]]:
    """A question, and the answer ``yes``."""
    return [{"role": "user", "content": content, **more}, {"role": "assistant", "content": "yes"}]


def answer(**more: Any) -> dict[str, Any]:
    """A row whose assistant turn has further keys."""
    return {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes", **more}]}
