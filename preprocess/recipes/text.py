"""The recipe ``text``: raw text and interleaved documents for continued pre-training. All text is learned.

Sources: the dataset cards of HuggingFaceM4/OBELICS (``texts`` and ``images``) and of MMC4 (``text_list`` and
``image_info``), and ms-swift's documentation of pre-training data (``messages`` with one assistant turn).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from vlmdata.preprocess.conversation import ContentPart, Document, ImagePart, TextPart
from vlmdata.preprocess.recipes.chat.content import ContentOptions, ContentReader
from vlmdata.preprocess.recipes.chat.forms import LIST_COLUMNS
from vlmdata.preprocess.recipes.chat.images import BOUND_KEYS, RowImages
from vlmdata.preprocess.recipes.chat.row_keys import refuse_row
from vlmdata.preprocess.recipes.chat.turns import HARMLESS_KEYS, RowTurn, read_turn
from vlmdata.preprocess.recipes.chat.weights import ROW_WEIGHTS, TURN_WEIGHTS, row_weight, turn_weight
from vlmdata.preprocess.recipes.keys import HARMLESS_COLUMNS, Columns, KeyLog, filled, is_empty
from vlmdata.preprocess.recipes.media import MediaLoader, place_with_file
from vlmdata.preprocess.reject import RowRejected, excerpt
from vlmdata.preprocess.row import Row
from vlmdata.reasons import Reason
from vlmdata.wording import counted

_CONTENT_COLUMNS = ("text", "content")
_HARMLESS_COLUMNS = HARMLESS_COLUMNS | {
    "title",
    "dump",
    "file_path",
    "language_score",
    "token_count",
    "score",
    "domain",
}
_TURN_KEYS = frozenset({"role", "from", "content", "value", *TURN_WEIGHTS})
_MMC4_KEYS = frozenset({"image_name", "raw_url", "matched_text_index"})
_MMC4_HARMLESS = frozenset({"matched_sim", "face_detections"})


class Text:
    """Rows with ``text`` or ``content``, or with alternating texts and images."""

    takes: ClassVar[tuple[Columns, ...]] = (
        Columns((("text",),)),
        Columns((("texts",), ("images",))),
        Columns((("text_list",), ("image_info",))),
    )
    needs: ClassVar[str] = "text, content, texts and images, or text_list and image_info"
    makes: ClassVar[tuple[type, ...]] = (Document,)

    Options = ContentOptions

    def __init__(self, options: ContentOptions, media: MediaLoader):
        self._options, self._media = options, media

    def __call__(self, row: Row) -> Document:
        """Returns the row's text and images in order."""
        values = row.present
        refuse_row(values)
        keys = KeyLog()
        weight, column = row_weight(values), _column(values)
        if column == "texts":
            parts, images = tuple(self._in_turn(values)), {"images"}
        elif column == "text_list":
            parts, images = tuple(self._beside_sentences(values, keys)), {"image_info"}
        else:
            turn, factor = _turn(values[column], column, keys)
            parts, images = self._content(turn, values, keys), {"images", "image", *BOUND_KEYS}
            weight *= factor
        keys.note(values, frozenset({column, *images, *ROW_WEIGHTS}), _HARMLESS_COLUMNS)
        return Document(parts, weight, keys.harmless, keys.unknown)

    def _content(self, turn: RowTurn, values: Mapping[str, Any], keys: KeyLog) -> tuple[ContentPart, ...]:
        """Reads text with marks, or a list of text and image items. Images of a column fill the places in order."""
        images = RowImages(values, self._media, keys)
        parts = tuple(ContentReader([turn], images, self._options.stray_marks, keys).parts(turn))
        images.require_all_used()
        return parts

    def _in_turn(self, values: Mapping[str, Any]) -> Iterator[ContentPart]:
        """Reads OBELICS rows: two lists of equal length, with a text or an image at each place."""
        texts, images = _list(values, "texts"), _list(values, "images")
        if images and len(texts) != len(images):
            raise RowRejected(
                Reason.MALFORMED_DOCUMENT,
                f"texts has {counted(len(texts), 'place')} and images has {len(images)}; they must have equal length, "
                "with null in images at the places of texts, and vice versa",
            )
        for i, (text, image) in enumerate(zip(texts, images or [None] * len(texts), strict=True)):
            if not is_empty(text) and not is_empty(image):
                raise RowRejected(
                    Reason.MALFORMED_DOCUMENT,
                    f"both texts[{i}] and images[{i}] have values, so their order is unknown: {excerpt(text)!r}",
                )
            if not is_empty(image):
                yield ImagePart(self._media.load(image, f"images[{i}]"), place_with_file(image, f"images[{i}]"))
            elif not is_empty(text):
                yield _text(text, f"texts[{i}]")

    def _beside_sentences(self, values: Mapping[str, Any], keys: KeyLog) -> Iterator[ContentPart]:
        """Reads MMC4 rows: sentences, and images that each precede their matching sentence."""
        sentences, infos = _list(values, "text_list"), _list(values, "image_info")
        before: dict[int, list[ContentPart]] = {}
        for i, info in enumerate(infos):
            where = f"image_info[{i}]"
            if not isinstance(info, Mapping):
                raise RowRejected(Reason.MALFORMED_DOCUMENT, f"{where} is not an object: {excerpt(info)}")
            keys.note(info, _MMC4_KEYS, _MMC4_HARMLESS, "image_info[].")
            place, names = info.get("matched_text_index"), filled(info, ("image_name", "raw_url"))
            if type(place) is not int or not 0 <= place < len(sentences) or not names:
                raise RowRejected(
                    Reason.MALFORMED_DOCUMENT,
                    f"{where}: matched_text_index is {excerpt(place)} of {counted(len(sentences), 'sentence')}, and "
                    f"the image is named by {', '.join(names) or 'neither image_name nor raw_url'}",
                )
            field, image = f"{where}.{names[0]}", info[names[0]]
            loaded = ImagePart(self._media.load(image, field), place_with_file(image, field))
            before.setdefault(place, []).append(loaded)
        for i, sentence in enumerate(sentences):
            yield from before.get(i, [])
            part = _text(sentence, f"text_list[{i}]")
            yield TextPart(part.text + " ") if i + 1 < len(sentences) else part


def _column(values: Mapping[str, Any]) -> str:
    """Returns the column with the text.

    Raises:
        RowRejected: MISSING_COLUMN without any; MALFORMED_DOCUMENT with several.
    """
    known = (*_CONTENT_COLUMNS, "texts", "text_list", *LIST_COLUMNS)
    found = filled(values, known) or [name for name in known if name in values]
    if not found:
        columns = ", ".join(values) or "none"
        raise RowRejected(
            Reason.MISSING_COLUMN, f"none of {', '.join(known)} has a value; columns with values: {columns}"
        )
    if len(found) > 1:
        raise RowRejected(Reason.MALFORMED_DOCUMENT, f"text is in {' and in '.join(found)}; keep one of the columns")
    return found[0]


def _turn(value: Any, column: str, keys: KeyLog) -> tuple[RowTurn, float]:
    """Returns the document as a user turn, in which :class:`ContentReader` orders text and images, and its weight."""
    if column not in LIST_COLUMNS:
        return RowTurn("row" if isinstance(value, list) else column, "user", value, {}), 1.0
    found = [read_turn(turn, f"{column}[{i}]") for i, turn in enumerate(value)] if isinstance(value, list) else []
    if [turn.role for turn in found] != ["assistant"] or found[0].calls:
        what = ", ".join(turn.role for turn in found) if found else excerpt(value)
        raise RowRejected(
            Reason.MALFORMED_DOCUMENT,
            f"{column} holds {what}; as a document it must be one assistant turn without calls. --recipe chat reads "
            "conversations",
        )
    turn = found[0]
    keys.note(turn.entry, _TURN_KEYS, HARMLESS_KEYS, f"{column}[].")
    weight = turn_weight(turn.entry, "assistant", turn.where)
    return dataclasses.replace(turn, role="user"), 1.0 if weight is None else weight


def _list(values: Mapping[str, Any], column: str) -> list[Any]:
    value = values.get(column, [])
    if not isinstance(value, list):
        raise RowRejected(Reason.MALFORMED_DOCUMENT, f"{column} is not a list: {excerpt(value)}")
    return value


def _text(value: Any, where: str) -> TextPart:
    if not isinstance(value, str):
        talk = isinstance(value, Mapping) and "assistant" in value
        remedy = "; questions and answers are read by --recipe chat" if talk else ""
        raise RowRejected(Reason.MALFORMED_DOCUMENT, f"{where} is not text: {excerpt(value)}{remedy}")
    return TextPart(value)
