"""A turn of a row, with any of the supported names of role and content."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlmdata.preprocess.conversation import ROLES, Role
from vlmdata.preprocess.recipes.chat.tools import parse_json
from vlmdata.preprocess.recipes.chat.weights import TURN_WEIGHTS
from vlmdata.preprocess.recipes.keys import filled
from vlmdata.preprocess.reject import RowRejected, excerpt
from vlmdata.reasons import Reason
from vlmdata.wording import with_article

#: OpenAI's ``developer`` and ``function``, ms-swift's ``tool_call`` and ``tool_response``.
_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
    "tool_response": "tool",
    "tool_call": "assistant",
}
_SHAREGPT_ROLES: Mapping[str, Role] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
#: Roles whose content is a call as JSON text.
_CALL_ROLES = ("function_call", "tool_call")

#: Keys of the assistant's reasoning: vLLM's and Qwen's, OpenRouter's, TRL's.
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
USED_KEYS = frozenset(
    {"role", "from", "content", "value", "tool_calls", "function_call", "tool_call_id", *REASONING_KEYS, *TURN_WEIGHTS}
)
HARMLESS_KEYS = frozenset(
    {
        "name",
        "id",
        "index",
        "annotations",
        "timestamp",
        "created_at",
        "model",
        "language",
        "metadata",
        "source",
    }
)
_REFUSED_KEYS: Mapping[str, str] = {
    **dict.fromkeys(("images", "image"), "images of a turn belong in its content or in the row's column images"),
    **dict.fromkeys(("videos", "video"), "videos of a turn belong in its content or in the row's column videos"),
    **dict.fromkeys(("audios", "audio"), "no recipe reads audio"),
    **dict.fromkeys(("train_detail", "training_detail"), "a turn is learned as a whole or not at all"),
    "refusal": "write the refusal as the turn's content",
}


@dataclass(frozen=True)
class RowTurn:
    """A turn with a known role.

    Attributes:
        where: Place in the row, for messages.
        role: Role of the speaker.
        content: Text, a list of content items, or None.
        entry: Other keys, without nulls.
        calls: The assistant's calls as in the row, or None.
        learned: False if the form of the row makes it context.
    """

    where: str
    role: Role
    content: Any
    entry: Mapping[str, Any]
    calls: Any = None
    learned: bool = True


def text_turn(role: Role, text: Any, where: str) -> RowTurn:
    """Creates a turn from the text of a separate column.

    Raises:
        RowRejected: MALFORMED_MESSAGES if the value is not text.
    """
    if not isinstance(text, str):
        raise RowRejected(Reason.MALFORMED_MESSAGES, f"{where} is not text: {excerpt(text)}")
    return RowTurn(where, role, text, {})


def read_turn(turn: Any, where: str, learned: bool = True) -> RowTurn:
    """Reads a turn of a list, in OpenAI's form (``role``, ``content``) or ShareGPT's (``from``, ``value``).

    Raises:
        RowRejected: MALFORMED_MESSAGES or UNSUPPORTED_CONTENT.
    """
    if not isinstance(turn, Mapping):
        raise RowRejected(Reason.MALFORMED_MESSAGES, f"{where} is not an object: {excerpt(turn)}")
    turn = {key: value for key, value in turn.items() if value is not None}
    for key in filled(turn, sorted(turn.keys() & _REFUSED_KEYS.keys())):
        raise RowRejected(Reason.UNSUPPORTED_CONTENT, f"{where}.{key} holds {excerpt(turn[key])}; {_REFUSED_KEYS[key]}")
    for one, other in (("from", "role"), ("value", "content")):
        if one in turn and other in turn:
            raise RowRejected(Reason.MALFORMED_MESSAGES, f"{where} has both {one} and {other}; keep only one")
    name, role = _role(turn, where)
    content = turn.get("content", turn.get("value"))
    if "from" in turn and not isinstance(content, str):
        raise RowRejected(Reason.MALFORMED_MESSAGES, f"{where}.value is not text: {excerpt(content)}")
    calls = _calls(turn, role, where)
    if name in _CALL_ROLES:
        if calls:
            raise RowRejected(Reason.MALFORMED_MESSAGES, f"{where} is a {name} turn and has tool_calls; keep one")
        if not isinstance(content, str):
            raise RowRejected(Reason.MALFORMED_MESSAGES, f"{where}.content is not a call as JSON: {excerpt(content)}")
        call = parse_json(content, f"{where}.{'value' if 'value' in turn else 'content'}")
        content, calls = "", call if isinstance(call, list) else [call]
    return RowTurn(where, role, content, turn, calls, learned)


def _role(turn: Mapping[str, Any], where: str) -> tuple[str, Role]:
    """Returns the role's name in the row and in vlmdata."""
    key, known = ("from", _SHAREGPT_ROLES) if "from" in turn else ("role", _ROLES)
    name = turn.get(key)
    role = known.get(name) if isinstance(name, str) else None
    if role is None:
        names = ", ".join(_SHAREGPT_ROLES) if key == "from" else ", ".join(sorted({*ROLES, *_ROLES}))
        raise RowRejected(Reason.MALFORMED_MESSAGES, f"{where}.{key} is {excerpt(name)}; known: {names}")
    return str(name), role


def _calls(turn: Mapping[str, Any], role: Role, where: str) -> Any:
    """Returns ``tool_calls`` or OpenAI's earlier ``function_call``. Rejects them in turns of other roles."""
    given = [key for key in ("tool_calls", "function_call") if turn.get(key)]
    if len(given) > 1:
        raise RowRejected(Reason.MALFORMED_MESSAGES, f"{where} has both tool_calls and function_call")
    if role != "assistant" and (kept := given or filled(turn, REASONING_KEYS)):
        raise RowRejected(
            Reason.UNSUPPORTED_CONTENT, f"{where}.{kept[0]} in {with_article(role)} turn; only assistant turns have it"
        )
    if not given:
        return None
    return turn["tool_calls"] if given == ["tool_calls"] else [turn["function_call"]]
