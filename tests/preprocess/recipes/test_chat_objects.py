"""ms-swift's column ``objects``: what replaces the marks for boxes and names, and which rows are rejected."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.preprocess.recipes.chat_recipe import check_rejected, convert
from vlmdata.preprocess.conversation import BoxPart, LabelPart, PointPart, TextPart
from vlmdata.preprocess.grounding import Form, Unit
from vlmdata.preprocess.recipes.chat import Chat
from vlmdata.preprocess.recipes.chat.objects import BoxForm
from vlmdata.preprocess.recipes.media import MediaLoader
from vlmdata.preprocess.row import Row
from vlmdata.reasons import Reason

#: Two rows of ms-swift's documentation ("Custom dataset", grounding), with an image of bytes.
BEACH = {
    "messages": [
        {"role": "user", "content": "<image>Describe the image."},
        {"role": "assistant", "content": "<ref-object><bbox> and <ref-object><bbox> are playing on the beach"},
    ],
    "images": [b"a"],
    "objects": {
        "ref": ["a dog", "a woman"],
        "bbox": [[331.5, 761.4, 853.5, 1594.8], [676.5, 685.8, 1099.5, 1427.4]],
    },
}
SCREEN = {
    "messages": [
        {"role": "user", "content": "<image>Help me open <ref-object>"},
        {"role": "assistant", "content": "Action: click(start_box='<bbox>')"},
    ],
    "images": [b"a"],
    "objects": {"ref": ["Google Chrome"], "bbox": [[615, 226]]},
}
BOX = "objects.bbox[0]"


def changed(**objects: Any) -> dict[str, Any]:
    """The row of the screen with other keys of ``objects``."""
    return {**SCREEN, "objects": {**SCREEN["objects"], **objects}}


def test_boxes_and_names_take_the_place_of_their_marks_in_order() -> None:
    _, answer = convert(BEACH).messages
    dog, woman = (tuple(box) for box in BEACH["objects"]["bbox"])
    assert answer.parts == (
        TextPart("a dog"),
        BoxPart(dog, form=Form.LIST, field=BOX),
        TextPart(" and a woman"),
        BoxPart(woman, form=Form.LIST, field="objects.bbox[1]"),
        TextPart(" are playing on the beach"),
    )


def test_names_and_points_in_turns_of_both_roles() -> None:
    question, answer = convert(SCREEN).messages
    assert question.text == "Help me open Google Chrome"
    point = PointPart((615, 226), form=Form.LIST, field=BOX)
    assert answer.parts == (TextPart("Action: click(start_box='"), point, TextPart("')"))


def test_with_tokens_names_are_labels() -> None:
    recipe = Chat(Chat.Options(boxes=BoxForm.TOKENS), MediaLoader(None, allow_urls=False))
    question, answer = recipe(Row(0, SCREEN)).messages
    assert question.parts[-1] == LabelPart("Google Chrome", "objects.ref[0]")
    assert answer.parts[1] == PointPart((615, 226), form=Form.TOKENS, field=BOX)


@pytest.mark.parametrize(("kind", "unit"), [("real", Unit.PIXELS), ("norm1", Unit.ONE), ("norm1000", Unit.THOUSAND)])
def test_the_unit_and_the_image_of_a_box(kind: str, unit: Unit) -> None:
    row = changed(bbox_type=kind, image_id=[1], width=[3], depth=[1])
    conversation = convert({**row, "objects": json.dumps(row["objects"])})
    assert conversation.messages[1].parts[1] == PointPart((615, 226), unit, 1, form=Form.LIST, field=BOX)
    assert (conversation.unused, conversation.unknown) == (("objects.width",), ("objects.depth",))


def test_a_mark_after_a_backslash_is_text() -> None:
    turns = [*SCREEN["messages"], {"role": "user", "content": r"What is \<bbox>?"}]
    assert convert({**SCREEN, "messages": turns}).messages[2].parts == (TextPart("What is <bbox>?"),)


@pytest.mark.parametrize(
    ("objects", "reason", "message"),
    [
        ({"bbox": []}, Reason.BOX_COUNT_MISMATCH, r"the text has 1 mark <bbox> for 0 in objects\.bbox; write one"),
        ({"ref": ["a", "b"]}, Reason.BOX_COUNT_MISMATCH, r"1 mark <ref-object> for 2 in objects\.ref"),
        ({"image_id": [0, 0]}, Reason.BOX_COUNT_MISMATCH, r"objects\.image_id has 2 numbers for 1 entry"),
        ({"image_id": [-1]}, Reason.BOX_BOUNDS, r"objects\.image_id\[0\] is -1; it must be the number of an image"),
        ({"bbox": [[1, 2, 3]]}, Reason.BOX_BOUNDS, r"objects\.bbox\[0\] has 3 numbers: \[1, 2, 3\]; a box has four"),
        ({"bbox": [[1, "2"]]}, Reason.BOX_BOUNDS, r"objects\.bbox\[0\] is \[1, '2'\]; '2' is not a finite number"),
        ({"bbox": [[1, float("nan")]]}, Reason.BOX_BOUNDS, r"nan is not a finite number"),
        ({"bbox": ["1, 2"]}, Reason.BOX_BOUNDS, r"objects\.bbox\[0\] is '1, 2'; it must be a list of numbers"),
        ({"bbox": 7}, Reason.MALFORMED_MESSAGES, r"objects\.bbox is not a list: 7"),
        ({"bbox_type": "xywh"}, Reason.MALFORMED_MESSAGES, r"bbox_type is xywh; known: real, norm1, norm1000"),
        ({"ref": [7]}, Reason.MALFORMED_MESSAGES, r"objects\.ref\[0\] is not text: 7"),
    ],
)
def test_rejected_columns(objects: dict[str, Any], reason: Reason, message: str) -> None:
    check_rejected(changed(**objects), reason, message)


def test_marks_outside_of_the_content_are_rejected() -> None:
    calls = [{"name": "click", "arguments": {"at": "<bbox>"}}]
    for more in ({"reasoning_content": "At <bbox>."}, {"tool_calls": calls}):
        turns = [SCREEN["messages"][0], {**SCREEN["messages"][1], **more}]
        check_rejected({**SCREEN, "messages": turns}, Reason.UNSUPPORTED_CONTENT, "turn 2: its .* hold the mark <bbox>")
    check_rejected({**SCREEN, "objects": [1]}, Reason.MALFORMED_MESSAGES, r"objects is not an object with ref and bbox")
