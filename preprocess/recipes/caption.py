"""The recipe ``caption``: an image and a caption, as in WebDataset ``jpg`` and ``txt`` pairs. Learns the caption."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, ClassVar

from preprocess.conversation import Conversation, ImagePart, Message, TextPart
from preprocess.recipes.chat.content import ContentReader, StrayMarks, StrayMarksOption
from preprocess.recipes.chat.forms import fits as fits_chat
from preprocess.recipes.chat.images import BOUND_KEYS, RowImages
from preprocess.recipes.chat.row_keys import refuse_row
from preprocess.recipes.chat.turns import text_turn
from preprocess.recipes.chat.weights import ROW_WEIGHTS, row_weight
from preprocess.recipes.keys import HARMLESS_COLUMNS, KeyLog, is_empty
from preprocess.recipes.media import MediaLoader
from preprocess.reject import RowRejected, excerpt
from preprocess.row import Row
from vlmdata.reasons import Reason
from vlmdata.wording import counted

_CAPTIONS = ("txt", "text", "caption")
_USED_COLUMNS = frozenset({"image", "images", *_CAPTIONS, *BOUND_KEYS, *ROW_WEIGHTS})
#: Download data that img2dataset writes in the JSON next to each image.
_HARMLESS_COLUMNS = HARMLESS_COLUMNS | {
    "status",
    "error_message",
    "original_width",
    "original_height",
    "exif",
    "sha256",
    "md5",
}


class Caption:
    """Rows with ``image`` and ``txt``, ``text`` or ``caption``."""

    needs: ClassVar[str] = "image and txt, text or caption"
    makes: ClassVar[tuple[type, ...]] = (Conversation,)

    @dataclass(frozen=True)
    class Options:
        """Options of the recipe."""

        prompt: Annotated[str, "What the user asks about each image."] = "Describe this image."
        stray_marks: StrayMarksOption = StrayMarks.REJECT

    def __init__(self, options: Options, media: MediaLoader):
        self._options, self._media = options, media

    @staticmethod
    def fits(columns: Collection[str]) -> bool:
        """Returns True for rows with an image and a text, but no turns and no parse."""
        if fits_chat(columns) or "ground_truth" in columns:
            return False
        return "image" in columns and any(name in columns for name in _CAPTIONS)

    def __call__(self, row: Row) -> Conversation:
        """Returns image and prompt as the question, and the caption as the answer."""
        values = {name: value for name, value in row.values.items() if value is not None}
        refuse_row(values)
        keys = KeyLog()
        keys.note(values, _USED_COLUMNS, _HARMLESS_COLUMNS)
        answer = text_turn("assistant", _caption(values), "caption")
        images = RowImages(values, self._media, keys)
        caption = tuple(ContentReader([answer], images, self._options.stray_marks, keys).parts(answer))
        turns = (Message("user", (_only(images), TextPart(self._options.prompt))), Message("assistant", caption))
        return Conversation(turns, (), row_weight(values), keys.harmless, keys.unknown)


def _only(images: RowImages) -> ImagePart:
    """Returns the image of the row.

    Raises:
        RowRejected: MISSING_IMAGE without any; IMAGE_COUNT_MISMATCH with several.
    """
    if images.count != 1:
        reason = Reason.IMAGE_COUNT_MISMATCH if images.count else Reason.MISSING_IMAGE
        raise RowRejected(reason, f"{images.column} holds {counted(images.count, 'image')}; a caption needs one image")
    return images.take(images.column)


def _caption(values: dict[str, object]) -> str:
    """Returns the caption, stripped of surrounding white space.

    Raises:
        RowRejected: If there is no caption, or columns have different ones.
    """
    found = {name: values[name] for name in _CAPTIONS if not is_empty(values.get(name))}
    if not any(name in values for name in _CAPTIONS):
        raise RowRejected(Reason.MISSING_COLUMN, f"no {', '.join(_CAPTIONS)}; columns are {', '.join(values)}")
    texts = set()
    for name, value in found.items():
        if not isinstance(value, str):
            raise RowRejected(Reason.MALFORMED_MESSAGES, f"{name} is not text: {excerpt(value)}")
        texts.add(value.strip())
    if len(texts) > 1:
        raise RowRejected(Reason.MALFORMED_MESSAGES, f"{' and '.join(found)} hold different captions: {excerpt(found)}")
    if not texts or texts == {""}:
        raise RowRejected(Reason.EMPTY_ANSWER, "the caption is empty")
    return texts.pop()
