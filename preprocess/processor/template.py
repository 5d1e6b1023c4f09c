"""Learns from a chat template how it writes turns and images, by rendering small conversations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from vlmdata.families.chat import ChatFormat

type Render = Callable[[list[dict[str, Any]]], str]

_TALK = (("user", "First question?"), ("assistant", "Answer one."), ("user", "Another one?"), ("assistant", "The end."))


#: Texts around reasoning, as most templates write them.
_THINK = ("<think>\n", "\n</think>\n\n")


class NotLearned(ValueError):
    """A template whose turns or images vlmdata cannot find."""


def learned_chat(render: Render, tokens: Collection[str], begin: str, source: str) -> ChatFormat:
    """Learns how a template writes turns.

    Args:
        render: Applies the template to messages.
        tokens: Texts of the added tokens.
        begin: Text of the token that begins texts; "" without one.
        source: Text of the template.

    Raises:
        NotLearned: If turns do not begin and end with tokens of their own.
    """
    text = render([{"role": role, "content": said} for role, said in _TALK])
    between, cursor = list[str](), 0
    for _, said in _TALK:
        at = text.find(said, cursor)
        if at < 0:
            raise NotLearned(f"it leaves out {said!r}")
        between.append(text[cursor:at])
        cursor = at + len(said)
    before, question, answer, again, after = *between, text[cursor:]
    turn_end = _first_token(answer, tokens)
    if question != again or not turn_end or turn_end != _first_token(after, tokens):
        raise NotLearned(f"it ends the answers of {text!r:.300} with no token of their own")
    opening = question.lstrip()
    opening = opening[len(turn_end) :].lstrip() if opening.startswith(turn_end) else opening
    turn_start = _first_token(opening, tokens)
    header = opening[len(turn_start) :]
    if not turn_start or (not header and turn_start in answer):
        raise NotLearned(f"it begins the answers of {text!r:.300} with no token of their own")
    return ChatFormat(
        turn_start=turn_start,
        turn_end=turn_end,
        assistant_header=header,
        think=_THINK if "<think>" in source else None,
        begin=begin if begin and before.startswith(begin) else "",
        end_of_text="",
    )


def _first_token(text: str, tokens: Collection[str]) -> str:
    """Returns the token with which a text begins, after whitespace; "" if it begins with none."""
    start = text.lstrip()
    return max((token for token in tokens if token and start.startswith(token)), key=len, default="")


def learned_image(render: Render, tokens: Collection[str], named: Sequence[str]) -> str:
    """Learns the token that a template writes for an image, which the processor replaces.

    Args:
        render: Applies the template to messages.
        tokens: Texts of the added tokens.
        named: Tokens that the processor names as those of images.

    Raises:
        NotLearned: If it writes none, or several of which none is named.
    """

    def asked(*parts: dict[str, str]) -> str:
        return render([{"role": "user", "content": [*parts, {"type": "text", "text": "Which?"}]}])

    bare, one, two = asked(), asked({"type": "image"}), asked({"type": "image"}, {"type": "image"})
    found = [
        token
        for token in tokens
        if token and one.count(token) == bare.count(token) + 1 and two.count(token) == bare.count(token) + 2
    ]
    chosen = [token for token in named if token in found] or found
    if not chosen:
        raise NotLearned(f"it writes no token for an image: {one!r:.200}")
    if len(chosen) > 1 and not any(token in found for token in named):
        raise NotLearned(f"it writes {' and '.join(sorted(chosen))} for an image, and the processor names none of them")
    return chosen[0]
