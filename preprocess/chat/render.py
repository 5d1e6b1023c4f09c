"""Renders a conversation with the tokenizer's own chat template, so that data cannot forge anything.

Template text and data text end up in one string. To tell them apart, every place in the data where a reserved token's
text could begin is broken with a character that the row does not contain. Any reserved token in the result was then
written by the template. Comparing with the unbroken text shows whether the data contains one. Rows without such
places, nearly all, are rendered unmodified.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from preprocess.chat.tokenizer import ChatTokenizer
from preprocess.config import SpecialText
from preprocess.conversation import Conversation, Document, ImagePart, Message, TextPart
from preprocess.reject import RowRejected, excerpt
from vlmdata.reasons import Reason
from vlmdata.wording import counted

_PRIVATE_USE = range(0xE000, 0xF8FF)


@dataclass(frozen=True)
class Rendered:
    """The template's output.

    Attributes:
        text: The whole conversation as text.
        reserved_spans: Character spans of the reserved tokens that the template wrote; ordered.
        plain_spans: Character spans of ``text`` that read as a reserved token but are data; ordered.
    """

    text: str
    reserved_spans: tuple[tuple[int, int], ...]
    plain_spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Renderer:
    """Renders conversations with one tokenizer.

    Attributes:
        tokenizer: Tokenizer with the template and special tokens.
        special_text: Handling of data with the text of a reserved token.
        most_tokens: Texts of far more tokens are rejected before they are tokenized whole; None tokenizes all.
    """

    tokenizer: ChatTokenizer
    special_text: SpecialText
    most_tokens: int | None = None

    def render(self, conversation: Conversation) -> Rendered:
        """Renders a conversation with the template.

        Raises:
            RowRejected: TEMPLATE_ERROR if the template rejects it; SPECIAL_TOKEN_TEXT if data spells a reserved
                token and the policy is ``reject``; INVALID_UNICODE if a text cannot be encoded.
        """
        _require_unicode(conversation)
        suspicious = any(self._opening.search(text) for text in _strings(conversation))
        if not suspicious:
            text = self._apply(conversation, lambda text: text)
            return Rendered(text, self._spans(text))
        marker = _unused_character(conversation)
        broken = self._apply(conversation, lambda text: self._opening.sub(lambda m: m[0] + marker, text))
        text = broken.replace(marker, "")
        starts = ((m.start() - broken.count(marker, 0, m.start()), len(m[0])) for m in self._reserved.finditer(broken))
        written = {(start, start + length) for start, length in starts}
        spans = self._spans(text)
        genuine = tuple(span for span in spans if span in written)
        forged = tuple(span for span in spans if span not in written)
        if not forged:
            return Rendered(text, genuine)
        if self.special_text is SpecialText.REJECT:
            raise self._forgery(text, forged)
        return Rendered(text, genuine, forged)

    def _spans(self, text: str) -> tuple[tuple[int, int], ...]:
        return tuple(match.span() for match in self._reserved.finditer(text))

    def render_document(self, document: Document) -> Rendered:
        """Renders a document as text: a placeholder with vision tokens for each image, and the end of text.

        No template is involved, so the places of reserved tokens are known. Any other one comes from the data.

        Raises:
            RowRejected: SPECIAL_TOKEN_TEXT if data spells a reserved token and the policy is ``reject``, or if data
                and a reserved token together read as another one. INVALID_UNICODE if the text cannot be encoded.
        """
        info, spell = self.tokenizer.info, self.tokenizer.hf.convert_ids_to_tokens
        image = [spell(info.vision_start), spell(info.image), spell(info.vision_end)]
        pieces: list[str] = []
        written: set[tuple[int, int]] = set()
        length = 0
        for part in (*document.parts, None):
            own = [spell(info.end_of_text)] if part is None else image if isinstance(part, ImagePart) else []
            for piece in [part.text] if isinstance(part, TextPart) else own:
                if own:
                    written.add((length, length + len(piece)))
                pieces.append(piece)
                length += len(piece)
        text = "".join(pieces)
        _require_encodable(text, "the document")
        forged = tuple(span for span in self._spans(text) if span not in written)
        genuine = tuple(span for span in self._spans(text) if span in written)
        if forged and (self.special_text is SpecialText.REJECT or len(genuine) < len(written)):
            raise self._forgery(text, forged)
        return Rendered(text, genuine, forged)

    def _forgery(self, text: str, forged: Sequence[tuple[int, int]]) -> RowRejected:
        start, end = forged[0]
        return RowRejected(
            Reason.SPECIAL_TOKEN_TEXT,
            f"the data spells the special token {text[start:end]} ({counted(len(forged), 'time')}), near "
            f"{excerpt(text[max(0, start - 30) : end + 30], 120)!r}; --special-text plain keeps such rows and "
            "encodes it as ordinary text",
        )

    @cached_property
    def _reserved(self) -> re.Pattern[str]:
        longest_first = sorted(self.tokenizer.reserved, key=lambda text: (-len(text), text))
        return re.compile("|".join(re.escape(text) for text in longest_first))

    @cached_property
    def _opening(self) -> re.Pattern[str]:
        """Matches the first character of a possible reserved token.

        It also matches at the end of a text (and before a final newline), where the template or the next part of the
        message could complete one. Complete markup tokens that data may contain are allowed.
        """
        allowed = "|".join(re.escape(text) for text in sorted(self.tokenizer.specials - self.tokenizer.reserved))
        heads = sorted({text[:2] for text in self.tokenizer.reserved})
        openings = "|".join(rf"{re.escape(head[0])}(?={re.escape(head[1])}|\s*\Z)" for head in heads)
        return re.compile(f"(?!{allowed})(?:{openings})" if allowed else openings)

    def _apply(self, conversation: Conversation, edit: Callable[[str], str]) -> str:
        messages = [_template_message(message, edit) for message in conversation.messages]
        tools = [_edit(tool, edit) for tool in conversation.tools] or None
        try:
            text = self.tokenizer.hf.apply_chat_template(messages, tools=tools, tokenize=False)
        except Exception as error:  # jinja2 errors, and errors of the template's filters on odd data
            raise RowRejected(
                Reason.TEMPLATE_ERROR, f"the chat template refuses it: {type(error).__name__}: {error}"
            ) from error
        return str(text)


def _template_message(message: Message, edit: Callable[[str], str]) -> dict[str, Any]:
    content: Any
    if all(isinstance(part, TextPart) for part in message.parts):
        content = edit(message.text)
    else:
        content = [
            {"type": "text", "text": edit(part.text)} if isinstance(part, TextPart) else {"type": "image"}
            for part in message.parts
        ]
    rendered: dict[str, Any] = {"role": message.role, "content": content}
    if message.reasoning is not None:
        rendered["reasoning_content"] = edit(message.reasoning)
    if message.tool_calls:
        rendered["tool_calls"] = [{"type": "function", "function": _edit(call, edit)} for call in message.tool_calls]
    return rendered


def _edit(value: Any, edit: Callable[[str], str]) -> Any:
    """Applies an edit to every string in ``value``, including keys."""
    if isinstance(value, str):
        return edit(value)
    if isinstance(value, Mapping):
        return {edit(str(key)): _edit(item, edit) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_edit(item, edit) for item in value]
    return value


def _require_unicode(conversation: Conversation) -> None:
    """Rejects lone surrogates: halves of a character, which cannot be encoded."""
    for number, message in enumerate(conversation.messages):
        for text in _message_strings(message):
            _require_encodable(text, f"message {number + 1} of {len(conversation.messages)} ({message.role})")
    for text in _nested_strings(conversation.tools):
        _require_encodable(text, "tools")


def _require_encodable(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        before = excerpt(text[max(0, error.start - 30) : error.start], 60)
        raise RowRejected(
            Reason.INVALID_UNICODE,
            f"{where}: character {error.start} is the lone surrogate \\u{ord(text[error.start]):04x}, half of a "
            f"character, after {before!r}; correct the source's text",
        ) from None


def _strings(conversation: Conversation) -> Iterable[str]:
    for message in conversation.messages:
        yield from _message_strings(message)
    yield from _nested_strings(conversation.tools)


def _message_strings(message: Message) -> Iterable[str]:
    for part in message.parts:
        if isinstance(part, TextPart):
            yield part.text
    if message.reasoning is not None:
        yield message.reasoning
    yield from _nested_strings(message.tool_calls)


def _nested_strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _nested_strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _nested_strings(item)


def _unused_character(conversation: Conversation) -> str:
    used = set().union(*map(set, _strings(conversation)))
    free = next((chr(code) for code in _PRIVATE_USE if chr(code) not in used), None)
    if free is None:
        raise RowRejected(
            Reason.SPECIAL_TOKEN_TEXT, "the data spells special tokens and uses every private-use character"
        )
    return free
