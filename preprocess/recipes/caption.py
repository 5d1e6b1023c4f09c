"""The recipe ``caption``: an image and a caption, as in WebDataset ``jpg`` and ``txt`` pairs. Learns the caption."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from vlmdata.preprocess.conversation import Conversation, Message, TextPart
from vlmdata.preprocess.recipes.answers import Pick, picked, texts_in
from vlmdata.preprocess.recipes.chat.content import ContentReader, StrayMarks, StrayMarksOption
from vlmdata.preprocess.recipes.chat.images import BOUND_KEYS
from vlmdata.preprocess.recipes.chat.row_keys import refuse_row
from vlmdata.preprocess.recipes.chat.turns import text_turn
from vlmdata.preprocess.recipes.chat.weights import ROW_WEIGHTS, row_weight
from vlmdata.preprocess.recipes.keys import HARMLESS_COLUMNS, Columns, KeyLog, is_empty
from vlmdata.preprocess.recipes.media import MediaLoader
from vlmdata.preprocess.recipes.row_image import IMAGE_COLUMNS, images_of, only_image
from vlmdata.preprocess.reject import RowRejected, excerpt
from vlmdata.preprocess.row import Row
from vlmdata.reasons import Reason

_CAPTIONS = ("txt", "text", "caption")
_USED_COLUMNS = frozenset({*IMAGE_COLUMNS, *_CAPTIONS, *BOUND_KEYS, *ROW_WEIGHTS})
#: Download data that img2dataset writes in the JSON next to each image.
_HARMLESS_COLUMNS = HARMLESS_COLUMNS | {
    "status",
    "error_message",
    "original_width",
    "original_height",
    "exif",
    "sha256",
    "md5",
    "transcripts",  # PixMo-Cap's, of which its captions are made
}


class Caption:
    """Rows with ``image`` and ``txt``, ``text`` or ``caption``."""

    takes: ClassVar[tuple[Columns, ...]] = (
        Columns((("image",), _CAPTIONS)),
        Columns((("image_url",), ("caption",))),
    )
    needs: ClassVar[str] = "image and txt, text or caption"
    makes: ClassVar[tuple[type, ...]] = (Conversation,)

    @dataclass(frozen=True)
    class Options:
        """Options of the recipe."""

        prompt: Annotated[str, "What the user asks about each image."] = "Describe this image."
        pick: Annotated[
            Pick,
            "Of a list of captions, learn the first, the most common one, or each in a sample of its own.",
        ] = Pick.FIRST
        stray_marks: StrayMarksOption = StrayMarks.REJECT

    def __init__(self, options: Options, media: MediaLoader):
        self._options, self._media = options, media

    def __call__(self, row: Row) -> Conversation | list[Conversation]:
        """Returns image and prompt as the question, and the caption as the answer."""
        values = row.present
        refuse_row(values)
        made = [self._of(caption, values) for caption in picked(_captions(values), self._options.pick, "the caption")]
        return made if self._options.pick is Pick.EACH else made[0]

    def _of(self, text: str, values: Mapping[str, Any]) -> Conversation:
        keys = KeyLog()
        keys.note(values, _USED_COLUMNS, _HARMLESS_COLUMNS)
        answer = text_turn("assistant", text, "caption")
        images = images_of(values, self._media, keys)
        caption = tuple(ContentReader([answer], images, self._options.stray_marks, keys).parts(answer))
        question = only_image(values, images, "a caption"), TextPart(self._options.prompt)
        turns = Message("user", question), Message("assistant", caption)
        return Conversation(turns, (), row_weight(values), keys.harmless, keys.unknown)


def _captions(values: Mapping[str, Any]) -> list[str]:
    """Returns the captions, stripped of surrounding white space.

    Raises:
        RowRejected: If there is no column with captions, or columns have different ones.
    """
    found = {name: values[name] for name in _CAPTIONS if not is_empty(values.get(name))}
    if not any(name in values for name in _CAPTIONS):
        raise RowRejected(Reason.MISSING_COLUMN, f"no {', '.join(_CAPTIONS)}; columns are {', '.join(values)}")
    texts = [texts_in(value, name) for name, value in found.items()]
    if any(each != texts[0] for each in texts):
        raise RowRejected(Reason.MALFORMED_MESSAGES, f"{' and '.join(found)} hold different captions: {excerpt(found)}")
    return texts[0] if texts else []
