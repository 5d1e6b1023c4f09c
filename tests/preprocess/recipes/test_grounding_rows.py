"""The recipe grounding: boxes and points with their units, names of classes, and which rows are rejected."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conftest import encoded_image
from vlmdata.families import REGISTRY as FAMILIES
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig
from vlmdata.preprocess.conversation import BoxPart, Conversation, ImagePart, PointPart, TextPart
from vlmdata.preprocess.encode.grounding import with_grounding_as_text
from vlmdata.preprocess.grounding import Unit
from vlmdata.preprocess.recipes.base import candidates_of, load_recipe
from vlmdata.preprocess.recipes.coco_names import COCO
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.row import Row, Struct
from vlmdata.reasons import Reason

FILE = encoded_image(width=80, height=60)
POINTS = {"image": FILE, "points": [{"x": 50.0, "y": 25.0}], "label": "dots"}
BOX = {"image": FILE, "bbox": [20, 15, 40, 30], "answer": ["left dot", "the dot"]}
OBJECTS = {
    "image": FILE,
    "objects": {"bbox": [[20, 15, 40, 30], [0, 0, 8, 6]], "category": [16, "cat"], "area": [1, 2], "id": [1, 2]},
}


def convert(values: dict[str, Any], **options: str) -> list[Conversation]:
    made = [each.made for each in candidates_of(load_recipe("grounding", options), Row(0, values))]
    return [each for each in made if isinstance(each, Conversation)]


def places(values: dict[str, Any], **options: str) -> list[BoxPart | PointPart]:
    parts = (part for made in convert(values, **options) for part in made.messages[1].parts)
    return [part for part in parts if isinstance(part, BoxPart | PointPart)]


def learned(made: Conversation, family: str) -> str:
    config = PreprocessConfig(family=family, image=ImageConfig(min_pixels=3136, max_pixels=65_536))
    return with_grounding_as_text(made, config).messages[1].text


def test_points_are_percent_of_the_sides_unless_told_otherwise() -> None:
    point = PointPart((50.0, 25.0), Unit.HUNDRED, label="dots", field="points[0]")
    assert places(POINTS) == [point]
    assert places({**POINTS, "points": [[50.0, 25.0]]}) == [point]
    assert places({**POINTS, "points": json.dumps(POINTS["points"])}) == [point]
    assert places(POINTS, unit="pixels")[0].unit is Unit.PIXELS


def test_a_box_is_that_of_coco_unless_told_otherwise() -> None:
    assert places(BOX) == [BoxPart((20, 15, 60, 45), label="left dot", field="bbox")]
    assert places({**BOX, "bbox": [20, 15, 60, 45]}, boxes="xyxy") == places(BOX)
    assert places({**BOX, "bbox": [0.25, 0.25, 0.5, 0.5]}, unit="0..1")[0].unit is Unit.ONE


GROUNDED = {name: rules for name in FAMILIES if (rules := FAMILIES.find(name).grounding) is not None}


@pytest.mark.parametrize("family", [name for name, rules in GROUNDED.items() if rules.box_key])
def test_every_form_is_the_same_place_in_every_family(family: str) -> None:
    forms = [
        (convert(BOX), "bbox_2d"),
        (convert({**BOX, "bbox": [25, 25, 50, 50]}, unit="0..100"), "bbox_2d"),
        (convert({**BOX, "bbox": [250, 250, 500, 500]}, unit="0..1000"), "bbox_2d"),
        (convert({**BOX, "bbox": [0.25, 0.25, 0.75, 0.75]}, unit="0..1", boxes="xyxy"), "bbox_2d"),
    ]
    found = {learned(made[0], family) for made, _ in forms}
    assert len(found) == 1
    ((box,),) = (json.loads(text) for text in found)
    assert box["label"] == "left dot"
    if FAMILIES.find(family).grounding.scale == 1000:
        assert box["bbox_2d"] == [250, 250, 750, 750]
    ((point,),) = (json.loads(learned(made, family)) for made in convert(POINTS))
    left, top, right, _ = box["bbox_2d"]
    assert point["point_2d"] == [pytest.approx((left + right) / 2, abs=0.5), pytest.approx(top, abs=0.5)]


def test_the_answer_may_have_the_tokens_of_the_family() -> None:
    (one,), (two,) = convert(BOX, form="tokens"), convert(OBJECTS, form="tokens", names="coco")
    asked = [made.messages[0].text for made in (one, two, *convert(POINTS, form="tokens"))]
    assert asked == ["Locate this: left dot", "Locate every object in the image.", "Point to every instance of: dots."]
    internvl = PreprocessConfig(family="internvl")
    dog = "<ref>dog</ref><box>[[250, 250, 750, 750]]</box>"
    assert with_grounding_as_text(one, internvl).messages[1].text == dog.replace("dog", "left dot")
    lines = f"{dog}\n<ref>cat</ref><box>[[0, 0, 100, 100]]</box>"
    assert with_grounding_as_text(two, internvl).messages[1].text == lines
    assert "<|box_start|>(250,250),(750,750)<|box_end|>" in learned(one, "qwen3_5")


def test_names_pick_and_prompt() -> None:
    assert [box.label for box in places(BOX, pick="each")] == ["left dot", "the dot"]
    sentences = {"image": FILE, "bbox": BOX["bbox"], "sentences": [{"raw": "THE dot", "sent": "the dot"}]}
    assert [box.label for box in places(sentences)] == ["the dot"]
    (made,) = convert(BOX, prompt="Where is {name}?")
    image, question = made.messages[0].parts
    assert isinstance(image, ImagePart)
    assert question == TextPart("Where is left dot?")
    assert convert(BOX)[0].messages[0].text == "Locate this, as JSON: left dot"


def test_objects_have_the_names_of_their_classes() -> None:
    found = places(OBJECTS, names="coco")
    assert [(box.label, box.field) for box in found] == [("dog", "objects[0].bbox"), ("cat", "objects[1].bbox")]
    listed = [Struct(bbox=[20, 15, 40, 30], label="dog", iscrowd=0), Struct(bbox=[0, 0, 80, 60], label=1, iscrowd=1)]
    assert [box.label for box in places({**OBJECTS, "objects": listed})] == ["dog"]
    assert places({**OBJECTS, "objects": {"bbox": [], "category": []}}) == []
    assert learned(convert({**OBJECTS, "objects": {"bbox": [], "category": []}})[0], "qwen3_5") == "[]"
    assert (len(COCO), len(set(COCO)), COCO[79]) == (80, 80, "toothbrush")


def test_unused_keys_are_told() -> None:
    (made,) = convert({**OBJECTS, "score": 1, "coco_url": "x"}, names="coco")
    assert (made.unused, made.unknown) == (("coco_url", "objects.area", "objects.id"), ("score",))


@pytest.mark.parametrize(
    ("row", "reason", "message"),
    [
        ({"image": FILE}, Reason.MISSING_COLUMN, "none of points, bbox and objects in the row; it needs one"),
        ({**BOX, **POINTS}, Reason.MALFORMED_MESSAGES, "points and bbox in the row; it needs one of points"),
        ({**BOX, "answer": []}, Reason.EMPTY_ANSWER, "label is empty"),
        ({**BOX, "bbox": [1, 2, 3]}, Reason.BOX_BOUNDS, r"bbox has 3 numbers: \[1, 2, 3\]; it needs 4"),
        ({**BOX, "bbox": [1, 2, 3, None]}, Reason.BOX_BOUNDS, "None is not a finite number"),
        ({**POINTS, "points": [{"x": 1}]}, Reason.BOX_BOUNDS, r"points\[0\] is \[1, None\]; None is not a finite"),
        ({**POINTS, "points": {"x": [1]}}, Reason.MALFORMED_MESSAGES, "points is not a list"),
        ({**POINTS, "image": None}, Reason.MISSING_IMAGE, "a box or point needs one image"),
        (OBJECTS, Reason.MALFORMED_MESSAGES, r"objects\[0\]\.category is 16, and no names are given; .* -O names="),
        ({**OBJECTS, "objects": [7]}, Reason.MALFORMED_MESSAGES, r"objects\[0\] is not an object: 7"),
        (
            {**OBJECTS, "objects": [{"bbox": [1, 1, 1, 1]}]},
            Reason.MALFORMED_MESSAGES,
            r"category is None, and no names",
        ),
        (
            {**OBJECTS, "objects": {"bbox": [[1, 1, 1, 1]], "category": ["a", "b"]}},
            Reason.BOX_COUNT_MISMATCH,
            r"objects\.bbox has 1 entry and objects\.category has 2",
        ),
    ],
)
def test_what_is_rejected(row: dict[str, Any], reason: Reason, message: str) -> None:
    with pytest.raises(RowRejected, match=message) as rejected:
        convert(row)
    assert rejected.value.reason is reason


def test_a_box_outside_of_its_image_is_refused() -> None:
    with pytest.raises(RowRejected, match=r"bbox is \[20, 15, 100, 45\], and image\[0\] is 80x60 pixels: its x 100"):
        learned(convert({**BOX, "bbox": [20, 15, 80, 30]})[0], "qwen3_5")
