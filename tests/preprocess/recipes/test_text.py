"""``--recipe text``: which rows it reads, and what it makes of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chat_rows import data_uri
from tests.conftest import encoded_image
from vlmdata.preprocess.conversation import Document, ImagePart, TextPart
from vlmdata.preprocess.recipes.base import load_recipe
from vlmdata.preprocess.recipes.choice import recipes_for
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.row import Row

ONE, TWO = data_uri(seed=1), data_uri(seed=2)
BYTES = {"bytes": encoded_image(seed=1), "path": None}


def made(values: dict[str, Any], **options: Any) -> Document:
    document = load_recipe("text", options)(Row(0, values))
    assert isinstance(document, Document)
    return document


def shape(document: Document) -> list[str]:
    """Texts as they are, images as which one."""
    pictures = {encoded_image(seed=1): "[1]", encoded_image(seed=2): "[2]"}
    return [part.text if isinstance(part, TextPart) else pictures[part.data] for part in document.parts]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"text": " As it is.\n"}, [" As it is.\n"]),
        ({"content": "code()"}, ["code()"]),
        ({"text": "a<image>b<image>", "images": [ONE, TWO]}, ["a", "[1]", "b", "[2]"]),
        ({"text": "<image> a", "image": BYTES}, ["[1]", " a"]),
        ({"text": r"kept: \<image>"}, ["kept: <image>"]),
        ({"texts": ["a", None, "b"], "images": [None, ONE, None]}, ["a", "[1]", "b"]),
        ({"texts": ["a", "", "b"], "images": [None, BYTES, ""]}, ["a", "[1]", "b"]),
        ({"texts": ["a", "b"]}, ["a", "b"]),
        (
            {
                "content": [
                    {"type": "text", "text": "a"},
                    {"type": "image", "image": TWO},
                    {"type": "image_url", "image_url": {"url": ONE}},
                    {"type": "text", "text": "b"},
                ]
            },
            ["a", "[2]", "[1]", "b"],
        ),
        ({"content": [{"type": "image"}, "a"], "images": [ONE]}, ["[1]", "a"]),
        (
            {
                "text_list": ["First.", "Second."],
                "image_info": [
                    {"image_name": ONE, "raw_url": "x", "matched_text_index": 1, "matched_sim": 0.3},
                    {"image_name": None, "raw_url": TWO, "matched_text_index": 0},
                ],
            },
            ["[2]", "First. ", "[1]", "Second."],
        ),
        ({"messages": [{"role": "assistant", "content": "<image>All of it."}], "images": [ONE]}, ["[1]", "All of it."]),
        ({"conversations": [{"from": "gpt", "value": "All of it."}]}, ["All of it."]),
    ],
)
def test_text_and_images_stand_in_the_order_of_the_row(values: dict[str, Any], expected: list[str]) -> None:
    assert shape(made(values)) == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"label": 3}, "missing_column: none of text, content, texts, .* columns with values: label"),
        ({"text": "a", "content": "b"}, "malformed_document: text is in text and in content"),
        ({"text": 3}, "malformed_messages: text.content is neither text nor a list: 3"),
        ({"texts": "a", "images": []}, "malformed_document: texts is not a list: a"),
        ({"texts": ["a"], "images": [None, ONE]}, "malformed_document: texts has 1 place and images has 2"),
        ({"texts": ["a"], "images": [ONE]}, r"malformed_document: both texts\[0\] and images\[0\] have values"),
        ({"texts": [3]}, r"malformed_document: texts\[0\] is not text: 3"),
        ({"text": "a", "images": [ONE]}, "image_count_mismatch: 0 image placeholders in the text for 1 image"),
        ({"text": "a<image>"}, "image_count_mismatch: text: <image> is placeholder 1, but the row has 0 images"),
        ({"text": "see <video>"}, "unsupported_content: text holds the mark <video>"),
        ({"text": "a", "videos": ["v.mp4"]}, "unsupported_content: videos holds"),
        ({"text": "a", "rejected": "b"}, "preference_data"),
        ({"text_list": ["a"], "image_info": [{"image_name": "x"}]}, "malformed_document: image_info.0.: matched_text_"),
        (
            {"text_list": ["a"], "image_info": [{"image_name": "x", "matched_text_index": 1}]},
            "matched_text_index is 1 of 1 sentence, and the image is named by image_name",
        ),
        ({"text_list": ["a"], "image_info": ["x"]}, r"malformed_document: image_info\[0\] is not an object"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "malformed_document: messages holds user, assistant; as a document it must be one assistant turn",
        ),
        ({"messages": [{"role": "user", "content": "a"}]}, "malformed_document: messages holds user;"),
        ({"text": "a", "weight": -1}, "weight is -1"),
    ],
)
def test_other_rows_say_what_is_wrong(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RowRejected, match=message):
        made(values)


def test_stray_marks_can_be_kept() -> None:
    assert shape(made({"text": "<video> <image>"}, stray_marks="plain")) == ["<video> <image>"]


def test_weights_and_keys_are_those_of_the_row() -> None:
    document = made({"text": "a", "weight": 0.5, "url": "u", "title": "t", "quality": 3})
    assert (document.loss_weight, document.unused, document.unknown) == (0.5, ("title", "url"), ("quality",))
    turn = {"role": "assistant", "content": "a", "loss_scale": 0.5, "name": "n", "mood": "m"}
    document = made({"messages": [turn], "weight": 3})
    assert document.loss_weight == 1.5
    assert (document.unused, document.unknown) == (("messages[].name",), ("messages[].mood",))


@pytest.mark.parametrize(
    ("columns", "fits"),
    [
        (["text"], True),
        (["text", "url", "timestamp"], True),
        (["text", "images"], True),
        (["texts", "images"], True),
        (["text_list", "image_info"], True),
        (["image", "text"], False),
        (["messages", "text"], False),
        (["instruction", "output", "text"], False),
        (["content"], False),
        (["image", "ground_truth"], False),
    ],
)
def test_it_fits_rows_of_text_without_turns(columns: list[str], fits: bool) -> None:
    assert (recipes_for(columns) == ["text"]) is fits


def test_images_are_named_by_their_place() -> None:
    (part,) = (part for part in made({"texts": ["a", ""], "images": ["", ONE]}).parts if isinstance(part, ImagePart))
    assert part.field == "images[1]"
