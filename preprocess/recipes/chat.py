"""Chat rows: OpenAI/Qwen ``messages``, or ShareGPT/LLaVA ``conversations`` with ``<image>`` marks.

Images stand in the content items themselves (path, data URI, URL), or in a column ``images``/``image`` from which
placeholders (``{"type": "image"}`` items or ``<image>`` marks) take them in order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

from preprocess.config import RecipeConfig
from preprocess.conversation import ROLES, Conversation, ImagePart, Message, Part, Role, TextPart
from preprocess.recipes.base import RECIPE_OPTIONS, Row
from preprocess.recipes.media import MediaLoader
from preprocess.reject import RowRejected, excerpt
from vlmdata.format.ledger import Reason
from vlmdata.wording import counted, with_article

IMAGE_MARK = "<image>"
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
_VISION_KEYS = ("image", "image_url")
#: Where an image item may name its file: Qwen's and OpenAI's keys, then those of transformers' chat templates.
_SOURCE_KEYS = (*_VISION_KEYS, "url", "path", "base64")


class Chat:
    """Rows with ``messages`` or ``conversations``."""

    needs: ClassVar[str] = "messages or conversations"
    options: ClassVar[frozenset[str]] = RECIPE_OPTIONS - {"prompt", "target"}

    def __init__(self, config: RecipeConfig):
        self._media = MediaLoader(config.image_root, config.allow_urls)

    @staticmethod
    def fits(columns: Collection[str]) -> bool:
        """True for rows with either column."""
        return "messages" in columns or "conversations" in columns

    def __call__(self, row: Row) -> Conversation:
        """The row's turns, each image loaded into its place."""
        values = {name: value for name, value in row.values.items() if value is not None}
        column, entries = _turns(values)
        images = _ImageColumn(values, entries, self._media)
        messages = tuple(self._message(entry, f"{column}[{i}]", images) for i, entry in enumerate(entries))
        images.require_all_used()
        return Conversation(messages, _tools(values))

    def _message(self, entry: Mapping[str, Any], where: str, images: _ImageColumn) -> Message:
        role = entry["role"]
        marks_in_text = images.marks_in_text and role == "user"
        parts = tuple(self._parts(entry.get("content"), where, images, marks_in_text))
        if role in ("system", "assistant") and any(isinstance(part, ImagePart) for part in parts):
            raise RowRejected(
                Reason.UNSUPPORTED_CONTENT,
                f"{where}: an image in {with_article(role)} turn; only user and tool turns can hold images",
            )
        reasoning = entry.get("reasoning_content")
        if reasoning is not None and (
            not isinstance(reasoning, str) or "<think>" in reasoning or "</think>" in reasoning
        ):
            raise RowRejected(
                Reason.MALFORMED_MESSAGES,
                f"{where}.reasoning_content must be text without think tags: {excerpt(reasoning)}",
            )
        return Message(cast(Role, role), parts, reasoning, tuple(_tool_calls(entry, where)))

    def _parts(self, content: Any, where: str, images: _ImageColumn, marks: bool) -> Iterator[Part]:
        if content is None:
            return
        if isinstance(content, str):
            yield from _split_marks(content, images) if marks else [TextPart(content)]
            return
        if not isinstance(content, list):
            raise RowRejected(
                Reason.MALFORMED_MESSAGES, f"{where}.content is neither text nor a list: {excerpt(content)}"
            )
        for i, item in enumerate(content):
            yield from self._item(item, f"{where}.content[{i}]", images, marks)

    def _item(self, item: Any, where: str, images: _ImageColumn, marks: bool) -> Iterator[Part]:
        if isinstance(item, str):
            item = {"type": "text", "text": item}
        if not isinstance(item, Mapping):
            raise RowRejected(Reason.MALFORMED_MESSAGES, f"{where} is no object: {excerpt(item)}")
        # Arrow gives every struct every key; the absent ones are null.
        item = {key: value for key, value in item.items() if value is not None}
        kind = item.get("type") or next((key for key in ("text", *_VISION_KEYS, "video") if key in item), None)
        if kind == "text":
            if not isinstance(item.get("text"), str):
                raise RowRejected(Reason.MALFORMED_MESSAGES, f"{where}.text is not text: {excerpt(item.get('text'))}")
            yield from _split_marks(item["text"], images) if marks else [TextPart(item["text"])]
        elif kind in _VISION_KEYS:
            key = next((key for key in _SOURCE_KEYS if key in item), None)
            source = item[key] if key else None
            if isinstance(source, Mapping) and "url" in source:
                source = source["url"]
            if key == "base64" and isinstance(source, str) and not source.startswith("data:"):
                source = f"data:image;base64,{source}"
            yield (ImagePart(self._media.load(source, where), where) if source is not None else images.take(where))
        else:
            raise RowRejected(
                Reason.UNSUPPORTED_CONTENT, f"{where}: content of type {kind!r}; text and image are supported"
            )


class _ImageColumn:
    """The row's ``images`` or ``image`` column, from which placeholders take their images in order."""

    def __init__(self, values: Mapping[str, Any], entries: Sequence[Mapping[str, Any]], media: MediaLoader):
        self._name = "images" if "images" in values else "image"
        column = values.get(self._name)
        self._images = column if isinstance(column, list) else [] if column is None else [column]
        self._media = media
        self._used = 0
        # In LLaVA's form the mark is the only placeholder; in message lists it is one if there is something to
        # take and no explicit item takes it. Elsewhere "<image>" is a word like any other.
        self.marks_in_text = ("conversations" in values or bool(self._images)) and not _has_placeholder_items(entries)

    def take(self, where: str) -> ImagePart:
        """The next image."""
        field = f"{self._name}[{self._used}]"
        self._used += 1
        if self._used > len(self._images):
            raise RowRejected(
                Reason.IMAGE_COUNT_MISMATCH,
                f"{where} is placeholder {self._used}, but the row has {counted(len(self._images), 'image')}",
            )
        return ImagePart(self._media.load(self._images[self._used - 1], field), field)

    def require_all_used(self) -> None:
        """Every image must have had its place."""
        # A column that only repeats what the items name themselves (Qwen style) is no mismatch.
        if self._used not in (0, len(self._images)) or (self._used == 0 and self.marks_in_text and self._images):
            raise RowRejected(
                Reason.IMAGE_COUNT_MISMATCH,
                f"{counted(self._used, 'image placeholder')} in the text for "
                f"{counted(len(self._images), 'image')} in {self._name}",
            )


def _turns(values: Mapping[str, Any]) -> tuple[str, list[Mapping[str, Any]]]:
    """The column that holds the row's turns, and these as ``role``/``content`` mappings without null values."""
    name = next((name for name in ("messages", "conversations") if name in values), None)
    if name is None:
        columns = ", ".join(values) or "none"
        raise RowRejected(Reason.MISSING_COLUMN, f"neither messages nor conversations; columns with values: {columns}")
    turns = values[name]
    if isinstance(turns, str):
        turns = _parse_json(turns, name)
    if not isinstance(turns, list) or not turns:
        raise RowRejected(Reason.MALFORMED_MESSAGES, f"{name} is not a list of turns: {excerpt(turns)}")
    return name, [_turn(turn, f"{name}[{i}]") for i, turn in enumerate(turns)]


def _turn(turn: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(turn, Mapping):
        raise RowRejected(Reason.MALFORMED_MESSAGES, f"{where} is no object: {excerpt(turn)}")
    turn = {key: value for key, value in turn.items() if value is not None}
    return _from_sharegpt(turn, where) if "from" in turn else _with_known_role(turn, where)


def _with_known_role(turn: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    role = turn.get("role")
    if role == "developer":  # OpenAI's later name for it
        role = "system"
    if not isinstance(role, str) or role not in ROLES:
        raise RowRejected(
            Reason.MALFORMED_MESSAGES, f"{where}.role is {excerpt(role)}; known: {', '.join(sorted(ROLES))}"
        )
    return {**turn, "role": role}


def _from_sharegpt(turn: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    role = _SHAREGPT_ROLES.get(str(turn["from"]))
    if role is None:
        raise RowRejected(
            Reason.MALFORMED_MESSAGES,
            f"{where}.from is {excerpt(turn['from'])}; known: {', '.join(_SHAREGPT_ROLES)}",
        )
    value = turn.get("value")
    if not isinstance(value, str):
        raise RowRejected(Reason.MALFORMED_MESSAGES, f"{where}.value is not text: {excerpt(value)}")
    if turn["from"] == "function_call":
        return {"role": role, "content": "", "tool_calls": [_parse_json(value, f"{where}.value")]}
    return {"role": role, "content": value}


def _tool_calls(entry: Mapping[str, Any], where: str) -> Iterator[Mapping[str, Any]]:
    """Calls as ``name`` and ``arguments`` mappings; OpenAI writes the arguments as JSON text."""
    calls = entry.get("tool_calls") or []
    if not isinstance(calls, list):
        raise RowRejected(Reason.MALFORMED_MESSAGES, f"{where}.tool_calls is no list: {excerpt(calls)}")
    for i, call in enumerate(calls):
        field = f"{where}.tool_calls[{i}]"
        function = (call.get("function") or call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RowRejected(Reason.MALFORMED_MESSAGES, f"{field} names no function: {excerpt(call)}")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = _parse_json(arguments, f"{field}.arguments")  # a null in JSON text was meant
        else:
            arguments = _without_nulls(arguments)
        if not isinstance(arguments, Mapping):
            raise RowRejected(Reason.MALFORMED_MESSAGES, f"{field}.arguments is no object: {excerpt(arguments)}")
        yield {"name": function["name"], "arguments": arguments}


def _tools(values: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    tools = values.get("tools")
    if not tools:
        return ()
    tools = _parse_json(tools, "tools") if isinstance(tools, str) else _without_nulls(tools)
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RowRejected(Reason.MALFORMED_MESSAGES, f"tools is not a list of objects: {excerpt(tools)}")
    return tuple(tools)


def _without_nulls(value: Any) -> Any:
    """Arrow gives every struct every key; the absent ones are null."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowRejected(Reason.MALFORMED_MESSAGES, f"{where} is not JSON: {error}: {excerpt(text)}") from error


def _split_marks(text: str, images: _ImageColumn) -> Iterator[Part]:
    for i, piece in enumerate(re.split(f"({re.escape(IMAGE_MARK)})", text)):
        if i % 2:
            yield images.take(IMAGE_MARK)
        elif piece:
            yield TextPart(piece)


def _has_placeholder_items(entries: Sequence[Mapping[str, Any]]) -> bool:
    """Whether any content item is an image or video, by the judgement of qwen_vl_utils."""
    from qwen_vl_utils.vision_process import extract_vision_info

    contents = [entry["content"] for entry in entries if isinstance(entry.get("content"), list)]
    cleaned = [[_without_nulls(item) for item in content if isinstance(item, Mapping)] for content in contents]
    return bool(extract_vision_info([[{"content": items} for items in cleaned]]))
