"""Boxes and points read back from tokens: they cover the pixels that were marked in the picture, in the right image."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.chat_rows import write_jsonl
from tests.conftest import build_dataset
from tests.families.internvl_files import write_tokenizer
from tests.families.reference import TILE
from tests.inspect.browser import Visit
from tests.inspect.conftest import Command
from tests.inspect.serving import serving
from vlmdata.families import REGISTRY, Family, family
from vlmdata.families.internvl import GROUNDING as OF_INTERNVL
from vlmdata.families.qwen import GROUNDING, GROUNDING_OF_1000
from vlmdata.inspect import describe_dataset, describe_sample
from vlmdata.inspect.boxes import BoxDescription, Picture, boxes_of, pictures_of
from vlmdata.inspect.sample import rebuild_image
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig
from vlmdata.preprocess.conversation import BoxPart, Conversation, ImagePart, Message, TextPart
from vlmdata.preprocess.encode import encode_image
from vlmdata.preprocess.encode.grounding import with_grounding_as_text
from vlmdata.preprocess.encode.sample import SampleItem
from vlmdata.preprocess.grounding import Form
from vlmdata.storage.open import open_dataset

GROUNDED = [name for name in REGISTRY if family(name).grounding is not None]
#: Families that write boxes as JSON; each image is one item.
IN_JSON = [name for name in GROUNDED if family(name).most_views == 1]
BOUNDS = ImageConfig(4096, 65_536)
TILED = ImageConfig(TILE**2, 6 * TILE**2)


def marked(height: int, width: int, box: Sequence[int]) -> bytes:
    """A black picture with a white box."""
    pixels, file = np.zeros((height, width, 3), np.uint8), io.BytesIO()
    pixels[box[1] : box[3], box[0] : box[2]] = 255
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def drawn(pixels: npt.NDArray[np.uint8]) -> tuple[float, float, float, float]:
    """Where the white box of a resized picture begins and ends, in fractions of a pixel: where it is half as bright."""
    found, plane = [], pixels[:, :, 0] / 255
    for axis in (0, 1):
        # Through its middle: near its other edges, the resize makes it brighter than white, and so wider.
        across = np.flatnonzero(plane.max(axis=1 - axis) > 0.5)
        profile = plane.take(int(across.mean()), axis=axis)
        bright = np.flatnonzero(profile > 0.5)
        for inner, outer in ((bright[0], bright[0] - 1), (bright[-1], bright[-1] + 1)):
            part = (profile[inner] - 0.5) / (profile[inner] - profile[outer])
            found.append(float(inner + 0.5 + part * (outer - inner)))
    left, right, top, bottom = found
    return left, top, right, bottom


def resized(views: Sequence[SampleItem], rules: Family) -> npt.NDArray[np.uint8]:
    """The resized image, with its tiles in their places."""
    shown = [rules.unpatchify(view.patches, *view.grid[1:]).transpose(1, 2, 0) for view in views]
    if len(views) == 1:
        return shown[0]
    whole = np.zeros((*views[0].origin["of"], 3), np.uint8)
    for view, pixels in zip(views[:-1], shown, strict=False):
        top, left, height, width = view.origin["part"]
        whole[top : top + height, left : left + width] = pixels
    return whole


def require_same(box: BoxDescription, pixels: npt.NDArray[np.uint8], scale: int | None) -> None:
    """A box covers what is white, within half a pixel, or half a step of the convention if that is coarser."""
    assert box.pixels is not None
    for n, (value, edge) in enumerate(zip(box.pixels, drawn(pixels), strict=True)):
        step = 1.0 if scale is None else pixels.shape[1 - n % 2] / scale
        assert abs(value - edge) <= max(step, 1.0) / 2 + 0.15  # brightness has 256 steps


@settings(max_examples=40)
@given(
    name=st.sampled_from(GROUNDED),
    height=st.integers(20, 700),
    width=st.integers(20, 700),
    form=st.sampled_from([Form.JSON, Form.TOKENS]),
    label=st.none() | st.text(st.characters(codec="utf-8", exclude_characters="<|>"), max_size=12),
    before=st.sampled_from(["", "{", '{"a": [', "There: [1, 2, 3, 4] and "]),
    corners=st.tuples(*(st.floats(0.2, 0.4), st.floats(0.2, 0.4), st.floats(0.6, 0.8), st.floats(0.6, 0.8))),
    cuts=st.lists(st.integers(0, 120), max_size=20),
)
@example("qwen2_5_vl", 10, 1900, Form.JSON, "a", "", (0.2, 0.2, 0.6, 0.6), [])
@example("qwen3_vl", 1900, 10, Form.TOKENS, None, "", (0.4, 0.4, 0.8, 0.8), [])
@example("internvl", 500, 20, Form.TOKENS, "a", "", (0.2, 0.2, 0.6, 0.6), [])
@example("qwen3_5", 20, 1500, Form.JSON, '"}{[', "{", (0.2, 0.2, 0.6, 0.6), [3, 9])
def test_a_box_in_the_text_covers_what_is_drawn(
    name: str,
    height: int,
    width: int,
    form: Form,
    label: str | None,
    before: str,
    corners: tuple[float, float, float, float],
    cuts: list[int],
) -> None:
    box = tuple(round(share * side) for share, side in zip(corners, (width, height) * 2, strict=True))
    image, rules = ImagePart(marked(height, width, box)), family(name)
    assert rules.grounding is not None
    config = PreprocessConfig(family=name, image=BOUNDS if name in IN_JSON else TILED)
    form = form if name in IN_JSON else Form.TOKENS
    parts = (TextPart(before), BoxPart(box, form=form, label=label), TextPart(" end"))
    made = Conversation((Message("user", (image,)), Message("assistant", parts)))
    text = with_grounding_as_text(made, config).answers[0].text
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    texts = [text[a:b] for a, b in pairwise(bounds)]
    pixels = resized(encode_image(image, config.image, rules, "image"), rules)
    (found,) = boxes_of(texts, rules.grounding, [Picture.whole(0, 0, *pixels.shape[:2], 0)], {})
    assert (found.label, found.image, found.fault) == (label, 0, "")
    covered = "".join(texts[found.start : found.stop])
    assert text.removeprefix(before).removesuffix(" end") in covered
    require_same(found, pixels, rules.grounding.scale)


SHOWN = [(300, 200, (40, 60, 120, 220)), (48, 900, (300, 12, 700, 36)), (640, 33, (8, 150, 24, 480))]


def grounded_rows() -> list[dict[str, Any]]:
    """A row of one image for each size, and one of all three with their boxes in another order."""
    uris = ["data:image/png;base64," + base64.b64encode(marked(*each)).decode() for each in SHOWN]
    boxes = [list(box) for _, _, box in SHOWN]
    asked = [
        {"role": "user", "content": "<image>Where?"},
        {"role": "assistant", "content": '{"bbox_2d": <bbox>, "label": "<ref-object>"}'},
    ]
    rows: list[dict[str, Any]] = [
        {"messages": asked, "images": [uri], "objects": {"ref": [f"box {n}"], "bbox": [box]}}
        for n, (uri, box) in enumerate(zip(uris, boxes, strict=True))
    ]
    several = [
        {"role": "user", "content": "<image><image><image>Where?"},
        {"role": "assistant", "content": ", ".join(['{"bbox_2d": <bbox>}'] * 3)},
    ]
    order = [2, 0, 1]
    objects = {"bbox": [boxes[n] for n in order], "image_id": order}
    return [*rows, {"messages": several, "images": uris, "objects": objects}]


@pytest.fixture(scope="module")
def grounded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grounded")
    return build_dataset(write_jsonl(folder / "rows.jsonl", grounded_rows()), folder / "dataset", recipe="chat")


@pytest.mark.parametrize("name", IN_JSON)
def test_boxes_of_a_dataset_are_in_their_images(name: str, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", grounded_rows())
    dataset = open_dataset(build_dataset(source, tmp_path / "dataset", recipe="chat", family=name))
    rules = dataset.family.grounding
    assert rules is not None
    for i, order in enumerate([[0], [0], [0], [2, 0, 1]]):
        found = describe_sample(dataset, i)
        assert [box.image for box in found.boxes] == order
        for box in found.boxes:
            require_same(box, rebuild_image(dataset.as_stored(i), box.image or 0, dataset.family), rules.scale)
            text = "".join(found.tokens.texts[box.start : box.stop])
            assert [float(n) for n in json.loads(text[text.index("[") : text.index("]") + 1])] == list(box.written)
            assert found.tokens.mask[box.start : box.stop].all()
    assert "wrong_box" not in {group.kind for group in describe_dataset(dataset, check=None).findings}


def read(text: str, *pictures: Picture, scale: int | None = 1000, **metadata: Any) -> list[BoxDescription]:
    rules = GROUNDING if scale is None else GROUNDING_OF_1000
    return list(boxes_of(list(text), rules, pictures or [Picture.whole(0, 0, 100, 200, 0)], metadata))


def test_what_is_read() -> None:
    (point,) = read('{"point_2d": [500, 250], "label": "nose"}')
    assert (point.pixels, point.label, point.written) == ((100, 25), "nose", (500, 250))
    one, two = read("<|object_ref_start|>cat<|object_ref_end|>" + "<|box_start|>(1,2),(3,4)<|box_end|>" * 2)
    assert (one.label, two.label, one.start, two.start) == ("cat", "cat", 0, one.stop)
    (cut,) = read('[{"bbox_2d": [1, 2, 3, 4], "label": "a d')  # a truncated answer
    assert (cut.label, cut.written) == (None, (1, 2, 3, 4))
    (other,) = read('{"label": "before", "bbox_2d":[1,2.5,3,4e1]}')
    assert (other.label, other.written) == ("before", (1, 2.5, 3, 40))
    (apart,) = read("<|object_ref_start|>cat<|object_ref_end|> or <|box_start|>(1,2)<|box_end|>")
    assert apart.label is None
    for nothing in ('{"bbox_2d": [x1, y1, x2, y2]}', '{"bbox_2d": [1, 2]}', "[1, 2, 3, 4]", '"bbox_2d"', "(1,2),(3,4)"):
        assert read(nothing) == []
    assert boxes_of(['{"bbox_2d": [1, 2, 3, 4]}'], None, (), {}) == ()


def test_what_is_read_of_internvl() -> None:
    text = "A <ref>cat</ref><box>[[1, 2, 3, 4],[500, 0, 1000, 1000]]</box> and <box>[[5,6,7,8]]</box> [[1, 2, 3, 4]]"
    found = boxes_of(list(text), OF_INTERNVL, [Picture.whole(0, 0, 100, 200, 0)], {})
    assert [(box.label, box.written) for box in found] == [
        ("cat", (1, 2, 3, 4)), ("cat", (500, 0, 1000, 1000)), (None, (5, 6, 7, 8)),
    ]  # fmt: skip
    assert found[1].pixels == (100, 0, 200, 100)
    assert "".join(text[box.start : box.stop] for box in found[:2]) == text[2 : text.index(" and")].replace(",[", "[")
    for nothing in ("<box>[1, 2, 3, 4]</box>", "<box>[[1, 2]]</box>", "<box>(1,2),(3,4)</box>", '{"": [1, 2, 3, 4]}'):
        assert boxes_of(list(nothing), OF_INTERNVL, [Picture.whole(0, 0, 100, 200, 0)], {}) == ()


@pytest.fixture(scope="module")
def tiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A box in each of two images, the first of 2 x 2 tiles and a thumbnail, the other of one tile."""
    folder = tmp_path_factory.mktemp("tiled")
    shown = [(800, 800, (200, 100, 600, 600)), (300, 300, (30, 60, 150, 240))]
    uris = ["data:image/png;base64," + base64.b64encode(marked(*each)).decode() for each in shown]
    asked = [
        {"role": "user", "content": "<image><image>Where?"},
        {"role": "assistant", "content": "<ref-object><bbox>, <ref-object><bbox>"},
    ]
    objects = {"ref": ["one", "two"], "bbox": [list(box) for _, _, box in shown], "image_id": [0, 1]}
    source = write_jsonl(folder / "rows.jsonl", [{"messages": asked, "images": uris, "objects": objects}])
    return build_dataset(
        source, folder / "dataset", recipe="chat", recipe_options={"boxes": "tokens"}, family="internvl",
        image=ImageConfig(TILE**2, 4 * TILE**2),
        tokenizer=write_tokenizer(folder / "tokenizer"),
    )  # fmt: skip


def test_a_box_of_tiles_is_where_each_of_them_shows_it(tiled: Path) -> None:
    dataset = open_dataset(tiled)
    found = describe_sample(dataset, 0)
    assert [(box.label, box.image, box.written) for box in found.boxes] == [
        ("one", 0, (250, 125, 750, 750)), ("two", 5, (100, 200, 500, 800)),
    ]  # fmt: skip
    assert [[place.item for place in box.places] for box in found.boxes] == [[0, 1, 2, 3, 4], [5]]
    for box in found.boxes:
        for place in box.places:
            pixels = rebuild_image(dataset.as_stored(0), place.item, dataset.family)
            x1, y1, x2, y2 = (max(0, round(number)) for number in place.pixels)
            assert pixels[y1 + 2 : y2 - 2, x1 + 2 : x2 - 2].min() > 200
            pixels[max(0, y1 - 2) : y2 + 2, max(0, x1 - 2) : x2 + 2] = 0
            assert pixels.max() < 55
    assert not [each for each in found.findings if each.kind == "wrong_box"]


@pytest.mark.parametrize("damaged", [{"of": [0, 0]}, {"part": "x"}, {"view": None}, {"view": 9.5}, {"of": [1, 2, 3]}])
def test_damaged_tiles_are_pictures_of_their_own(tiled: Path, damaged: dict[str, Any]) -> None:
    dataset = open_dataset(tiled)
    items, metadata = dataset[0].items, dict(dataset.metadata(0))
    metadata["images"] = [each | damaged for each in metadata["images"]]
    for found in (metadata, {"images": None}, {"images": [None] * 6}, {}):
        pictures = pictures_of(items, range(len(items)), dataset.family, found)
        assert sorted(view.item for picture in pictures for view in picture.views) == list(range(6))


def test_the_image_of_a_box_is_known_or_not_said() -> None:
    text = 'aa{"bbox_2d": [1, 2, 3, 4]}'
    first, second, late = (
        Picture.whole(0, 0, 100, 200, 0),
        Picture.whole(1, 1, 50, 50, 1),
        Picture.whole(1, 20, 50, 50, 1),
    )
    assert [box.image for box in read(text, first, second)] == [None]
    assert [box.image for box in read(text, first, late)] == [0]
    assert [box.image for box in read(text, first, second, box_images=[[1, 1, 2, 3, 4]])] == [1]
    assert [box.image for box in read(text, first, late, box_images=[[0, 1, 2, 3, 4], [1, 1, 2, 3, 4]])] == [None]
    for damaged in ("x", [1], [[0, 1]], [["0", 1, 2, 3, 4]], [[9, 1, 2, 3, 4]]):
        assert [box.image for box in read(text, first, second, box_images=damaged)] == [None]


@pytest.mark.parametrize(
    ("numbers", "scale", "fault"),
    [
        ([5, 2, 3, 4], 1000, "it is reversed: x goes from 5 to 3"),
        ([1, 4, 3, 4], 1000, "it is empty: y goes from 4 to 4"),
        ([1, 2, 1001, 4], 1000, "its x 1001 is outside of the image, which goes from 0 to 1000"),
        ([-1, 2, 3, 4], 1000, "its x -1 is outside"),
        ([1, 2, 200, 100], None, ""),
        ([1, 2, 200, 101], None, "its y 101 is outside of the image, which goes from 0 to 100"),
        ([201, 2], None, "its x 201 is outside"),
    ],
)
def test_boxes_that_cannot_be_right(numbers: list[int], scale: int | None, fault: str) -> None:
    key = "bbox_2d" if len(numbers) == 4 else "point_2d"
    (found,) = read(json.dumps({key: numbers}), scale=scale)
    assert found.fault.startswith(fault)
    assert bool(found.fault) == bool(fault)


def test_wrong_boxes_are_a_finding_and_boxes_are_listed(tmp_path: Path, command: Command, grounded: Path) -> None:
    rows = json.loads(json.dumps(grounded_rows()[:2]))
    rows[1].pop("objects")
    rows[1]["messages"][1]["content"] = '[{"bbox_2d": [9, 9, 3, 20]}, {"bbox_2d": [0, 0, 2000, 5]}]'
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    directory = build_dataset(source, tmp_path / "dataset", recipe="chat")
    dataset = open_dataset(directory)
    (group,) = [each for each in describe_dataset(dataset).findings if each.kind == "wrong_box"]
    assert (group.count, group.severity) == (1, "warning")
    assert group.examples[0].message == "box [9, 9, 3, 20]: it is reversed: x goes from 9 to 3; 2 of 2 are wrong"
    (found,) = [each for each in describe_sample(dataset, 1).findings if each.kind == "wrong_box"]
    box = describe_sample(dataset, 1).boxes[0]
    assert found.tokens == (box.start, box.stop)
    code, out, _ = command(directory, "--sample", 1)
    assert code == 0
    assert "boxes and points" in out
    assert "9, 9, 3, 20" in out
    _, out, _ = command(grounded, "--sample", 3, "--json")
    assert [each["image"] for each in json.loads(out)["boxes"]] == [2, 0, 1]


@pytest.mark.slow
def test_the_page_draws_boxes_and_points_to_their_tokens(
    grounded: Path, tmp_path: Path, command: Command, browser: Any
) -> None:
    assert command(grounded, "--html", tmp_path / "page.html")[0] == 0
    boxes = describe_sample(open_dataset(grounded), 3).boxes
    visit = Visit(browser, (tmp_path / "page.html").as_uri())
    page = visit.page
    visit.open_sample(3)
    page.wait_for_function("() => [...document.querySelectorAll('.picture img')].every((i) => i.naturalWidth > 0)")
    for box in boxes:
        picture = page.locator(f".picture[data-image='{box.image}']")
        node = picture.locator(f".box[data-box='{box.number}']")
        area, place = picture.locator("img").bounding_box(), node.bounding_box()
        width = int(picture.locator("img").get_attribute("width"))
        assert box.pixels is not None
        assert place["x"] - area["x"] == pytest.approx(box.pixels[0] / width * area["width"], abs=1)
        page.hover(f".tok[data-i='{box.start}']")
        assert "current" in node.get_attribute("class")
    node = page.locator(f".box[data-box='{boxes[1].number}']")
    node.locator("button").hover()
    tokens = page.evaluate("() => [...document.querySelectorAll('.tok.boxed')].map((n) => Number(n.dataset.i))")
    assert tokens == list(range(boxes[1].start, boxes[1].stop))
    visit.shot("boxes")
    page.keyboard.press("x")
    assert not node.is_visible()
    assert visit.complaints == []


@pytest.mark.slow
def test_the_page_shows_tiles_in_their_places_with_boxes_and_tokens(tiled: Path, browser: Any) -> None:
    found = describe_sample(open_dataset(tiled), 0)
    with serving(tiled) as client:
        visit = Visit(browser, client.home)
        page = visit.page
        visit.open_sample(0)
        page.wait_for_function("() => [...document.querySelectorAll('.picture img')].every((i) => i.naturalWidth > 0)")
        pictures = [page.locator(f".picture[data-image='{image.number}']") for image in found.images]
        areas = [picture.locator("img").bounding_box() for picture in pictures]
        assert areas[0]["x"] == areas[2]["x"] < areas[1]["x"] == areas[3]["x"]
        assert areas[0]["y"] == areas[1]["y"] < areas[2]["y"] == areas[3]["y"] < areas[4]["y"] < areas[5]["y"]
        for box in found.boxes:
            for place in box.places:
                node = pictures[place.item].locator(f".box[data-box='{box.number}']")
                area, drawn_at = areas[place.item], node.bounding_box()
                left = place.pixels[0] / found.images[place.item].width * area["width"]
                assert drawn_at["x"] - area["x"] == pytest.approx(left, abs=1)
        assert page.locator(".box").count() == 6
        page.keyboard.press("u")
        for number in (3, 4):  # a tile and the thumbnail: a token is 2 x 2 patches, 16 tokens a row
            image, spot = found.images[number], pictures[number].locator(".spot")
            token = image.start + 16 * 2 + 5
            page.hover(f".cell[data-i='{token}']")
            assert [spot.get_attribute(name) for name in ("x", "y", "width", "height")] == ["10", "4", "2", "2"]
            assert page.locator(".spot[visibility='visible']").count() == 1
            assert visit.field("image") == f"{number}, patch rows 4–5, columns 10–11"
            pictures[number].scroll_into_view_if_needed()
            area = pictures[number].locator("img").bounding_box()
            page.mouse.move(area["x"] + area["width"] * 7.5 / 16, area["y"] + area["height"] * 0.5 / 16)
            assert visit.field("position") == f"{image.start + 7}"
        visit.shot("tiles")
        assert visit.complaints == []
