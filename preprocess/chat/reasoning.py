"""Compares the reasoning and the words of an answer with what the chat template wrote of them.

A template may take a part of the text for reasoning, and drop what it says besides. So the row alone tells which part
of an answer is reasoning, and what the template wrote is compared with it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from vlmdata.preprocess.chat.pieces import missing_piece, template_error
from vlmdata.preprocess.chat.targets import Turn
from vlmdata.preprocess.conversation import Conversation, Message
from vlmdata.preprocess.reject import RowRejected, excerpt
from vlmdata.reasons import Reason

_REMEDY = 'Give reasoning as reasoning_content; an empty one ("") keeps think tags as text'


def reasoning_and_words(answer: Message, think: tuple[str, str] | None) -> tuple[str, str]:
    """Returns the reasoning of an answer and what it says after it.

    Reasoning in the text is the block that begins it, or all before an end of a block on a line of its own, as a model
    says it whose prompt opened the block. Marks elsewhere are text.
    """
    if answer.reasoning is not None or think is None:
        return answer.reasoning or "", answer.text
    opening, closing = (mark.strip() for mark in think)
    before, found, words = answer.text.partition(closing)
    begun = before.lstrip().startswith(opening)
    own_line = not (before.rpartition("\n")[2] + words.partition("\n")[0]).strip()
    if not found or not (begun or (own_line and opening not in before)):
        return "", answer.text
    return before.strip().removeprefix(opening), words


def require_words(answer: Message, turn: Turn, text: str, number: int, think: tuple[str, str] | None) -> None:
    """Checks that a turn has the words of its message, and no others as reasoning.

    Args:
        answer: The message.
        turn: Its turn.
        text: The rendered text.
        number: Number of the assistant turn, from 1.
        think: Marks of the family.

    Raises:
        RowRejected: TEMPLATE_ERROR if text is lost, or learned as what it is not.
    """
    reasoning, words = reasoning_and_words(answer, think)
    said, block = text[turn.answer : turn.stop], text[turn.body : turn.answer]
    if think and block and said.startswith(think[0].strip()):
        raise template_error(
            f"wrote a think block in assistant turn {number}, and the one in the message's text after it; give "
            "that reasoning as reasoning_content"
        )
    if think and block and (found := [mark.strip() for mark in think if mark.strip() in (answer.reasoning or "")]):
        raise RowRejected(
            Reason.MALFORMED_MESSAGES,
            f"the reasoning_content of assistant turn {number} has {found[0]}, which the chat template writes around "
            f"it: {excerpt(answer.reasoning, 60)!r}. Give it without think tags",
        )
    for part, written in ((words, said), (reasoning, block if turn.reasoning and block else None)):
        if written is not None and missing_piece([part], written) is not None:
            lost = missing_piece(_between_marks(part, think), written) or part
            marked = any(mark.strip() in answer.text for mark in think or ())
            raise template_error(
                f"wrote {excerpt(text[turn.body : turn.stop], 60)!r} as assistant turn {number}; the message says "
                f"{excerpt(lost.strip(), 60)!r}, which is left out or moved" + (f". {_REMEDY}" if marked else "")
            )
    if turn.reasoning and block and not reasoning.strip():
        raise template_error(
            f"took {excerpt(block, 60)!r} for the reasoning of assistant turn {number}, which has none. {_REMEDY}"
        )


def _between_marks(text: str, think: tuple[str, str] | None) -> list[str]:
    """Splits a text at marks of reasoning."""
    marks = "|".join(re.escape(mark.strip()) for mark in think or ())
    return [piece for piece in re.split(marks, text) if piece.strip()] if marks else [text]


def require_no_marks(answer: Message, turn: Turn, text: str, number: int, think: tuple[str, str] | None) -> None:
    """Checks that what is learned of a turn without its reasoning has no marks of further reasoning.

    Raises:
        RowRejected: UNSUPPORTED_CONTENT if it has.
    """
    said = text[turn.answer : turn.stop]
    if answer.reasoning is None and (found := [mark.strip() for mark in think or () if mark.strip() in said]):
        raise RowRejected(
            Reason.UNSUPPORTED_CONTENT,
            f"assistant turn {number} says {found[0]} elsewhere than around a block that begins it, near "
            f"{excerpt(said, 60)!r}, and --train-think never learns no reasoning. {_REMEDY}",
        )


def dropped_reasoning(
    conversation: Conversation, text: str, turns: Sequence[Turn], think: tuple[str, str] | None
) -> list[int]:
    """Returns the numbers of the assistant turns, from 1, whose reasoning the template left out."""
    found = []
    for number, (answer, turn) in enumerate(zip(conversation.answers, turns, strict=True), start=1):
        reasoning, words = reasoning_and_words(answer, think)
        # A template may write reasoning without a think block, but before the answer.
        written = turn.reasoning or missing_piece([reasoning, words], text[turn.body : turn.stop]) is None
        if reasoning.strip() and not written:
            found.append(number)
    return found
