"""The content of a turn as parts: text, and images and videos at content items and marks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from vlmdata.preprocess.conversation import ContentPart, MediaPart, Role, TextPart
from vlmdata.preprocess.recipes.chat import images as image_column
from vlmdata.preprocess.recipes.chat import videos as video_column
from vlmdata.preprocess.recipes.chat.images import RowImages
from vlmdata.preprocess.recipes.chat.turns import RowTurn
from vlmdata.preprocess.recipes.chat.videos import RowVideos
from vlmdata.preprocess.recipes.keys import KeyLog, filled
from vlmdata.preprocess.reject import RowRejected, excerpt
from vlmdata.reasons import Reason
from vlmdata.wording import with_article

IMAGE_MARK, VIDEO_MARK = "<image>", "<video>"
#: Marks stand for media in text; with a backslash before them, they are literal.
_MARKS = (IMAGE_MARK, VIDEO_MARK, "<audio>")
#: Marks of other notations: Qwen-VL's and ms-swift's, which contain the file, and MMMU's numbered ones.
_FOREIGN = (r"<img>[^<>\n]{1,1000}</img>", r"<image[ _]?[0-9]{1,3}>")
_MARK = re.compile(rf"(\\?)({'|'.join((*_MARKS, *_FOREIGN))})")
_IMAGE_TYPES, _VIDEO_TYPES = ("image", "image_url"), ("video", "video_url")
_AUDIO_KEYS = ("audio", "audio_url", "input_audio")
_TEXT_KEYS = frozenset({"type", "text"})
_ITEM_HARMLESS = frozenset({"cache_control", "id"})
_KEEP = "To keep the mark as text, write \\{mark} or give --recipe-option stray_marks=plain"


class StrayMarks(StrEnum):
    """Handling of marks such as ``<image>`` without media."""

    REJECT = "reject"
    PLAIN = "plain"


#: The option of recipes with marks.
StrayMarksOption = Annotated[StrayMarks, "A mark such as `<image>` without an image: reject the row, or keep as text."]


@dataclass(frozen=True)
class ContentOptions:
    """Options of a recipe that has only the option for marks."""

    stray_marks: StrayMarksOption = StrayMarks.REJECT


class ContentReader:
    """Reads the contents of one row's turns.

    A mark ``<image>`` in a user or tool turn takes the next image of the row, unless content items place the images,
    and ``<video>`` likewise the next video. Any other mark is stray: text that may have lost its media.

    Args:
        turns: All turns of the row.
        images: The row's images.
        stray_marks: Handling of stray marks. If they are kept, all marks of rows without images, or without videos,
            are kept too.
        keys: Records unused keys.
        videos: The row's videos; None if the recipe reads none.
    """

    def __init__(
        self,
        turns: Iterable[RowTurn],
        images: RowImages,
        stray_marks: StrayMarks,
        keys: KeyLog,
        videos: RowVideos | None = None,
    ):
        self._images, self._videos = images, videos
        self._keys = keys
        self._keep_stray = stray_marks is StrayMarks.PLAIN
        kinds = {_kind_of(item) for turn in turns for item in _items(turn.content)}
        #: What takes the files of marks.
        self._taken_by: dict[str, RowImages | RowVideos] = {}
        for mark, types, files in ((IMAGE_MARK, _IMAGE_TYPES, images), (VIDEO_MARK, _VIDEO_TYPES, videos)):
            if files is not None and kinds.isdisjoint(types) and (files.count > 0 or not self._keep_stray):
                self._taken_by[mark] = files
        self._reads = "text and images" if videos is None else "text, images and videos"

    def parts(self, turn: RowTurn) -> Iterator[ContentPart]:
        """Yields the parts of a turn's content, in order.

        Raises:
            RowRejected: If the content cannot be used.
        """
        content = turn.content
        if content is None:
            return
        if isinstance(content, str):
            yield from self._text(content, turn.role, turn.where)
        elif isinstance(content, list):
            for i, item in enumerate(content):
                yield from self._item(item, turn.role, f"{turn.where}.content[{i}]")
        else:
            raise RowRejected(
                Reason.MALFORMED_MESSAGES, f"{turn.where}.content is neither text nor a list: {excerpt(content)}"
            )

    def _item(self, item: Any, role: Role, where: str) -> Iterator[ContentPart]:
        if isinstance(item, str):
            item = {"type": "text", "text": item}
        if not isinstance(item, Mapping):
            raise RowRejected(Reason.MALFORMED_MESSAGES, f"{where} is not an object: {excerpt(item)}")
        # Arrow gives every struct all keys, with null for absent ones.
        item = with_value({key: value for key, value in item.items() if value is not None})
        kind = _kind(item)
        if kind == "text":
            if not isinstance(item.get("text"), str):
                raise RowRejected(Reason.MALFORMED_MESSAGES, f"{where}.text is not text: {excerpt(item.get('text'))}")
            self._refuse(item, (*_IMAGE_TYPES, *_VIDEO_TYPES, *_AUDIO_KEYS), where)
            self._keys.note(item, _TEXT_KEYS, _ITEM_HARMLESS, "messages[].content[].")
            yield from self._text(item["text"], role, where)
        elif kind in _IMAGE_TYPES:
            self._refuse(item, ("text", *_VIDEO_TYPES, *_AUDIO_KEYS), where)
            self._keys.note(item, image_column.ITEM_KEYS, _ITEM_HARMLESS, "messages[].content[].")
            yield self._images.from_item(item, where)
        elif kind in _VIDEO_TYPES and self._videos is not None:
            self._refuse(item, ("text", *_IMAGE_TYPES, *_AUDIO_KEYS), where)
            harmless = _ITEM_HARMLESS | video_column.HARMLESS
            self._keys.note(item, video_column.ITEM_KEYS, harmless, "messages[].content[].")
            yield self._videos.from_item(item, where)
        else:
            raise RowRejected(
                Reason.UNSUPPORTED_CONTENT, f"{where}: content of type {kind!r}; the recipe reads {self._reads}"
            )

    def _refuse(self, item: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
        for key in filled(item, keys):
            raise RowRejected(
                Reason.UNSUPPORTED_CONTENT,
                f"{where} is {with_article(str(_kind(item)))} item, but holds {key} too: {excerpt(item[key])}. Write "
                "one item for each.",
            )

    def _text(self, text: str, role: Role, where: str) -> Iterator[ContentPart]:
        """Yields text and media. Removes the backslash of literal marks."""
        if "<" not in text:
            yield TextPart(text)
            return
        kept, end = "", 0
        for found in _MARK.finditer(text):
            escaped, mark = found.groups()
            kept, end = kept + text[end : found.start()], found.end()
            files = self._taken_by.get(mark) if not escaped and role in ("user", "tool") else None
            if files is not None:
                if kept:
                    yield TextPart(kept)
                kept = ""
                part: MediaPart = files.take(f"{where}: {mark}", remedy=_KEEP.format(mark=mark))
                yield part
            elif escaped or self._keep_stray:
                kept += mark
            else:
                raise self._stray(mark, role, where)
        if kept + text[end:]:
            yield TextPart(kept + text[end:])

    def _stray(self, mark: str, role: Role, where: str) -> RowRejected:
        keep = _KEEP.format(mark=mark)
        if mark not in _MARKS:
            what = f"{where} holds {excerpt(mark)}, a mark for an image that the recipe does not read"
            remedy = f"Write {IMAGE_MARK} instead, and the file in a column images"
            return RowRejected(Reason.UNSUPPORTED_CONTENT, f"{what}. {remedy}. {keep}")
        kind = {IMAGE_MARK: image_column.IMAGE_COLUMN, VIDEO_MARK: video_column.VIDEO_COLUMN}.get(mark)
        if kind is None or (mark == VIDEO_MARK and self._videos is None):
            what = f"{where} holds the mark {mark}, and the recipe reads {self._reads} only"
            return RowRejected(Reason.UNSUPPORTED_CONTENT, f"{what}. {keep}")
        if role not in ("user", "tool"):
            turn = f"{with_article(role)} turn; only user and tool turns can hold {kind.noun}s"
            what = f"{where} holds the mark {mark} in {turn}"
        else:
            what = f"{where} holds the mark {mark}, but content items of the row place its {kind.noun}s"
        return RowRejected(kind.mismatch, f"{what}. {keep}")


def with_value(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a content item of LLaMA-Factory's, ``{"type": "text", "value": …}``, in OpenAI's form."""
    kind = item.get("type")
    if "value" not in item or kind not in ("text", *_IMAGE_TYPES, *_VIDEO_TYPES) or kind in item:
        return item
    return {kind if key == "value" else key: value for key, value in item.items()}


def _items(content: Any) -> Iterator[Mapping[str, Any]]:
    return (item for item in content if isinstance(item, Mapping)) if isinstance(content, list) else iter(())


def _kind_of(item: Mapping[str, Any]) -> str:
    return str(_kind({key: value for key, value in item.items() if value is not None}))


def _kind(item: Mapping[str, Any]) -> Any:
    """Returns the type of a content item, or the first key that implies it."""
    return item.get("type") or next((key for key in ("text", *_IMAGE_TYPES, *_VIDEO_TYPES) if key in item), None)
