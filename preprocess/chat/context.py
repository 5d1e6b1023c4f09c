"""Compares what a sample tells the model before an answer with what inference tells it.

Chat templates write the last turn of the assistant in another way than earlier ones: with its reasoning, or with an
empty think block. A sample of a whole conversation has only one last turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from preprocess.chat.agreement import missing_piece
from preprocess.chat.render import Renderer
from preprocess.chat.targets import Turn
from preprocess.conversation import Conversation, Message
from preprocess.reject import RowRejected


def up_to_answers(conversation: Conversation) -> Iterator[tuple[Message, Conversation]]:
    """Yields each assistant message, and the conversation that ends with it."""
    for number, message in enumerate(conversation.messages, start=1):
        if message.role == "assistant":
            yield message, replace(conversation, messages=conversation.messages[:number])


def dropped_reasoning(
    conversation: Conversation, text: str, turns: Sequence[Turn], think: tuple[str, str] | None
) -> list[int]:
    """Returns the numbers of the assistant turns, from 1, whose reasoning the template left out."""
    found = []
    for number, (answer, turn) in enumerate(zip(conversation.answers, turns, strict=True), start=1):
        reasoning, words = _reasoning_and_words(answer, think)
        # A template may write reasoning without a think block, but before the answer.
        written = turn.reasoning or missing_piece([reasoning, words], text[turn.body : turn.stop]) is None
        if reasoning.strip() and not written:
            found.append(number)
    return found


def _reasoning_and_words(answer: Message, think: tuple[str, str] | None) -> tuple[str, str]:
    """Returns the reasoning of a turn and what it says after it. Templates read reasoning from the text, too."""
    if answer.reasoning is not None or think is None:
        return answer.reasoning or "", answer.text
    before, _, words = answer.text.rpartition(think[1].strip())
    return before.strip().removeprefix(think[0].strip()), words


def is_unlike_inference(
    renderer: Renderer, conversation: Conversation, text: str, turns: Sequence[Turn], weights: Sequence[float]
) -> bool:
    """True if a learned turn follows another text than it does at inference, where it is the last turn.

    The first learned turn decides: of all it is the furthest from the end.
    """
    first = next(number for number, weight in enumerate(weights) if weight)
    turn, (message, alone) = turns[first], list(up_to_answers(conversation))[first]
    if message is conversation.messages[-1]:
        return False
    try:
        at_inference = renderer.render(alone).text
    except RowRejected:
        return True  # the template refuses to end there, so no inference does
    return at_inference[: turn.stop].rstrip() != text[: turn.stop].rstrip()
