"""Boxes and points as text: they show the same pixels of the resized image, in the convention of each family."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.preprocess.extend_pages import write_example
from vlmdata.families import REGISTRY, family
from vlmdata.preprocess.chat.tokenizer import ChatTokenizer
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig
from vlmdata.preprocess.conversation import BoxPart, Conversation, ImagePart, LabelPart, Message, PointPart, TextPart
from vlmdata.preprocess.encode import Encoder, encode_image
from vlmdata.preprocess.encode.grounding import with_grounding_as_text
from vlmdata.preprocess.encode.kept import kept_text
from vlmdata.preprocess.grounding import Form, GroundingPart, Unit
from vlmdata.preprocess.recipes.base import Candidate, load_recipe
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.row import Row
from vlmdata.reasons import Reason

BOUNDS = ImageConfig(4096, 65_536)
GROUNDED = [name for name in REGISTRY if family(name).grounding is not None]
#: Families that write boxes as JSON; each image is one item.
IN_JSON = [name for name in GROUNDED if family(name).most_views == 1]
TILED = ImageConfig(448**2, 6 * 448**2)
QWEN2_5, QWEN3 = PreprocessConfig(family="qwen2_5_vl", image=BOUNDS), PreprocessConfig(family="qwen3_vl", image=BOUNDS)


def picture(height: int, width: int, turned: bool = False, form: str = "PNG", **bounds: int) -> ImagePart:
    """An image that is shown in this size, after EXIF rotation if it is turned."""
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6 if turned else 1
    Image.new("RGB", (height, width) if turned else (width, height)).save(file, form, exif=exif)
    return ImagePart(file.getvalue(), "images[0]", **bounds)


def answered(*parts: Any, images: tuple[ImagePart, ...]) -> Conversation:
    """A conversation with an answer of these parts."""
    return Conversation((Message("user", (*images, TextPart("Where?"))), Message("assistant", parts)))


def written(part: GroundingPart, image: ImagePart, config: PreprocessConfig) -> str:
    """The text of a part in an answer."""
    return with_grounding_as_text(answered(part, images=(image,)), config).answers[0].text


def numbers_in(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"-?\d+", text.replace("_2d", ""))]


sides = st.one_of(st.integers(1, 40), st.integers(41, 400), st.sampled_from([1, 2, 2000]))
shares = st.fractions(0, 1, max_denominator=4000)


@given(
    name=st.sampled_from(GROUNDED),
    height=sides,
    width=sides,
    turned=st.booleans(),
    file=st.sampled_from(["PNG", "JPEG"]),
    most=st.none() | st.integers(4096, 65_536),
    size=st.none() | st.tuples(st.integers(8, 300), st.integers(8, 300)),
    unit=st.sampled_from(list(Unit)),
    form=st.sampled_from(list(Form)),
    corners=st.tuples(shares, shares, shares, shares),
)
@example(
    "qwen2_5_vl", 2000, 10, True, "JPEG", None, None, Unit.PIXELS, Form.JSON, (Fraction(0),) * 2 + (Fraction(1),) * 2
)
@example("qwen3_vl", 1, 200, False, "PNG", None, None, Unit.PIXELS, Form.LIST, (Fraction(0),) * 2 + (Fraction(1),) * 2)
@example(
    "qwen3_vl", 400, 300, True, "PNG", None, None, Unit.PIXELS, Form.JSON,
    (Fraction(1, 4), Fraction(1, 3), Fraction(2502, 10_000), Fraction(3334, 10_000)),
)  # fmt: skip
def test_a_box_covers_the_same_pixels_of_the_resized_image(
    name: str,
    height: int,
    width: int,
    turned: bool,
    file: str,
    most: int | None,
    size: tuple[int, int] | None,
    unit: Unit,
    form: Form,
    corners: tuple[Fraction, Fraction, Fraction, Fraction],
) -> None:
    height, width = max(height, width // 200 + 1), max(width, height // 200 + 1)
    sizes = {} if size is None else {"resized_height": size[0], "resized_width": size[1]}
    sizes |= {} if most is None else {"max_pixels": most}
    tiles = name not in IN_JSON
    form = Form.TOKENS if tiles and form is Form.JSON else form
    image = picture(height, width, turned, file, **({} if tiles else sizes))
    config = PreprocessConfig(family=name, image=TILED if tiles else BOUNDS)
    stored = encode_image(image, config.image, family(name), "image")[0]
    final_height, final_width = stored.origin.get("of", stored.size)
    left, right = sorted((corners[0], corners[2]))
    top, bottom = sorted((corners[1], corners[3]))
    sides = {Unit.ONE: 1, Unit.HUNDRED: 100, Unit.THOUSAND: 1000}
    across, down = (width, height) if unit is Unit.PIXELS else (sides[unit],) * 2
    given = (float(left * across), float(top * down), float(right * across), float(bottom * down))
    if given[0] == given[2] or given[1] == given[3]:
        with pytest.raises(RowRejected, match="it is empty"):
            written(BoxPart(given, unit, form=form), image, config)
        return
    # What the box covers of the resized image, whatever is written: by its shares of the image's sides.
    truth = [Fraction(value) / side for value, side in zip(given, (across, down) * 2, strict=True)]
    truth = [share * side for share, side in zip(truth, (final_width, final_height) * 2, strict=True)]
    read = numbers_in(written(BoxPart(given, unit, form=form), image, config))
    # How the model's documentation reads its numbers: pixels that the model sees, or thousandths of them.
    pixel = (
        [Fraction(1)] * 4
        if name == "qwen2_5_vl"
        else [Fraction(side, 1000) for side in (final_width, final_height) * 2]
    )
    for axis in (0, 1):
        assert read[axis] < read[axis + 2]
        ends = [truth[each] / pixel[each] for each in (axis, axis + 2)]
        if round(ends[0]) == round(ends[1]):  # too small for its unit: what is around it
            assert (read[axis], read[axis + 2]) == (math.floor(ends[0]), math.ceil(ends[1]))
        else:
            assert all(abs(read[axis + 2 * end] - ends[end]) <= Fraction(1, 2) for end in (0, 1))
    if not tiles or form is Form.LIST:
        assert numbers_in(written(PointPart(given[:2], unit, form=form), image, config)) == [
            round(truth[axis] / pixel[axis]) for axis in (0, 1)
        ]


@settings(max_examples=25)
@given(
    name=st.sampled_from(IN_JSON),
    height=st.integers(50, 600),
    width=st.integers(50, 600),
    turned=st.booleans(),
    corners=st.tuples(*(st.floats(0.15, 0.4), st.floats(0.15, 0.4), st.floats(0.6, 0.85), st.floats(0.6, 0.85))),
)
def test_a_drawn_box_is_where_the_text_says(
    name: str, height: int, width: int, turned: bool, corners: tuple[float, float, float, float]
) -> None:
    """Looks at the pixels that the model gets. An edge between two of them shows in their brightness."""
    box = tuple(round(share * side) for share, side in zip(corners, (width, height) * 2, strict=True))
    left, top, right, bottom = box
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[top:bottom, left:right] = 255
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6 if turned else 1  # shown turned by a quarter to the right
    Image.fromarray(np.rot90(pixels) if turned else pixels).save(file, "PNG", exif=exif)
    image, rules = ImagePart(file.getvalue()), family(name)
    (stored,) = encode_image(image, BOUNDS, rules, "image")
    final_height, final_width = stored.size
    seen = rules.unpatchify(stored.patches, *stored.grid[1:])[0] / 255
    drawn = [*_edges(seen.max(axis=0)), *_edges(seen.max(axis=1))]  # x1, x2, y1, y2 in resized pixels
    x1, y1, x2, y2 = numbers_in(
        written(BoxPart(box, form=Form.LIST), image, PreprocessConfig(family=name, image=BOUNDS))
    )
    across, down = (1.0, 1.0) if name == "qwen2_5_vl" else (final_width / 1000, final_height / 1000)
    for number, unit, edge in zip((x1, x2, y1, y2), (across, across, down, down), drawn, strict=True):
        assert abs(number * unit - edge) <= unit / 2 + 0.15  # of a pixel: brightness has 256 steps


def _edges(profile: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Where a bright stretch begins and ends, from its brightness and its centre."""
    length = profile.sum()
    centre = float((profile * (np.arange(len(profile)) + 0.5)).sum() / length)
    return centre - length / 2, centre + length / 2


def test_the_text_of_each_form() -> None:
    image = picture(480, 640, max_pixels=280 * 280)
    box, point = BoxPart((64, 48, 320, 240), label='the "dog"'), PointPart((320, 240), label="hé")
    assert written(box, image, QWEN3) == r'{"bbox_2d": [100, 100, 500, 500], "label": "the \"dog\""}'
    assert json.loads(written(box, image, QWEN3))["label"] == 'the "dog"'
    assert written(point, image, QWEN3) == '{"point_2d": [500, 500], "label": "hé"}'
    assert written(BoxPart((0.1, 0.1, 0.5, 0.5), Unit.ONE), image, QWEN3) == '{"bbox_2d": [100, 100, 500, 500]}'
    assert written(BoxPart((64, 48, 320, 240), form=Form.LIST), image, QWEN2_5) == "[31, 22, 154, 112]"  # of 308x224
    marked = "<|object_ref_start|>dog<|object_ref_end|><|box_start|>(100,100),(500,500)<|box_end|>"
    assert written(BoxPart((64, 48, 320, 240), label="dog", form=Form.TOKENS), image, QWEN3) == marked
    assert written(PointPart((64, 48), form=Form.TOKENS), image, QWEN3) == "<|box_start|>(100,100)<|box_end|>"
    assert written(LabelPart("dog"), image, QWEN3) == "<|object_ref_start|>dog<|object_ref_end|>"
    assert BoxPart.from_xywh((64, 48, 256, 192)) == BoxPart((64, 48, 320, 240))


def test_the_text_of_internvl() -> None:
    image, config = picture(480, 640), PreprocessConfig(family="internvl")
    box = BoxPart((64, 48, 320, 240), label="dog", form=Form.TOKENS)
    assert written(box, image, config) == "<ref>dog</ref><box>[[100, 100, 500, 500]]</box>"
    assert written(replace(box, label=None), image, config) == "<box>[[100, 100, 500, 500]]</box>"
    assert written(LabelPart("dog"), image, config) == "<ref>dog</ref>"
    with pytest.raises(RowRejected, match=r"box: the family internvl has no JSON for it; choose .* -O form=tokens"):
        written(replace(box, form=Form.JSON), image, config)
    with pytest.raises(RowRejected, match="point: the family internvl has no notation for points; give a box"):
        written(PointPart((64, 48), form=Form.TOKENS), image, config)


@pytest.mark.parametrize("form", list(Form))
def test_families_without_a_convention_refuse_boxes(form: Form) -> None:
    box, config = BoxPart((64, 48, 320, 240), form=form, field="objects.bbox[0]"), PreprocessConfig(family="gemma4")
    with pytest.raises(RowRejected, match=r"objects\.bbox\[0\]: the family gemma4 has no convention .*; write them as"):
        written(box, picture(480, 640), config)


def test_each_part_is_of_its_image_and_joins_the_text_around_it() -> None:
    images = picture(100, 100), picture(200, 400)
    list_of = [BoxPart((50, 50, 100, 100), image=number, form=Form.LIST) for number in (0, 1)]
    made = answered(TextPart("A "), list_of[0], TextPart(", "), list_of[1], TextPart("."), images=images)
    (answer,) = with_grounding_as_text(made, QWEN3).answers
    assert answer.parts == (TextPart("A [500, 500, 1000, 1000], [125, 250, 250, 500]."),)
    plain = answered(TextPart("A"), TextPart("B"), images=images)
    assert with_grounding_as_text(plain, QWEN3) is plain


def test_rounding_of_the_data_is_clamped_to_the_image() -> None:
    box = BoxPart((-0.5, -0.01, 640.5, 480.01), form=Form.LIST)
    assert written(box, picture(480, 640), QWEN3) == "[0, 0, 1000, 1000]"


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            BoxPart((0, 0, 641, 10)),
            r"box is \[0, 0, 641, 10\], and images\[0\] is 640x480 pixels: its x 641 is outside",
        ),
        (BoxPart((0, -1, 9, 10)), r"its y -1 is outside of the image"),
        (BoxPart((9, 0, 3, 10)), r"it is reversed: x goes from 9 to 3. It is read as \[x1, y1, x2, y2\] in pixels"),
        (BoxPart((1, 10, 3, 10)), r"it is empty: y goes from 10 to 10"),
        (BoxPart((0, 0, 640, 10), Unit.ONE), r"its x 640 is outside of the image. It is read as .* from 0 to 1; corr"),
        (BoxPart((0, 0, 1001, 10), Unit.THOUSAND), r"its x 1001 is outside .* from 0 to 1000; correct it, or state"),
        (PointPart((3, 481), field="at"), r"at is \[3, 481\], .* its y 481 is outside .* read as \[x, y\] in pixels"),
        (BoxPart((0, 0, 1, 1), image=1), r"box is of image 1, and the conversation has 1 image, numbered from 0"),
    ],
)
def test_rejected_boxes(part: GroundingPart, message: str) -> None:
    with pytest.raises(RowRejected, match=message) as rejected:
        written(part, picture(480, 640), QWEN3)
    assert rejected.value.reason is Reason.BOX_BOUNDS


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BoxPart((1, 2, 3)), r"BoxPart.xyxy is \[1, 2, 3\]; it must have 4 numbers"),
        (lambda: BoxPart((1, 2, 3, float("inf"))), "inf is not a finite number"),
        (lambda: PointPart((1, True)), "True is not a finite number"),
        (lambda: PointPart((1, 2), image=-1), "PointPart.image is -1"),
        (lambda: PointPart((1, 2), unit="cm"), "PointPart.unit is 'cm'; it must be one of"),
        (lambda: BoxPart((1, 2, 3, 4), form="xml"), "BoxPart.form is 'xml'"),
    ],
)
def test_parts_that_are_none(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_an_image_that_cannot_be_used_rejects_the_row() -> None:
    with pytest.raises(RowRejected) as rejected:
        written(BoxPart((0, 0, 1, 1)), ImagePart(b"no image"), QWEN3)
    assert rejected.value.reason is Reason.NOT_AN_IMAGE


def test_the_pages_recipe_writes_a_box(tmp_path: Path) -> None:
    file = tmp_path / f"{write_example('recipe.md', tmp_path, 1)}.py"
    row = {"image": picture(480, 640).data, "answer": ["dog"], "bbox": [64, 48, 256, 192]}
    made = load_recipe(f"{file}:RefCoco")(Row(0, row))
    assert isinstance(made, Conversation)
    (answer,) = with_grounding_as_text(made, QWEN3).answers
    assert answer.text == '{"bbox_2d": [100, 100, 500, 500], "label": "dog"}'


@pytest.mark.parametrize(("name", "line"), [("qwen3_vl", 0), ("qwen3_5", 0), ("qwen2_5_vl", 1)])
def test_the_pages_row_becomes_the_pages_answer(name: str, line: int) -> None:
    page = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text(encoding="utf-8")
    example = page.split("### Boxes and points", 1)[1].split("```jsonc\n", 1)[1].split("```", 1)[0]
    row = json.loads("".join(re.sub(r"//.*", "", each) for each in example.splitlines()))
    learned = re.findall(r"learns? +(\[.*\])", example)
    made = load_recipe("chat")(Row(0, {**row, "images": [picture(480, 640).data]}))
    assert isinstance(made, Conversation)
    assert with_grounding_as_text(made, PreprocessConfig(family=name)).answers[0].text == learned[line]


def test_a_row_of_ms_swift_becomes_targets(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    """From the row to the tokens: the answer's numbers are learned, and kept conversations have them as text."""
    row = {
        "messages": [
            {"role": "user", "content": "<image>Locate the <ref-object>"},
            {"role": "assistant", "content": '[{"bbox_2d": <bbox>, "label": "<ref-object>"}]'},
        ],
        "images": [picture(480, 640).data],
        "objects": {"ref": ["sheep", "sheep"], "bbox": [[64, 48, 320, 240]]},
    }
    config = PreprocessConfig(image=BOUNDS)
    made = load_recipe("chat")(Row(0, row))
    assert isinstance(made, Conversation)
    (sample,) = Encoder(config, tokenizer).encode_all(made)
    assert not isinstance(sample, RowRejected)
    targets = tokenizer.hf.decode(sample.input_ids[: sample.length][sample.loss_mask[: sample.length] > 0])
    assert '[{"bbox_2d": [100, 100, 500, 500], "label": "sheep"}]' in targets
    assert "[100, 100, 500, 500]" in kept_text(with_grounding_as_text(made, config), Candidate(made), 1)
