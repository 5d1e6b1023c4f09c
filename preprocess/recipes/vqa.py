"""The recipe ``vqa``: a question on an image, and answers of one or several people. Learns an answer.

Sources: the dataset cards of lmms-lab/DocVQA, lmms-lab/VQAv2, lmms-lab/textvqa, HuggingFaceM4/ChartQA and
lmms-lab/COCO-Caption.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from vlmdata.preprocess.conversation import Conversation, Message
from vlmdata.preprocess.recipes.answers import Pick, picked, texts_in
from vlmdata.preprocess.recipes.chat.content import ContentReader, StrayMarks, StrayMarksOption
from vlmdata.preprocess.recipes.chat.images import BOUND_KEYS
from vlmdata.preprocess.recipes.chat.row_keys import refuse_row
from vlmdata.preprocess.recipes.chat.tools import parse_json
from vlmdata.preprocess.recipes.chat.turns import text_turn
from vlmdata.preprocess.recipes.chat.weights import ROW_WEIGHTS, row_weight
from vlmdata.preprocess.recipes.keys import HARMLESS_COLUMNS, Columns, KeyLog, filled
from vlmdata.preprocess.recipes.media import MediaLoader
from vlmdata.preprocess.recipes.row_image import IMAGE_COLUMNS, IMAGE_NAMES, images_of, with_image
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.row import Row
from vlmdata.reasons import Reason

_QUESTIONS = ("question", "query")
#: VQAv2's most common answer; answers; ChartQA's answer.
_COMMON, _ANSWERS = "multiple_choice_answer", ("answers", "answer", "label")
_USED_COLUMNS = frozenset({*_QUESTIONS, _COMMON, *_ANSWERS, *IMAGE_COLUMNS, *BOUND_KEYS, *ROW_WEIGHTS})
#: What the datasets tell of a row besides: types, places, and text that was recognised in the image.
_HARMLESS_COLUMNS = HARMLESS_COLUMNS | {
    "questionId",
    "question_type",
    "question_types",
    "question_tokens",
    "answer_type",
    "docId",
    "ucsf_document_page_no",
    "data_split",
    "set_name",
    "human_or_machine",
    "image_classes",
    "flickr_original_url",
    "flickr_300k_url",
    "ocr_tokens",
    "ocr",
    "operation/reasoning",
    "coco_url",
    "date_captured",
}


class Vqa:
    """Rows with an image, ``question`` or ``query``, and answers."""

    takes: ClassVar[tuple[Columns, ...]] = (Columns((IMAGE_NAMES, _QUESTIONS, (_COMMON, *_ANSWERS))),)
    needs: ClassVar[str] = "image, question (or query), and answers, answer, multiple_choice_answer or label"
    makes: ClassVar[tuple[type, ...]] = (Conversation,)

    @dataclass(frozen=True)
    class Options:
        """Options of the recipe."""

        pick: Annotated[
            Pick,
            "Of several answers, learn the most common one (of equally common ones the first), the first, or each in a "
            "sample of its own.",
        ] = Pick.COMMON
        suffix: Annotated[str, "What follows each question, on a new line."] = ""
        stray_marks: StrayMarksOption = StrayMarks.REJECT

    def __init__(self, options: Options, media: MediaLoader):
        self._options, self._media = options, media

    def __call__(self, row: Row) -> Conversation | list[Conversation]:
        """Returns image and question, and the answer."""
        values = row.present
        refuse_row(values)
        question, answers = _question(values), _answers(values, self._options.pick)
        made = list(self._made(values, question, answers))
        return made if self._options.pick is Pick.EACH else made[0]

    def _made(self, values: Mapping[str, Any], question: str, answers: list[str]) -> Iterator[Conversation]:
        suffix = f"\n{self._options.suffix}" if self._options.suffix else ""
        for answer in answers:
            keys = KeyLog()
            keys.note(values, _USED_COLUMNS, _HARMLESS_COLUMNS)
            images = images_of(values, self._media, keys)
            turns = text_turn("user", question + suffix, "question"), text_turn("assistant", answer, "answer")
            reader = ContentReader(turns, images, self._options.stray_marks, keys)
            asked, said = (tuple(reader.parts(turn)) for turn in turns)
            asked = with_image(values, images, asked, "a question")
            messages = Message("user", asked), Message("assistant", said)
            yield Conversation(messages, (), row_weight(values), keys.harmless, keys.unknown)


def _question(values: Mapping[str, Any]) -> str:
    """Returns the question.

    Raises:
        RowRejected: MISSING_COLUMN without one, MALFORMED_MESSAGES with two or one that is not text.
    """
    found = filled(values, _QUESTIONS)
    if len(found) != 1:
        if found:
            raise RowRejected(Reason.MALFORMED_MESSAGES, f"{' and '.join(found)} both hold a question; keep one")
        raise RowRejected(
            Reason.MISSING_COLUMN,
            f"neither {' nor '.join(_QUESTIONS)}; columns with values: {', '.join(values) or 'none'}",
        )
    return str(text_turn("user", values[found[0]], found[0]).content)


def _answers(values: Mapping[str, Any], pick: Pick) -> list[str]:
    """Returns the answers to learn.

    Raises:
        RowRejected: MISSING_COLUMN without a column for them, EMPTY_ANSWER without an answer.
    """
    if pick is Pick.COMMON and filled(values, [_COMMON]):
        return picked(texts_in(values[_COMMON], _COMMON), pick, _COMMON)
    known = (*_ANSWERS, _COMMON)
    name = next(iter(filled(values, known) or [name for name in known if name in values]), None)
    if name is None:
        raise RowRejected(
            Reason.MISSING_COLUMN,
            f"none of {', '.join(known)} has a value; columns with values: {', '.join(values) or 'none'}",
        )
    value = values[name]
    if name == _ANSWERS[0] and isinstance(value, str) and value.startswith("["):  # CSV
        value = parse_json(value, name)
    return picked(texts_in(value, name), pick, name)
