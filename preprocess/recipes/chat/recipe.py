"""The recipe ``chat``: reads turns with their parts, calls and weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, ClassVar

from vlmdata.preprocess.conversation import Conversation, ImagePart, Message, TextPart
from vlmdata.preprocess.recipes.chat.content import ContentOptions, ContentReader
from vlmdata.preprocess.recipes.chat.forms import LIST_COLUMNS, PAIRS, read_form
from vlmdata.preprocess.recipes.chat.images import RowImages
from vlmdata.preprocess.recipes.chat.objects import COLUMN as OBJECTS
from vlmdata.preprocess.recipes.chat.objects import BoxForm, with_objects
from vlmdata.preprocess.recipes.chat.row_keys import USED_COLUMNS, refuse_box_marks, refuse_row
from vlmdata.preprocess.recipes.chat.tools import read_arguments, read_calls, read_tools
from vlmdata.preprocess.recipes.chat.turns import HARMLESS_KEYS, REASONING_KEYS, USED_KEYS, RowTurn
from vlmdata.preprocess.recipes.chat.videos import RowVideos
from vlmdata.preprocess.recipes.chat.weights import row_weight, turn_weight
from vlmdata.preprocess.recipes.keys import HARMLESS_COLUMNS, Columns, KeyLog, filled
from vlmdata.preprocess.recipes.media import MediaLoader
from vlmdata.preprocess.recipes.polygons import Polygons
from vlmdata.preprocess.reject import RowRejected, excerpt
from vlmdata.preprocess.row import Row
from vlmdata.reasons import Reason
from vlmdata.wording import with_article

_UNMARKED = "give -O unmarked=first"


class Unmarked(StrEnum):
    """Handling of images and videos of rows that have no place for any of them."""

    REJECT = "reject"
    FIRST = "first"


@dataclass(frozen=True)
class ChatOptions(ContentOptions):
    """Options of the recipe."""

    unmarked: Annotated[
        Unmarked,
        "Images (or videos) of a row without a mark for any of them: reject the row, or put them before the text of "
        "the first user turn.",
    ] = Unmarked.REJECT
    boxes: Annotated[
        BoxForm,
        "What replaces the marks `<bbox>` and `<ref-object>` of rows with objects: coordinates as a list and plain "
        "names, or both between the family's tokens for them.",
    ] = BoxForm.LIST
    polygons: Annotated[
        Polygons, "Entries of bbox with six numbers or more: reject the row, or learn the box around each polygon."
    ] = Polygons.REJECT


class Chat:
    """Rows with a list of turns, or with a question and its answer."""

    takes: ClassVar[tuple[Columns, ...]] = (
        Columns((LIST_COLUMNS,), whole=True),
        *(Columns(((question,), (answer,)), whole=True) for question, answer in PAIRS),
    )
    needs: ClassVar[str] = "messages, conversations, or a pair such as instruction and output"
    makes: ClassVar[tuple[type, ...]] = (Conversation,)

    Options = ChatOptions

    def __init__(self, options: ChatOptions, media: MediaLoader):
        self._options, self._media = options, media

    def __call__(self, row: Row) -> Conversation:
        """Returns the row's turns, with each image and video in its place."""
        values = row.present
        refuse_row(values, reads_videos=True)
        form = read_form(values)
        _require_no_continued_turn(form.turns)
        keys = KeyLog()
        keys.note(values, USED_COLUMNS | form.columns | {OBJECTS}, HARMLESS_COLUMNS)
        images, videos = RowImages(values, self._media, keys), RowVideos(values, self._media, keys)
        reader = ContentReader(form.turns, images, self._options.stray_marks, keys, videos)
        messages = tuple(_message(turn, reader, keys) for turn in form.turns)
        if self._options.unmarked is Unmarked.FIRST:
            messages = _with_first(messages, images, videos)
        images.require_all_used(_UNMARKED)
        videos.require_all_used(_UNMARKED)
        refuse_box_marks(values, messages)
        messages = with_objects(values, messages, self._options.boxes, self._options.polygons, keys)
        tools = read_tools(values, keys)
        arguments = read_arguments(values, keys)
        return Conversation(
            messages,
            tools,
            row_weight(values),
            keys.harmless,
            keys.unknown,
            template_arguments=arguments,
        )


def _with_first(messages: tuple[Message, ...], images: RowImages, videos: RowVideos) -> tuple[Message, ...]:
    """Puts images and videos that have no place before the text of the first user turn, if there is one."""
    number = next((i for i, message in enumerate(messages) if message.role == "user"), None)
    if number is None:
        return messages
    parts = (*images.take_unmarked(), *videos.take_unmarked(), *messages[number].parts)
    return (*messages[:number], replace(messages[number], parts=parts), *messages[number + 1 :])


def _require_no_continued_turn(turns: Sequence[RowTurn]) -> None:
    """Rejects a prompt that ends with a turn of the assistant, which the completion would go on: they are two turns."""
    for before, turn in pairwise(turns):
        if before.role == turn.role == "assistant" and turn.learned and not before.learned:
            raise RowRejected(
                Reason.UNSUPPORTED_CONTENT,
                f"{before.where} ends the prompt with an assistant turn, and {turn.where} goes on with it; a turn is "
                "learned as a whole or not at all. Write its beginning into the completion, or end the prompt with "
                "the user's turn",
            )


def _message(turn: RowTurn, reader: ContentReader, keys: KeyLog) -> Message:
    used = USED_KEYS | {"name"} if turn.role == "tool" else USED_KEYS
    keys.note(turn.entry, used, HARMLESS_KEYS, "messages[].")
    parts = tuple(reader.parts(turn))
    media = [part for part in parts if not isinstance(part, TextPart)]
    if turn.role in ("system", "assistant") and media:
        kind = "image" if isinstance(media[0], ImagePart) else "video"
        where = f"{turn.where}: {with_article(kind)} in {with_article(turn.role)} turn"
        raise RowRejected(Reason.UNSUPPORTED_CONTENT, f"{where}; only user and tool turns can hold {kind}s")
    weight = turn_weight(turn.entry, turn.role, turn.where)
    if turn.role == "assistant" and not turn.learned:
        weight = 0.0
    calls = () if turn.calls is None else tuple(read_calls(turn.calls, f"{turn.where}.tool_calls", keys))
    told = (turn.entry.get(key) if turn.role == "tool" else None for key in ("tool_call_id", "name"))
    call_id, name = (each if isinstance(each, str) else None for each in told)
    return Message(turn.role, parts, _reasoning(turn), calls, weight, call_id, name)


def _reasoning(turn: RowTurn) -> str | None:
    given = filled(turn.entry, REASONING_KEYS) or [key for key in REASONING_KEYS if key in turn.entry]
    for key in given:
        text = turn.entry[key]
        if not isinstance(text, str):
            raise RowRejected(Reason.MALFORMED_MESSAGES, f"{turn.where}.{key} is not text: {excerpt(text)}")
        if text != turn.entry[given[0]]:
            raise RowRejected(Reason.MALFORMED_MESSAGES, f"{turn.where}: {given[0]} and {key} differ; keep one of them")
    return turn.entry[given[0]] if given else None
