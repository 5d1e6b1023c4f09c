"""Polygons in the forms of COCO, CORD and quads of text: the box around each, on request."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import encoded_image
from vlmdata.preprocess.conversation import BoxPart, Conversation
from vlmdata.preprocess.grounding import Form
from vlmdata.preprocess.recipes.base import load_recipe
from vlmdata.preprocess.recipes.chat import Chat
from vlmdata.preprocess.recipes.media import MediaLoader
from vlmdata.preprocess.recipes.polygons import Polygons, box_around
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.row import Row, Struct
from vlmdata.reasons import Reason

#: A quad of a turned line of text, and the box around it.
QUAD, AROUND = [20, 25, 50, 15, 60, 35, 30, 45], (20, 15, 60, 45)
FILE = encoded_image(width=80, height=60)

coordinates = st.floats(-1e6, 1e6, allow_subnormal=False) | st.integers(-5000, 5000)
rings = st.lists(st.tuples(coordinates, coordinates), min_size=3, max_size=9)


@given(parts=st.lists(rings, min_size=1, max_size=3), turn=st.integers(0, 8))
def test_the_box_is_the_extent_of_all_corners(parts: list[list[tuple[float, float]]], turn: int) -> None:
    """In every form, from every first corner, in both directions."""
    xs, ys = zip(*chain.from_iterable(parts), strict=True)
    wanted = (min(xs), min(ys), max(xs), max(ys))
    flat = [list(chain.from_iterable(part)) for part in parts]
    forms: list[Any] = [flat]
    if len(parts) == 1:
        (ring,) = parts
        named = {f"{axis}{n}": value for n, xy in enumerate(ring, 1) for axis, value in zip("xy", xy, strict=True)}
        turned = [list(xy) for xy in (*ring[turn:], *ring[:turn])]
        forms += [flat[0], turned, turned[::-1], named, Struct(**named)]
    for form in forms:
        assert box_around(form, Polygons.BOX, "quad") == wanted


def box_of(values: dict[str, Any], **options: str) -> list[BoxPart]:
    made = load_recipe("grounding", options)(Row(0, {"image": FILE, **values}))
    assert isinstance(made, Conversation)
    return [part for part in made.messages[1].parts if isinstance(part, BoxPart)]


@pytest.mark.parametrize("key", ["segmentation", "polygon", "quad"])
def test_grounding_learns_the_box_around_a_polygon_without_one(key: str) -> None:
    entries = [{key: [QUAD], "label": "line"}, {"bbox": [0, 0, 8, 6], key: [QUAD], "label": "dot"}]
    line, dot = box_of({"objects": entries}, polygons="box")
    assert line == BoxPart(AROUND, label="line", field=f"objects[0].{key}")
    assert dot == BoxPart((0, 0, 8, 6), label="dot", field="objects[1].bbox")
    (listed,) = box_of({"objects": {key: [[QUAD]], "category": ["line"]}}, polygons="box")
    assert listed == line
    for polygon in (QUAD, json.dumps(QUAD)):
        (alone,) = box_of({key: polygon, "label": "line"}, polygons="box")
        assert alone == BoxPart(AROUND, label="line", field=key)
    assert box_of({"bbox": [0, 0, 8, 6], key: "mask.png", "label": "dot"})[0].xyxy == (0, 0, 8, 6)


def chat_row() -> Row:
    turns = [{"role": "user", "content": "<image>Where?"}, {"role": "assistant", "content": "<bbox>"}]
    return Row(0, {"messages": turns, "images": [FILE], "objects": {"bbox": [QUAD], "bbox_type": "real"}})


def test_chat_learns_the_box_around_a_polygon() -> None:
    recipe = Chat(Chat.Options(polygons=Polygons.BOX), MediaLoader(None, allow_urls=False))
    assert recipe(chat_row()).messages[1].parts == (BoxPart(AROUND, form=Form.LIST, field="objects.bbox[0]"),)


def test_polygons_that_are_not_asked_for_are_rejected() -> None:
    message = r"is a polygon, and no family writes polygons; give a box, or .*: -O polygons=box"
    with pytest.raises(RowRejected, match=r"objects\.bbox\[0\] " + message) as rejected:
        load_recipe("chat")(chat_row())
    assert rejected.value.reason is Reason.UNSUPPORTED_CONTENT
    with pytest.raises(RowRejected, match=r"objects\[0\]\.segmentation " + message):
        box_of({"objects": [{"segmentation": [QUAD], "label": "line"}]})


@pytest.mark.parametrize(
    ("value", "reason", "message"),
    [
        ({"counts": "abc", "size": [4, 4]}, Reason.UNSUPPORTED_CONTENT, r"quad is a mask in run lengths; give its box"),
        ([1, 2, 3, 4], Reason.BOX_BOUNDS, r"quad has 4 numbers: \[1, 2, 3, 4\]; a polygon has x and y of three points"),
        ([[1, 2], [3, 4]], Reason.BOX_BOUNDS, r"quad has 4 numbers"),
        ([QUAD, [1, 2, 3, 4, 5, 6, 7]], Reason.BOX_BOUNDS, r"quad\[1\] has 7 numbers"),
        ({"x1": 1, "y1": 2, "x2": 3, "y3": 4}, Reason.BOX_BOUNDS, r"None is not a finite number"),
        ("wide", Reason.BOX_BOUNDS, r"quad is 'wide'; it must be a list of numbers"),
        ([], Reason.BOX_BOUNDS, "quad has 0 numbers"),
    ],
)
def test_what_is_no_polygon_is_rejected(value: Any, reason: Reason, message: str) -> None:
    with pytest.raises(RowRejected, match=message) as rejected:
        box_around(value, Polygons.BOX, "quad")
    assert rejected.value.reason is reason
