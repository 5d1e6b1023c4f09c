"""CORD-V2 rows: a receipt image and its parse, learned as Donut tokens or as JSON.

Sources: the ``naver-clova-ix/cord-v2`` dataset card, and ``json2token`` of clovaai/donut for the token form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar

import xxhash

from vlmdata.preprocess import json_text
from vlmdata.preprocess.conversation import Conversation, ImagePart, Message, TextPart
from vlmdata.preprocess.recipes.keys import HARMLESS_COLUMNS, Columns, KeyLog
from vlmdata.preprocess.recipes.media import MediaLoader, place_with_file
from vlmdata.preprocess.reject import RowRejected, excerpt
from vlmdata.preprocess.row import Row
from vlmdata.reasons import Reason

_USED_COLUMNS = frozenset({"image", "ground_truth"})
_USED_KEYS = frozenset({"gt_parse", "gt_parses"})
#: CORD's data on the image and its words, in addition to the parse.
_HARMLESS_KEYS = frozenset({"meta", "valid_line", "roi", "repeating_symbol", "dontcare"})


class Target(StrEnum):
    """Form of the answer."""

    DONUT = "donut"
    JSON = "json"


class CordV2:
    """Converts ``image`` and ``ground_truth`` (JSON with ``gt_parse`` or ``gt_parses``) to a question and answer."""

    #: The parse of a receipt may have its text beside it.
    takes: ClassVar[tuple[Columns, ...]] = (Columns((("image",), ("ground_truth",)), also=("txt", "text", "caption")),)
    needs: ClassVar[str] = "image and ground_truth"
    makes: ClassVar[tuple[type, ...]] = (Conversation,)

    @dataclass(frozen=True)
    class Options:
        """Options of the recipe."""

        prompt: Annotated[str, "What the user asks about each image."] = "Describe this image."
        target: Annotated[Target, "Whether the answer is in Donut tokens or JSON."] = Target.DONUT

    def __init__(self, options: Options, media: MediaLoader):
        self._options, self._media = options, media

    def __call__(self, row: Row) -> Conversation:
        """Returns image and prompt as the question, and the parse as the answer."""
        ground_truth = _ground_truth(row)
        parse = _choose_parse(ground_truth, row.number)
        answer = donut_tokens(parse) if self._options.target is Target.DONUT else json.dumps(parse, ensure_ascii=False)
        if parse in ({}, [], "", None) or not answer.strip():
            raise RowRejected(Reason.EMPTY_ANSWER, f"the ground truth is empty: {excerpt(parse)}")
        image = row.values.get("image")
        part = ImagePart(self._media.load(image, "image"), place_with_file(image, "image"))
        user = Message("user", (part, TextPart(self._options.prompt)))
        keys = KeyLog()
        keys.note(row.values, _USED_COLUMNS, HARMLESS_COLUMNS)
        keys.note(ground_truth, _USED_KEYS, _HARMLESS_KEYS, "ground_truth.")
        answered = Message("assistant", (TextPart(answer),))
        return Conversation((user, answered), unused=keys.harmless, unknown=keys.unknown)


def donut_tokens(value: Any) -> str:
    """Converts a parse to Donut's token form.

    Mappings become ``<s_key>…</s_key>`` with keys in reverse-sorted order, lists are joined by ``<sep/>``, and
    other values become their ``str``. A mapping with only ``text_sequence`` becomes that text.
    """
    if isinstance(value, Mapping):
        if set(value) == {"text_sequence"}:
            return str(value["text_sequence"])
        return "".join(f"<s_{key}>{donut_tokens(value[key])}</s_{key}>" for key in sorted(value, reverse=True))
    if isinstance(value, list):
        return "<sep/>".join(donut_tokens(item) for item in value)
    return str(value)


def _ground_truth(row: Row) -> Mapping[str, Any]:
    if "ground_truth" not in row.values:
        columns = ", ".join(row.values)
        raise RowRejected(Reason.MISSING_COLUMN, f"no column ground_truth; columns are {columns}")
    value = row.values["ground_truth"]
    if isinstance(value, str):
        try:
            value = json_text.loads(value)
        except (ValueError, RecursionError) as error:
            raise RowRejected(
                Reason.MALFORMED_GROUND_TRUTH, f"ground_truth is not JSON: {error}: {excerpt(value)}"
            ) from error
    if not isinstance(value, Mapping):
        raise RowRejected(Reason.MALFORMED_GROUND_TRUTH, f"ground_truth is not a JSON object: {excerpt(value)}")
    return value


def _choose_parse(ground_truth: Mapping[str, Any], row: int) -> Any:
    """Returns ``gt_parse``, or one of ``gt_parses`` chosen by the row number."""
    choices = ground_truth.get("gt_parses")
    if choices is None:
        if ground_truth.get("gt_parse") is None:
            keys = ", ".join(ground_truth) or "no keys"
            raise RowRejected(
                Reason.MALFORMED_GROUND_TRUTH, f"ground_truth has neither gt_parse nor gt_parses, but {keys}"
            )
        return ground_truth["gt_parse"]
    if not isinstance(choices, list) or not choices:
        raise RowRejected(Reason.MALFORMED_GROUND_TRUTH, f"gt_parses is not a list of parses: {excerpt(choices)}")
    return choices[xxhash.xxh3_64_intdigest(str(row).encode()) % len(choices)]
