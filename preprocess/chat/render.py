"""Renders a conversation with the tokenizer's own chat template, so that data cannot forge anything.

Template text and data text end up in one string. To tell them apart, every place in the data where a reserved token's
text could begin is broken with a character that the row does not contain. Any reserved token in the result was then
written by the template. Comparing with the unbroken text shows whether the data contains one. Rows without such
places, nearly all, are rendered unmodified.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from vlmdata.families.chat import IMAGE, VIDEO
from vlmdata.preprocess.chat.bounded import TemplateTooLong, bounded
from vlmdata.preprocess.chat.template_arguments import require_arguments
from vlmdata.preprocess.chat.tokenizer import ChatTokenizer
from vlmdata.preprocess.config import SpecialText, VideoLayout
from vlmdata.preprocess.conversation import (
    ContentPart,
    Conversation,
    Document,
    ImagePart,
    Message,
    Role,
    TextPart,
    VideoPart,
)
from vlmdata.preprocess.reject import RowRejected, excerpt
from vlmdata.reasons import Reason
from vlmdata.wording import counted

_PRIVATE_USE = range(0xE000, 0xF8FF)


@dataclass(frozen=True)
class Rendered:
    """The template's output."""

    text: str  # the whole conversation as text
    #: Character spans of the reserved tokens that the template wrote; ordered.
    reserved_spans: tuple[tuple[int, int], ...]
    #: Character spans of ``text`` that read as a reserved token but are data; ordered.
    plain_spans: tuple[tuple[int, int], ...] = ()
    #: Characters, ascending, before and after which the text is encoded apart.
    cuts: tuple[int, ...] = ()
    enclosed_videos: bool = True  # whether the template's marks enclose all blocks of a video with times


@dataclass(frozen=True)
class Renderer:
    """Renders conversations with one tokenizer."""

    tokenizer: ChatTokenizer  # tokenizer with the template and special tokens
    special_text: SpecialText  # handling of data with the text of a reserved token
    #: Texts of far more tokens are rejected before they are tokenized whole; None tokenizes all.
    most_tokens: int | None = None
    video_layout: VideoLayout = VideoLayout.TRANSFORMERS  # whether the template's marks enclose a video with times

    def render(self, conversation: Conversation) -> Rendered:
        """Renders a conversation with the template.

        Raises:
            RowRejected: TEMPLATE_ERROR if the template rejects it; SPECIAL_TOKEN_TEXT if data spells a reserved
                token and the policy is ``reject``; INVALID_UNICODE if a text cannot be encoded.
        """
        self._require_arguments(conversation)
        strings = list(_strings(conversation))
        for where, text in strings:
            _require_encodable(text, where)
        if not any(self._opening.search(text) for _, text in strings):
            text = self._apply(conversation, lambda text: text)
            return self._with_items(Rendered(text, self._spans(text)), conversation)
        marker = _unused_character(text for _, text in strings)
        broken = self._apply(conversation, lambda text: self._opening.sub(lambda m: m[0] + marker, text))
        text = broken.replace(marker, "")
        starts = ((m.start() - broken.count(marker, 0, m.start()), len(m[0])) for m in self._reserved.finditer(broken))
        written = {(start, start + length) for start, length in starts}
        spans = self._spans(text)
        genuine = tuple(span for span in spans if span in written)
        forged = tuple(span for span in spans if span not in written)
        if forged and self.special_text is SpecialText.REJECT:
            raise self._forgery(text, forged)
        return self._with_items(Rendered(text, genuine, forged), conversation)

    def _require_arguments(self, conversation: Conversation) -> None:
        try:
            require_arguments(conversation.template_arguments, self.tokenizer.templates)
        except ValueError as error:
            raise RowRejected(
                Reason.TEMPLATE_ERROR,
                f"chat_template_kwargs: {error}. Drop it, or give a tokenizer whose template has it",
            ) from error

    def _with_items(self, rendered: Rendered, conversation: Conversation) -> Rendered:
        """Replaces what the template wrote for items by all their tokens, as transformers' processors do.

        The token of an image becomes all tokens of an image with their margins, if the template writes one of them. The
        placeholder of a video becomes a block for each temporal patch, if the family tells their times. In the layout
        of vLLM the blocks also replace the marks around it, and are encoded apart from the text before.

        Raises:
            RowRejected: TEMPLATE_ERROR if these marks are not there.
        """
        videos = [part for part in conversation.media if isinstance(part, VideoPart) and part.seconds]
        written, video = self.tokenizer.written_image, self.tokenizer.captioned_video if videos else None
        if written is None and video is None:
            return rendered
        following = iter(videos)
        enclosed = self.video_layout is VideoLayout.TRANSFORMERS
        dropped = set() if enclosed or video is None else self._around(rendered, video)
        made, plain, cuts, cursor = _Pieces(self.tokenizer), [], [], 0
        for start, stop in sorted((*rendered.reserved_spans, *rendered.plain_spans)):
            made.add(rendered.text[cursor:start])
            piece, cursor = rendered.text[start:stop], stop
            if (start, stop) in dropped:
                continue
            if (start, stop) in rendered.plain_spans:
                plain.append((made.length, made.length + len(piece)))
                made.add(piece)
            elif piece == written:
                made.add_image()
            elif piece == video and (part := next(following, None)) is not None:
                cuts += [] if enclosed else [made.length]
                made.add_video(part.seconds)
            else:
                made.add_token(piece)
        made.add(rendered.text[cursor:])
        return Rendered(made.text, tuple(made.spans), tuple(plain), tuple(cuts), enclosed)

    def _around(self, rendered: Rendered, video: str) -> set[tuple[int, int]]:
        """Returns the spans of the marks around the placeholders of videos."""
        text, spans, found = rendered.text, sorted(rendered.reserved_spans), set[tuple[int, int]]()
        marks = self.tokenizer.item_texts(VIDEO)
        for number, (start, stop) in enumerate(spans):
            if text[start:stop] != video:
                continue
            around = spans[max(number - 1, 0) : number + 2]
            if "".join(marks) != text[around[0][0] : around[-1][1]]:
                raise RowRejected(
                    Reason.TEMPLATE_ERROR,
                    f"the chat template does not write {''.join(marks)} for a video, which --video-layout "
                    f"{VideoLayout.VLLM} replaces; drop the option",
                )
            found |= {around[0], around[-1]}
        return found

    def _spans(self, text: str) -> tuple[tuple[int, int], ...]:
        return tuple(match.span() for match in self._reserved.finditer(text))

    def render_document(self, document: Document) -> Rendered:
        """Renders a document as text: the tokens of each image with one placeholder, and the end of text.

        No template is involved, so the places of reserved tokens are known. Any other one comes from the data.

        Raises:
            RowRejected: SPECIAL_TOKEN_TEXT if data spells a reserved token and the policy is ``reject``, or if data
                and a reserved token together read as another one. INVALID_UNICODE if the text cannot be encoded.
        """
        info, spell = self.tokenizer.info, self.tokenizer.hf.convert_ids_to_tokens
        made = _Pieces(self.tokenizer)
        if info.turns.begin >= 0:
            made.add_token(spell(info.turns.begin))
        for part in document.parts:
            if isinstance(part, ImagePart):
                made.add_image()
            elif isinstance(part, TextPart):
                made.add(part.text)
        made.add_token(spell(info.end_of_text))
        text, written = made.text, set(made.spans)
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
        messages = [_template_message(message, edit, self.tokenizer) for message in conversation.messages]
        tools = [_edit(tool, edit) for tool in conversation.tools] or None
        given = {name: _edit(value, edit) for name, value in conversation.template_arguments.items()}
        try:
            with bounded(sum(1 for _ in _strings(conversation))):
                text = self.tokenizer.hf.apply_chat_template(messages, tools=tools, tokenize=False, **given)
        except TemplateTooLong as error:
            raise RowRejected(Reason.TEMPLATE_ERROR, f"the chat template is stopped: {error}") from error
        except Exception as error:  # jinja2 errors, and errors of the template's filters on odd data
            raise RowRejected(
                Reason.TEMPLATE_ERROR, f"the chat template refuses it: {type(error).__name__}: {error}"
            ) from error
        return str(text)


class _Pieces:
    """A text in the making, with the spans of the reserved tokens in it."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._pieces: list[str] = []
        self.length = 0
        self.spans: list[tuple[int, int]] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def add(self, piece: str) -> None:
        self._pieces.append(piece)
        self.length += len(piece)

    def add_token(self, token: str) -> None:
        self.spans.append((self.length, self.length + len(token)))
        self.add(token)

    def add_image(self) -> None:
        margin = self._tokenizer.family.image.margin
        self.add(margin)
        for token in self._tokenizer.item_texts(IMAGE):
            self.add_token(token)
        self.add(margin)

    def add_video(self, seconds: Sequence[float]) -> None:
        """Adds a block for each temporal patch, at these times."""
        tokens, caption = self._tokenizer.item_texts(VIDEO), self._tokenizer.family.expansion(VIDEO).caption
        for each in seconds:
            self.add(caption.format(seconds=each))
            for token in tokens:
                self.add_token(token)


@cache
def _joins_parts(tokenizer: ChatTokenizer, role: Role) -> bool:
    """Whether the template joins several texts of a message itself. Templates for text alone print the list."""
    parts = [{"type": "text", "text": text} for text in ("First.", "Second.")]
    question, answer = ({"role": each, "content": "Other."} for each in ("user", "assistant"))
    message = {"role": role, "content": parts}
    talk = {"user": [message], "assistant": [question, message], "system": [message, question, answer]}.get(role)
    if talk is None:
        return False  # responses of tools: their texts are one value
    try:
        with bounded(4):
            written = str(tokenizer.hf.apply_chat_template(talk, tokenize=False))
    except Exception:
        return False
    first, _, second = written.partition("First.")[2].partition("Second.")
    return not first.strip() and "Second." in written and not second.startswith(("'", '"'))


def _template_message(message: Message, edit: Callable[[str], str], tokenizer: ChatTokenizer) -> dict[str, Any]:
    content: Any
    only_text = all(isinstance(part, TextPart) for part in message.parts)
    if only_text and (len(message.parts) < 2 or not _joins_parts(tokenizer, message.role)):
        content = edit(message.text)
    else:
        content = [_template_part(part, edit) for part in message.parts]
    rendered: dict[str, Any] = {"role": message.role, "content": content}
    if message.reasoning is not None:
        rendered["reasoning_content"] = edit(message.reasoning)
    if message.tool_calls:
        rendered["tool_calls"] = [_template_call(_edit(call, edit)) for call in message.tool_calls]
    if message.call_id is not None:
        rendered["tool_call_id"] = edit(message.call_id)
    if message.tool_name is not None:
        rendered["name"] = edit(message.tool_name)
    return rendered


def _template_call(call: Mapping[str, Any]) -> dict[str, Any]:
    known = {"id": call["id"]} if "id" in call else {}
    return {"type": "function", **known, "function": {key: value for key, value in call.items() if key != "id"}}


def _template_part(part: ContentPart, edit: Callable[[str], str]) -> dict[str, str]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": edit(part.text)}
    return {"type": IMAGE if isinstance(part, ImagePart) else VIDEO}


def _edit(value: Any, edit: Callable[[str], str]) -> Any:
    """Applies an edit to every string in ``value``, including keys."""
    if isinstance(value, str):
        return edit(value)
    if isinstance(value, Mapping):
        return {edit(str(key)): _edit(item, edit) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_edit(item, edit) for item in value]
    return value


def _require_encodable(text: str, where: str) -> None:
    """Rejects lone surrogates: halves of a character, which cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        before = excerpt(text[max(0, error.start - 30) : error.start], 60)
        raise RowRejected(
            Reason.INVALID_UNICODE,
            f"{where}: character {error.start} is the lone surrogate \\u{ord(text[error.start]):04x}, half of a "
            f"character, after {before!r}; correct the source's text",
        ) from None


def _strings(conversation: Conversation) -> Iterator[tuple[str, str]]:
    """Yields all strings of a conversation, each with its place."""
    for number, message in enumerate(conversation.messages, start=1):
        where = f"message {number} of {len(conversation.messages)} ({message.role})"
        yield from ((where, part.text) for part in message.parts if isinstance(part, TextPart))
        if message.reasoning is not None:
            yield where, message.reasoning
        if message.tool_calls:
            yield from ((where, text) for text in _nested_strings(message.tool_calls))
        yield from ((where, told) for told in (message.call_id, message.tool_name) if told is not None)
    yield from (("tools", text) for text in _nested_strings(conversation.tools))
    arguments = conversation.template_arguments.values()
    yield from (("chat_template_kwargs", text) for value in arguments for text in _nested_strings(value))


def _nested_strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _nested_strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _nested_strings(item)


def _unused_character(texts: Iterable[str]) -> str:
    used = set().union(*texts)
    free = next((chr(code) for code in _PRIVATE_USE if chr(code) not in used), None)
    if free is None:
        raise RowRejected(
            Reason.SPECIAL_TOKEN_TEXT, "the data spells special tokens and uses every private-use character"
        )
    return free
