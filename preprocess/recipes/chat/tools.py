"""Tool calls of the assistant, the offered tools, and other arguments of the chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from vlmdata.preprocess import json_text
from vlmdata.preprocess.conversation import arguments_fault
from vlmdata.preprocess.recipes.keys import KeyLog, is_empty
from vlmdata.preprocess.reject import RowRejected, excerpt
from vlmdata.preprocess.row import Struct
from vlmdata.reasons import Reason

_CALL_KEYS = frozenset({"id", "type", "function", "name", "arguments"})
#: Column with arguments of the chat template (TRL, ms-swift).
ARGUMENTS = "chat_template_kwargs"
_CALL_HARMLESS = frozenset({"index"})


def read_calls(calls: Any, where: str, keys: KeyLog) -> Iterator[Mapping[str, Any]]:
    """Yields calls as mappings of ``name`` and ``arguments``, and ``id`` if there is one.

    OpenAI writes the arguments as JSON text.

    Raises:
        RowRejected: MALFORMED_MESSAGES.
    """
    if not isinstance(calls, list):
        raise RowRejected(Reason.MALFORMED_MESSAGES, f"{where} is not a list: {excerpt(calls)}")
    for i, call in enumerate(calls):
        field = f"{where}[{i}]"
        function = (call.get("function") or call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RowRejected(Reason.MALFORMED_MESSAGES, f"{field} names no function: {excerpt(call)}")
        keys.note(call, _CALL_KEYS, _CALL_HARMLESS, "messages[].tool_calls[].")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = parse_json(arguments, f"{field}.arguments")
        else:
            arguments = _without_padding(arguments, "messages[].tool_calls[].arguments.", keys)
        if not isinstance(arguments, Mapping):
            raise RowRejected(Reason.MALFORMED_MESSAGES, f"{field}.arguments is not an object: {excerpt(arguments)}")
        known = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        yield {**known, "name": function["name"], "arguments": arguments}


def read_tools(values: Mapping[str, Any], keys: KeyLog) -> tuple[Mapping[str, Any], ...]:
    """Returns the tool definitions in the columns ``tools`` (unmodified) and ``functions`` (OpenAI's earlier form).

    Structs of Arrow lose their nulls.

    Raises:
        RowRejected: MALFORMED_MESSAGES.
    """
    functions = _definitions(values, "functions", keys)
    return (*_definitions(values, "tools", keys), *({"type": "function", "function": each} for each in functions))


def read_arguments(values: Mapping[str, Any], keys: KeyLog) -> Mapping[str, Any]:
    """Returns the arguments of the chat template in the column ``chat_template_kwargs``: an object or JSON text.

    Structs of Arrow lose their nulls.

    Raises:
        RowRejected: MALFORMED_MESSAGES.
    """
    given = values.get(ARGUMENTS)
    if is_empty(given):
        return {}
    found = parse_json(given, ARGUMENTS) if isinstance(given, str) else _without_padding(given, f"{ARGUMENTS}.", keys)
    if not isinstance(found, Mapping):
        raise RowRejected(Reason.MALFORMED_MESSAGES, f"{ARGUMENTS} is not an object: {excerpt(given)}")
    if fault := arguments_fault(found):
        raise RowRejected(Reason.MALFORMED_MESSAGES, excerpt(f"{ARGUMENTS}{fault}", 200))
    return dict(found)


def _definitions(values: Mapping[str, Any], column: str, keys: KeyLog) -> tuple[Mapping[str, Any], ...]:
    tools = values.get(column)
    if is_empty(tools):
        return ()
    tools = parse_json(tools, column) if isinstance(tools, str) else _without_padding(tools, f"{column}[].", keys)
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RowRejected(Reason.MALFORMED_MESSAGES, f"{column} is not a list of objects: {excerpt(tools)}")
    return tuple(tools)


def _without_padding(value: Any, where: str, keys: KeyLog) -> Any:
    """Returns the value without the nulls of Arrow's structs, and records that there were some.

    Raises:
        RowRejected: MALFORMED_MESSAGES if a value is none of JSON's: a time of Arrow no longer tells its text.
    """
    if isinstance(value, Struct):
        if None in value.values():
            keys.note_padding(where)
        return {key: _without_padding(item, where, keys) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_padding(item, where, keys) for item in value]
    if not (value is None or isinstance(value, str | int | float | Mapping)):
        raise RowRejected(
            Reason.MALFORMED_MESSAGES,
            f"{where.rstrip('.')} holds {excerpt(repr(value))}, not a value of JSON; store it as text, or the whole as "
            "JSON text",
        )
    return value


def json_or_text(value: Any) -> Any:
    """Returns the value of a column that is not text, parsing JSON text from CSV."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def parse_json(text: str, where: str) -> Any:
    """Parses JSON text.

    Raises:
        RowRejected: MALFORMED_MESSAGES if the text is not JSON.
    """
    try:
        return json_text.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowRejected(Reason.MALFORMED_MESSAGES, f"{where} is not JSON: {error}: {excerpt(text)}") from error
