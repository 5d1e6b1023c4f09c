"""Finds the turns of a row in any of the supported columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from vlmdata.preprocess import json_text
from vlmdata.preprocess.recipes.chat.tools import parse_json
from vlmdata.preprocess.recipes.chat.turns import RowTurn, read_turn, text_turn
from vlmdata.preprocess.recipes.keys import filled
from vlmdata.preprocess.reject import RowRejected, excerpt
from vlmdata.reasons import Reason

#: Columns that hold a list of turns.
LIST_COLUMNS = ("messages", "conversations", "conversation")
#: Columns that hold the last question and its answer: alpaca's, ms-swift's, TRL's.
PAIRS = (("instruction", "output"), ("query", "response"), ("prompt", "completion"))
_SYSTEM_COLUMNS = ("system", "system_prompt")
#: Column with the questions and answers of the Cauldron and FineVision.
_EXCHANGES = "texts"
_ASKED, _SAID = "user", "assistant"
#: Keys of question and answer in a list of turns (ms-swift).
_ASKED_IN_LIST, _SAID_IN_LIST = "human", "assistant"


@dataclass(frozen=True)
class ChatForm:
    """The turns of a row.

    Attributes:
        turns: The turns, in order.
        columns: The columns of the turns.
    """

    turns: tuple[RowTurn, ...]
    columns: frozenset[str]


def read_form(values: Mapping[str, Any]) -> ChatForm:
    """Returns the turns of a row, preceded by a system prompt from its own column.

    Args:
        values: Columns that are not null.

    Raises:
        RowRejected: MISSING_COLUMN without turns; MALFORMED_MESSAGES.
    """
    lists = filled(values, LIST_COLUMNS)
    if len(lists) > 1:
        raise RowRejected(Reason.MALFORMED_MESSAGES, f"turns are in both {lists[0]} and {lists[1]}; keep only one")
    pair = None if lists else _pair(values)
    if pair is not None:
        form = _from_pair(values, *pair)
    elif not lists and filled(values, [_EXCHANGES]):
        form = ChatForm(tuple(_exchanges(values[_EXCHANGES])), frozenset({_EXCHANGES}))
    else:
        name = next((name for name in (*lists, *LIST_COLUMNS) if name in values), None)
        if name is None:
            columns = ", ".join(values) or "none"
            raise RowRejected(
                Reason.MISSING_COLUMN,
                "neither messages nor conversations, nor texts, nor a pair such as instruction and output; columns "
                f"with values: {columns}",
            )
        if filled(values, ["history"]):
            raise RowRejected(
                Reason.MALFORMED_MESSAGES, f"history and {name} are both given; move its turns into {name} and drop it"
            )
        form = ChatForm(tuple(_list(values[name], name)), frozenset({name, "history"}))
    _refuse_split_calls(form.turns)
    return ChatForm(_with_system_prompt(values, form.turns), form.columns)


def _pair(values: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns the columns of question and answer: a complete pair, or the only question and the only answer."""
    complete = [pair for pair in PAIRS if len(filled(values, pair)) == 2]
    if len(complete) > 1:
        shown = " and ".join("/".join(pair) for pair in complete)
        raise RowRejected(Reason.MALFORMED_MESSAGES, f"two pairs hold a question and an answer: {shown}")
    if complete:
        return complete[0]
    questions = filled(values, [question for question, _ in PAIRS]) or filled(values, ["input"])
    names = [answer for _, answer in PAIRS]
    answers = filled(values, names) or [name for name in names if name in values]  # an empty answer is reported as such
    return (questions[0], answers[0]) if len(questions) == len(answers) == 1 else None


def _from_pair(values: Mapping[str, Any], question: str, answer: str) -> ChatForm:
    columns = {question, answer, "history"}
    turns = list(_history(values.get("history")))
    if (prompt := _messages(values[question])) is not None:
        # As in TRL, only the completion is learned. Answers within the prompt are context.
        turns += _list(prompt, question, learned=False)
    else:
        text = values[question]
        if question == "instruction":
            columns.add("input")
            if filled(values, ["input"]):
                text = "\n".join(text_turn("user", values[name], name).content for name in ("instruction", "input"))
        turns.append(text_turn("user", text, question))
    if (completion := _messages(values[answer])) is not None:
        turns += _list(completion, answer)
    else:
        turns.append(text_turn("assistant", values[answer], answer))
    return ChatForm(tuple(turns), frozenset(columns))


def _history(history: Any) -> Iterator[RowTurn]:
    """Yields earlier questions and answers, ``[[question, answer], …]``, oldest first."""
    if isinstance(history, str):
        history = parse_json(history, "history") if history.strip() else []
    if not isinstance(history or [], list):
        raise RowRejected(Reason.MALFORMED_MESSAGES, f"history is not a list of exchanges: {excerpt(history)}")
    for i, exchange in enumerate(history or []):
        if not isinstance(exchange, list | tuple) or len(exchange) != 2:
            raise RowRejected(
                Reason.MALFORMED_MESSAGES, f"history[{i}] is not a question and its answer: {excerpt(exchange)}"
            )
        yield text_turn("user", exchange[0], f"history[{i}][0]")
        yield text_turn("assistant", exchange[1], f"history[{i}][1]")


def _exchanges(exchanges: Any) -> Iterator[RowTurn]:
    """Yields questions and answers, ``[{"user": …, "assistant": …}, …]``."""
    for i, exchange in enumerate(exchanges if isinstance(exchanges, list) else [exchanges]):
        where = f"{_EXCHANGES}[{i}]"
        if not isinstance(exchange, Mapping) or not {_ASKED, _SAID} <= exchange.keys():
            raise RowRejected(
                Reason.MALFORMED_MESSAGES,
                f"{where} is not an object with {_ASKED} and {_SAID}: {excerpt(exchange)}; --recipe text reads "
                "documents",
            )
        yield from _exchange(exchange, where, _ASKED, _SAID)


def _exchange(exchange: Mapping[str, Any], where: str, asked: str, said: str) -> Iterator[RowTurn]:
    """Yields the question and the answer in an object, given their keys."""
    others = {key: each for key, each in exchange.items() if key not in (asked, said) and each is not None}
    yield replace(text_turn("user", exchange[asked], f"{where}.{asked}"), entry=others)
    yield text_turn("assistant", exchange[said], f"{where}.{said}")


def _messages(value: Any) -> list[Any] | None:
    """Returns a pair's column if it is a list of messages, or JSON text of one (as in CSV)."""
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        try:
            parsed = json_text.loads(value)
        except (ValueError, RecursionError):
            return None
        roles = isinstance(parsed, list) and all(isinstance(each, Mapping) and "role" in each for each in parsed)
        return parsed if roles else None
    return value if isinstance(value, list) else None


def _list(turns: Any, name: str, learned: bool = True) -> Iterator[RowTurn]:
    if isinstance(turns, str):
        turns = parse_json(turns, name)
    if not isinstance(turns, list) or not turns:
        raise RowRejected(Reason.MALFORMED_MESSAGES, f"{name} is not a list of turns: {excerpt(turns)}")
    for i, turn in enumerate(turns):
        where = f"{name}[{i}]"
        if isinstance(turn, Mapping) and {_ASKED_IN_LIST, _SAID_IN_LIST} <= turn.keys():
            exchange = _exchange(turn, where, _ASKED_IN_LIST, _SAID_IN_LIST)
            yield from (replace(each, learned=learned) for each in exchange)
        else:
            yield read_turn(turn, where, learned)


def _with_system_prompt(values: Mapping[str, Any], turns: tuple[RowTurn, ...]) -> tuple[RowTurn, ...]:
    """Returns the turns after a column's system prompt. A system turn may only repeat it."""
    prompts = [text_turn("system", values[name], name) for name in filled(values, _SYSTEM_COLUMNS)]
    prompts = [turn for turn in prompts if _text(turn.content)]
    if not prompts:
        return turns
    turns = tuple(turn for turn in turns if turn.role != "system" or _text(turn.content))
    told = [turn for turn in turns if turn.role == "system"]
    first = _text(prompts[0].content)
    for turn in (*prompts, *told):
        if _text(turn.content) != first:
            raise RowRejected(
                Reason.MALFORMED_MESSAGES,
                f"{prompts[0].where} and {turn.where} hold different system prompts: {excerpt(first)!r} and "
                f"{excerpt(_text(turn.content))!r}. Keep one of them.",
            )
    return turns if told else (prompts[0], *turns)


def _text(content: Any) -> str:
    """Returns the text of a content in any form, for comparison."""
    if isinstance(content, list):
        texts = (item.get("text", item.get("value")) if isinstance(item, Mapping) else item for item in content)
        content = "".join(text for text in texts if isinstance(text, str))
    return content.strip() if isinstance(content, str) else ""


def _refuse_split_calls(turns: tuple[RowTurn, ...]) -> None:
    """Rejects consecutive turns with only calls, which are one turn at inference."""
    for before, turn in pairwise(turns):
        if before.calls and turn.calls and before.role == turn.role and not before.content and not turn.content:
            raise RowRejected(
                Reason.MALFORMED_MESSAGES,
                f"{before.where} and {turn.where} are calls in separate turns; write them as one turn: a JSON list "
                "of calls, or tool_calls",
            )
