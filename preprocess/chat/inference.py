"""What the prompt of inference leaves to the model, found by rendering it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from vlmdata.preprocess.chat.bounded import bounded
from vlmdata.preprocess.chat.targets import Turn
from vlmdata.preprocess.chat.template_arguments import names_read
from vlmdata.preprocess.chat.tokenizer import ChatTokenizer
from vlmdata.preprocess.conversation import Conversation

_QUESTION = {"role": "user", "content": "Which?"}
_CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": {"place": "here"}}}
_RESPONSE = (
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "dark"},
)


def opens_a_block(tokenizer: ChatTokenizer, arguments: Mapping[str, Any]) -> bool:
    """Returns whether :func:`opens_block` is true of any prompt."""
    return opens_block(tokenizer, arguments) or opens_block(tokenizer, arguments, after_tool=True)


def opens_block(tokenizer: ChatTokenizer, arguments: Mapping[str, Any], after_tool: bool = False) -> bool:
    """Returns whether the prompt of inference opens a think block that no argument of the template closes.

    The model then always ends the block itself.

    Args:
        tokenizer: The tokenizer with the template.
        arguments: Arguments that the data or the run gives the template, which stay as they are.
        after_tool: Whether the prompt follows the response of a tool.
    """
    return _opens_block(tokenizer, json.dumps(dict(arguments), sort_keys=True), after_tool)


@cache
def _opens_block(tokenizer: ChatTokenizer, arguments: str, after_tool: bool) -> bool:
    think, given = tokenizer.family.chat.think, json.loads(arguments)
    if think is None:
        return False
    messages, mark = [_QUESTION, *(_RESPONSE if after_tool else ())], think[0].strip()

    def opens(**other: bool) -> bool | None:
        try:
            with bounded(len(messages)):
                text = tokenizer.hf.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, **other, **given
                )
        except Exception:  # the template refuses tools, or the argument
            return None
        return str(text).rstrip().endswith(mark)

    names = names_read(tokenizer.templates)
    free = names.only_read - given.keys() if names is not None else ()
    return opens() is True and not any(opens(**{name: on}) is False for name in free for on in (False, True))


def with_prompts(tokenizer: ChatTokenizer, conversation: Conversation, turns: Sequence[Turn]) -> list[Turn]:
    """Returns the turns, with what the prompt of inference leaves to the model."""
    messages, arguments = conversation.messages, conversation.template_arguments
    before = [messages[at - 1].role for at, message in enumerate(messages) if message.role == "assistant"]
    return [
        replace(turn, opened=opens_block(tokenizer, arguments, role == "tool"))
        for turn, role in zip(turns, before, strict=True)
    ]
