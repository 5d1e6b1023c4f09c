"""The recipe vqa: which answer is learned, where the image stands, and which rows are rejected."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import pytest

from vlmdata.preprocess.conversation import Conversation, ImagePart, TextPart
from vlmdata.preprocess.recipes.base import candidates_of, load_recipe
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.row import Row
from vlmdata.reasons import Reason

IMAGE = {"bytes": b"pixels", "path": "7.jpg"}
ROW = {"image": IMAGE, "question": "Total?", "answers": ["12", "12.50", "12.50"]}
URL = "data:image/png;base64," + base64.b64encode(b"pixels").decode()


def convert(values: dict[str, Any], **options: str) -> list[Conversation]:
    made = [each.made for each in candidates_of(load_recipe("vqa", options), Row(0, values))]
    return [each for each in made if isinstance(each, Conversation)]


def answers(values: dict[str, Any], **options: str) -> list[str]:
    return [each.messages[1].text for each in convert(values, **options)]


@pytest.mark.parametrize(("pick", "learned"), [("common", ["12.50"]), ("first", ["12"]), ("each", ["12", "12.50"])])
def test_which_answers_are_learned(pick: str, learned: list[str]) -> None:
    assert answers(ROW, pick=pick) == learned


def test_of_equally_common_answers_the_first() -> None:
    assert answers({**ROW, "answers": ["b", "a", "a", "b"]}) == ["b"]


def test_the_most_common_answer_of_the_data_goes_first() -> None:
    row = {**ROW, "multiple_choice_answer": "yes", "answers": [{"answer": "no", "answer_id": 1}]}
    assert (answers(row), answers(row, pick="first"), answers(row, pick="each")) == (["yes"], ["no"], ["no"])


def test_answers_of_a_csv_are_a_list() -> None:
    assert answers({**ROW, "answers": '["12", "12"]'}) == ["12"]
    assert answers({"image": IMAGE, "question": "Which?", "answer": "[1, 2]"}) == ["[1, 2]"]


def test_the_image_precedes_the_question_and_the_suffix_follows_it() -> None:
    (made,) = convert(ROW, suffix="Briefly.")
    image, question = made.messages[0].parts
    assert isinstance(image, ImagePart)
    assert (image.data, question) == (b"pixels", TextPart("Total?\nBriefly."))
    assert (made.unused, made.unknown) == ((), ())


def test_marks_place_the_images() -> None:
    (made,) = convert({**ROW, "image": None, "images": [b"a", b"b"], "question": "<image> or <image>?"})
    kinds = [part.data if isinstance(part, ImagePart) else part.text for part in made.messages[0].parts if part]
    assert kinds == [b"a", " or ", b"b", "?"]


def test_unused_keys_are_told() -> None:
    (made,) = convert({**ROW, "question_types": ["form"], "score": 1, "weight": 0.5})
    assert (made.unused, made.unknown, made.loss_weight) == (("question_types",), ("score",), 0.5)


@pytest.mark.parametrize(
    ("changes", "reason", "message"),
    [
        (
            {"answers": None},
            Reason.MISSING_COLUMN,
            "none of answers, answer, label, multiple_choice",
        ),
        ({"answers": []}, Reason.EMPTY_ANSWER, "answers is empty"),
        ({"answers": ["", " "]}, Reason.EMPTY_ANSWER, "answers is empty"),
        ({"answers": [7]}, Reason.MALFORMED_MESSAGES, r"answers\[0\] is not text: 7"),
        ({"question": None}, Reason.MISSING_COLUMN, "neither question nor query; columns with values: image, answers"),
        ({"query": "?"}, Reason.MALFORMED_MESSAGES, "question and query both hold a question; keep one"),
        ({"question": 7}, Reason.MALFORMED_MESSAGES, "question is not text: 7"),
        ({"question": "<image 1>?"}, Reason.UNSUPPORTED_CONTENT, "a mark for an image that the recipe does not read"),
        ({"image": None}, Reason.MISSING_IMAGE, "a question needs one image"),
        ({"image": None, "images": [b"a", b"b"]}, Reason.IMAGE_COUNT_MISMATCH, "images holds 2 images; a question"),
        ({"label": True}, Reason.PREFERENCE_DATA, "label is True"),
    ],
)
def test_what_is_rejected(changes: dict[str, Any], reason: Reason, message: str) -> None:
    with pytest.raises(RowRejected, match=message) as rejected:
        convert({**ROW, **changes})
    assert rejected.value.reason is reason


@pytest.mark.parametrize("image", [None, b"pixels"])
def test_a_file_at_a_url_must_have_the_checksum_of_the_row(image: bytes | None) -> None:
    row = {**ROW, "image": image, "image_url": URL, "image_sha256": hashlib.sha256(b"pixels").hexdigest()}
    assert [part.data for part in convert(row)[0].images] == [b"pixels"]
    other = {**row, "image_sha256": "0" * 64}
    if image is not None:  # stored beside the URL, perhaps encoded anew
        assert convert(other)
        return
    with pytest.raises(RowRejected, match=r"image_url\[0\] is a file with sha256 .* not the one that the row") as found:
        convert(other)
    assert found.value.reason is Reason.IMAGE_FETCH
