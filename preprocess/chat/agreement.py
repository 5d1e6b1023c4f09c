"""Checks that the output of the chat template and tokenizer matches the conversation.

Templates and tokenizers are third-party code. One that moves a message, loses an image or builds a special token from
the data's text would teach something that is not in the data. So every row is compared with its conversation.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from vlmdata.families import Family
from vlmdata.families.chat import IMAGE, VIDEO
from vlmdata.preprocess.chat.pieces import missing_piece, template_error
from vlmdata.preprocess.chat.reasoning import require_words
from vlmdata.preprocess.chat.render import Rendered, Renderer
from vlmdata.preprocess.chat.targets import Tokens, Turn
from vlmdata.preprocess.chat.tokenizer import ChatTokenizer
from vlmdata.preprocess.conversation import Conversation, ImagePart, MediaPart, Message, TextPart, VideoPart
from vlmdata.preprocess.reject import RowRejected, excerpt
from vlmdata.reasons import Reason
from vlmdata.wording import counted


def require_conversation(
    conversation: Conversation,
    rendered: Rendered,
    tokens: Tokens,
    turns: list[Turn],
    learned: Collection[int],
    tokenizer: ChatTokenizer,
) -> None:
    """Compares a rendered conversation with its messages.

    Raises:
        RowRejected: TEMPLATE_ERROR if a turn, an image or a text is missing or misplaced.
    """
    text = rendered.text
    begin = tokenizer.info.turns.begin
    if begin >= 0 and tokens.places(begin) != [0]:
        times = counted(len(tokens.places(begin)), "time")
        raise template_error(f"wrote {tokenizer.family.chat.begin} {times}; the text must begin with one")
    _require_headers(text, tokens, tokenizer, learned)
    _require_items(conversation.media, tokens, tokenizer, rendered.enclosed_videos)
    for message in conversation.messages:
        if message.role == "system" and missing_piece([message.text], text) is not None:
            raise template_error(f"left out the system prompt {excerpt(message.text, 60)!r}")
    _require_tools(conversation, text)
    for number, stretch in enumerate(_stretches(conversation)):
        _require_stretch(number, stretch, text, tokens, turns, tokenizer)
    if tokenizer.info.turns.response:
        _require_names(conversation, text, tokens, tokenizer.info.turns.response)


def _require_names(conversation: Conversation, text: str, tokens: Tokens, marks: tuple[int, ...]) -> None:
    """Checks that each response has the name of its tool, where templates write it."""
    starts, ends = (tokens.starts[tokens.places(mark)].tolist() for mark in marks)
    calls: Sequence[Mapping[str, Any]] = ()
    names = []
    for message in conversation.messages:
        calls = calls if message.role == "tool" else message.tool_calls
        names += [called_name(message, calls)] if message.role == "tool" else []
    for name, end in zip(names, ends, strict=True):
        written = text[starts[bisect_left(starts, end) - 1] : end]
        if name is not None and name not in written:
            raise template_error(f"wrote {excerpt(written, 60)!r} as a response of the tool {name!r}")


def _require_tools(conversation: Conversation, text: str) -> None:
    """Checks that the text names the offered tools, besides where messages do: some templates write none."""
    if not conversation.tools:
        return
    said = "\n".join(message.text for message in conversation.messages)
    for tool in conversation.tools:
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str) and not any(
            text.count(form) > said.count(form) for form in (name.strip(), json.dumps(name)[1:-1])
        ):
            raise template_error(
                f"left out the definition of the tool {excerpt(name, 60)!r}. Drop the tools of the row, or use a "
                "template that writes them"
            )


def require_ids(conversation: Conversation) -> None:
    """Checks that ids tell the call of each response, for templates that write the tool's name with it.

    Raises:
        RowRejected: TEMPLATE_ERROR if they do not.
    """
    calls: Sequence[Mapping[str, Any]] = ()
    for number, message in enumerate(conversation.messages, start=1):
        if message.role != "tool":
            calls = message.tool_calls
        elif called_name(message, calls) is None:
            raise template_error(
                f"writes the name of a tool with its response, and message {number} has tool_call_id "
                f"{message.call_id!r}, which is the id of no call before it, or of several"
                + (f", or of another tool than {message.tool_name!r}" if message.tool_name is not None else "")
                + ". Give each call an id, and each response the tool_call_id of its call, or the name of its tool"
            )


def called_name(response: Message, calls: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns the name of the tool that responds; None if the message does not tell it.

    Templates take the name of the call with the response's id, where none equals none, else the response's name.
    """
    named = [call.get("name") for call in calls if call.get("id") == response.call_id]
    told = response.tool_name
    if len(named) == 1 and told in (None, named[0]):
        return named[0]
    known = told is not None and any(call.get("name") == told for call in calls)
    return told if known and response.call_id is None and set(named) <= {told} else None


def remedy_for_calls(conversation: Conversation, family: Family) -> str:
    """Says, as the end of a message, why turns are missing in a conversation with calls of tools; "" without calls."""
    if not any(message.tool_calls for message in conversation.answers):
        return ""
    if family.chat.tool_response is not None:
        return (
            ". The conversation calls tools: give a message either calls or text, and each call its response, then an "
            "answer, or drop rows with tool_calls"
        )
    return (
        f". The conversation calls tools, and templates of the family {family.name} may write a call, the tool's "
        "response and the next answer as one turn, in which vlmdata cannot tell what is learned. Drop rows with "
        "tool_calls, or use a tokenizer whose template ends the turn after each call"
    )


def require_reserved(rendered: Rendered, tokens: Tokens, tokenizer: ChatTokenizer) -> None:
    """Checks that reserved ids are exactly where their texts were written, despite normalisation.

    Raises:
        RowRejected: SPECIAL_TOKEN_TEXT if the data forged one, TEMPLATE_ERROR if one was lost.
    """
    at = tokens.reserved
    found = list(zip(tokens.starts[at].tolist(), tokens.ends[at].tolist(), strict=True))
    if found == list(rendered.reserved_spans):
        return
    for token, (start, stop) in zip(tokens.ids[at].tolist(), found, strict=True):
        if (start, stop) not in rendered.reserved_spans:
            raise RowRejected(
                Reason.SPECIAL_TOKEN_TEXT,
                f"the tokenizer makes the special token {tokenizer.hf.convert_ids_to_tokens(token)} of the text "
                f"{excerpt(rendered.text[start:stop], 40)!r}",
            )
    lost, end = next(span for span in rendered.reserved_spans if span not in found)
    raise RowRejected(
        Reason.TEMPLATE_ERROR,
        f"the tokenizer does not make one token of {rendered.text[lost:end]} in "
        f"{excerpt(rendered.text[max(0, lost - 20) : end + 20], 60)!r}",
    )


def _require_headers(text: str, tokens: Tokens, tokenizer: ChatTokenizer, learned: Collection[int]) -> None:
    """Checks the ids of assistant headers. A tokenizer may merge them with the text that follows.

    In turns that are not learned the last token of the header may differ, as it does at inference; the others tell
    whose turn it is.
    """
    ids = tokenizer.info.turns
    header = list(ids.assistant)
    opening = tokenizer.family.chat.turn_start + tokenizer.family.chat.assistant_header
    for at in tokens.places(ids.start):
        start = int(tokens.starts[at])
        needed = len(header) if start + len(opening) in learned else max(len(header) - 1, 1)
        found = tokens.ids[at + 1 : at + 1 + len(header)].tolist()
        if text.startswith(opening, start) and found[:needed] != header[:needed]:
            turn = text[int(tokens.ends[at]) :]
            raise RowRejected(
                Reason.TEMPLATE_ERROR,
                f"the tokenizer encodes the header of the turn {excerpt(turn, 40)!r} as {found} instead of "
                f"{header}: it merges with the answer",
            )


def _require_items(media: Sequence[MediaPart], tokens: Tokens, tokenizer: ChatTokenizer, enclosed: bool) -> None:
    """Checks for the placeholders of each item, each between the family's marks, and no further marks."""
    expected = Counter[int]()  # of each mark
    for kind, found in tokenizer.info.items.items():
        parts = [part for part in media if kind_of(part) == kind]
        blocks = sum(map(blocks_in_text, parts))
        if len(at := tokens.places(found.token)) != blocks:
            wanted = counted(len(parts), kind) + (f" with {blocks} times" if blocks != len(parts) else "")
            raise template_error(f"wrote {counted(len(at), f'{kind} placeholder')} for {wanted}")
        # The template's own marks enclose the blocks of a video, unless the layout drops them.
        outer = sum(isinstance(part, VideoPart) and bool(part.seconds) for part in parts)
        pairs = blocks + (outer if enclosed else 0)
        for mark in {*found.before, *found.after}:
            expected[mark] += pairs
        if not blocks:
            continue
        around = np.arange(len(found.ids)) + np.array(at)[:, None] - len(found.before)
        inside = around[0, 0] >= 0 and around[-1, -1] < len(tokens.ids)
        if not inside or (tokens.ids[around] != found.ids).any():
            raise _wrong_marks(kind, blocks, tokens, tokenizer)
    for kind, found in tokenizer.info.items.items():
        if any(len(tokens.places(mark)) != expected[mark] for mark in (*found.before, *found.after)):
            raise _wrong_marks(kind, len(tokens.places(found.token)), tokens, tokenizer)


def kind_of(part: MediaPart) -> str:
    """Returns the kind of an item."""
    return IMAGE if isinstance(part, ImagePart) else VIDEO


def blocks_in_text(part: MediaPart) -> int:
    """Returns the number of placeholders of an item in the text."""
    return len(part.seconds) or 1 if isinstance(part, VideoPart) else 1


def _wrong_marks(kind: str, blocks: int, tokens: Tokens, tokenizer: ChatTokenizer) -> RowRejected:
    item, spell = tokenizer.info.items[kind], tokenizer.hf.convert_ids_to_tokens
    counts = {mark: len(tokens.places(mark)) for mark in (*item.before, *item.after)}
    found = " and ".join(f"{count} {spell(mark)}" for mark, count in counts.items())
    return template_error(
        f"wrote {found} around {counted(blocks, f'{kind} placeholder')}; each {spell(item.token)} must be "
        f"directly between the two, as models of the family {tokenizer.family.name} require"
    )


def _stretches(conversation: Conversation) -> Iterator[tuple[list[Message], Message | None]]:
    """Splits the conversation after each assistant message: the messages before it, and the message.

    The last stretch, which may be empty, has no assistant message.
    """
    before: list[Message] = []
    for message in conversation.messages:
        if message.role == "assistant":
            yield before, message
            before = []
        else:
            before.append(message)
    yield before, None


def _require_stretch(
    number: int,
    stretch: tuple[list[Message], Message | None],
    text: str,
    tokens: Tokens,
    turns: list[Turn],
    tokenizer: ChatTokenizer,
) -> None:
    """Checks that the text between two assistant turns has the images and user texts of the messages between them."""
    before, answer = stretch
    start = turns[number - 1].stop if number else 0
    stop = turns[number].body if answer is not None else len(text)
    first, last = tokens.starts.searchsorted((start, stop)).tolist()
    where = f"before assistant turn {number + 1}" if answer is not None else "after the last assistant turn"
    for kind, token in tokenizer.placeholders.items():
        found = tokens.count(token, first, last)
        parts = [part for message in before for part in message.media if kind_of(part) == kind]
        if found != sum(map(blocks_in_text, parts)):
            raise template_error(
                f"wrote {counted(found, f'{kind} placeholder')} {where}, where the messages have "
                f"{counted(len(parts), kind)}"
            )
    if tokenizer.info.turns.response:
        responses = tokens.count(tokenizer.info.turns.response[1], first, last)
        if responses != (given := sum(message.role == "tool" for message in before)):
            raise template_error(
                f"wrote {counted(responses, 'response')} of tools {where}, where the messages have {given}. A response "
                "must follow the call of its tool"
            )
    said = [
        part.text
        for message in before
        if message.role == "user"
        for part in message.parts
        if isinstance(part, TextPart)
    ]
    missing = missing_piece(said, text[start:stop])
    if missing is not None:
        raise template_error(f"left out or moved the user's text {excerpt(missing, 60)!r}, which belongs {where}")
    if answer is None:
        return
    turn = turns[number]
    _require_calls(answer, text[turn.body : turn.stop], number + 1)
    require_words(answer, turn, text, number + 1, tokenizer.family.chat.think)


def _require_calls(answer: Message, written: str, number: int) -> None:
    """Checks that a turn names the tools that its message calls: some templates leave out calls."""
    for call in answer.tool_calls:
        name = call.get("name")
        if isinstance(name, str) and name not in written:
            raise template_error(
                f"left out the call of the tool {excerpt(name, 60)!r} in assistant turn {number}. Drop rows with "
                "tool_calls, or use a template that writes them"
            )


def up_to_answers(conversation: Conversation) -> Iterator[tuple[Message, Conversation]]:
    """Yields each assistant message, and the conversation that ends with it."""
    for number, message in enumerate(conversation.messages, start=1):
        if message.role == "assistant":
            yield message, replace(conversation, messages=conversation.messages[:number])


def is_unlike_inference(
    renderer: Renderer, conversation: Conversation, text: str, turns: Sequence[Turn], weights: Sequence[float]
) -> bool:
    """True if a learned turn follows another text than it does at inference, where it is the last turn.

    It lacks the think block that the prompt of inference opens, or the template writes earlier turns otherwise. There,
    the first learned turn decides: of all it is the furthest from the end.
    """
    lacking = (turn.opened and turn.body == turn.answer and not turn.reasoning for turn in turns)
    if any(lacks and weight for lacks, weight in zip(lacking, weights, strict=True)):
        return True
    first = next(number for number, weight in enumerate(weights) if weight)
    answers = (at for at, message in enumerate(conversation.messages) if message.role == "assistant")
    length = next(islice(answers, first, None)) + 1
    if length == len(conversation.messages):
        return False
    turn, alone = turns[first], replace(conversation, messages=conversation.messages[:length])
    try:
        at_inference = renderer.render(alone).text
    except RowRejected:
        return True  # the template refuses to end there, so no inference does
    return at_inference[: turn.stop].rstrip() != text[: turn.stop].rstrip()
