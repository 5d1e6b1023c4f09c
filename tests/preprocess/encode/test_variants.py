"""Variants of conversations: boxes and points cover the same things, and nothing depends on place or order."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.chat_rows import image_item, turn, write_jsonl
from tests.conftest import build_dataset, tree_bytes
from tests.preprocess.command_line import Ended
from vlmdata import open_dataset
from vlmdata.families import REGISTRY, family
from vlmdata.families.coordinates import coordinates_in
from vlmdata.inspect import describe_dataset, describe_sample
from vlmdata.inspect.sample import rebuild_image
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig, TrainTurns, VariantKind
from vlmdata.preprocess.conversation import (
    BoxPart,
    Conversation,
    Document,
    ImagePart,
    Message,
    PointPart,
    TextPart,
    VideoPart,
)
from vlmdata.preprocess.encode import encode_image
from vlmdata.preprocess.encode.grounding import with_grounding_as_text
from vlmdata.preprocess.encode.image import encode_images, image_tokens
from vlmdata.preprocess.encode.lengths import image_tokens_of
from vlmdata.preprocess.encode.variants import with_variants
from vlmdata.preprocess.recipes.base import Candidate
from vlmdata.preprocess.recipes.context import RecipeContext
from vlmdata.preprocess.recipes.polygons import Polygons, box_around
from vlmdata.preprocess.recode.old_dataset import OldDataset
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.retokenize.run import old_config, retokenize_dataset
from vlmdata.preprocess.row import Row
from vlmdata.preprocess.sources.open import open_source
from vlmdata.reasons import Reason
from vlmdata.storage import open_store
from vlmdata.verify.dataset import verify_dataset

#: Families with boxes whose images may have any size.
GROUNDED = [name for name in REGISTRY if family(name).grounding is not None and family(name).most_views == 1]
BOUNDS = ImageConfig(16_384, 131_072)
ALL = tuple(VariantKind)


def config(name: str = "qwen3_vl", variants: int = 4, kinds: Sequence[VariantKind] = ALL, **more: Any) -> Any:
    return PreprocessConfig(family=name, image=BOUNDS, variants=variants, variant_kinds=tuple(kinds), **more)


def file_of(height: int, width: int, *boxes: Sequence[int], turned: bool = False) -> bytes:
    """A picture whose boxes are white and whose other parts are black, turned by EXIF if wanted."""
    pixels, file, exif = np.zeros((height, width, 3), np.uint8), io.BytesIO(), Image.Exif()
    for box in boxes:
        pixels[box[1] : box[3], box[0] : box[2]] = 255
    exif[0x0112] = 6 if turned else 1
    Image.fromarray(np.rot90(pixels) if turned else pixels).save(file, "PNG", exif=exif)
    return file.getvalue()


def cross_in(box: Sequence[int]) -> tuple[list[Sequence[int]], list[int]]:
    """A cross that fills a box: its two bars, and its corners, x and y in turn."""
    left, top, right, bottom = box
    across, down = (right - left) // 3, (bottom - top) // 3
    xs, ys = (left, left + across, right - across, right), (top, top + down, bottom - down, bottom)
    bars = [(xs[1], ys[0], xs[2], ys[3]), (xs[0], ys[1], xs[3], ys[2])]
    at = [(1, 0), (2, 0), (2, 1), (3, 1), (3, 2), (2, 2), (2, 3), (1, 3), (1, 2), (0, 2), (0, 1), (1, 1)]
    return bars, [number for x, y in at for number in (xs[x], ys[y])]


def drawn(pixels: npt.NDArray[np.uint8]) -> list[float]:
    """Left, top, right and bottom of what is white, in fractions of a pixel: where it is half as bright."""
    found: list[list[float]] = []
    for axis in (0, 1):
        profile = pixels[:, :, 0].max(axis=axis) / 255
        bright = np.flatnonzero(profile > 0.5)
        edges = []
        for inner, outer in ((bright[0], bright[0] - 1), (bright[-1], bright[-1] + 1)):
            if not 0 <= outer < len(profile):
                edges.append(0.0 if outer < 0 else float(len(profile)))
                continue
            part = (profile[inner] - 0.5) / (profile[inner] - profile[outer])
            edges.append(float(inner + 0.5 + part * (outer - inner)))
        found.append(edges)
    (left, right), (top, bottom) = found
    return [left, top, right, bottom]


def variants_of(made: Any, options: PreprocessConfig, content: Any = 0, number: int = 0) -> list[Any]:
    return [each.made for each in with_variants([Candidate(made)], Row(number, {"content": content}), options)]


corners = st.tuples(*(st.floats(0.1, 0.4), st.floats(0.1, 0.4), st.floats(0.6, 0.9), st.floats(0.6, 0.9)))


@settings(max_examples=40)
@given(
    name=st.sampled_from(GROUNDED),
    sizes=st.lists(
        st.tuples(st.integers(40, 500), st.integers(40, 500), st.booleans(), corners), min_size=1, max_size=2
    ),
    kinds=st.sets(st.sampled_from(ALL), min_size=1),
    content=st.integers(),
    polygon=st.booleans(),
)
def test_boxes_follow_their_pixels(
    name: str, sizes: list[Any], kinds: set[VariantKind], content: int, polygon: bool
) -> None:
    options, rules = config(name, kinds=tuple(kinds)), family(name)
    assert rules.grounding is not None
    images, boxes = [], []
    for number, (height, width, turned, shares) in enumerate(sizes):
        box = tuple(round(share * side) for share, side in zip(shares, (width, height) * 2, strict=True))
        bars, corners_of = cross_in(box)
        images.append(ImagePart(file_of(height, width, *(bars if polygon else [box]), turned=turned)))
        box = box_around(corners_of, Polygons.BOX, "quad") if polygon else box
        middle = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
        boxes += [BoxPart(box, image=number), TextPart(" "), PointPart(middle, image=number), TextPart(" ")]
    made = Conversation((Message("user", tuple(images)), Message("assistant", tuple(boxes))))
    variants = variants_of(made, options, content)
    assert [each.variant["number"] for each in variants] == sorted({each.variant["number"] for each in variants})
    assert len(variants) > 1
    shown = set()
    for each in variants:
        text = with_grounding_as_text(each, options).answers[0].text
        written = list(coordinates_in(text, rules.grounding))
        seen = []
        for number, part in enumerate(each.images):
            (stored,) = encode_image(part, BOUNDS, rules, "image")
            height, width = stored.size
            pixels = rules.unpatchify(stored.patches, *stored.grid[1:]).transpose(1, 2, 0)
            box, point = (rules.grounding.pixels(found.numbers, height, width) for found in written[2 * number :][:2])
            edges = drawn(pixels)
            steps = [max(1.0, side / (rules.grounding.scale or side)) for side in (width, height)]
            for n, edge in enumerate(edges):
                assert abs(box[n] - edge) <= steps[n % 2] / 2 + 0.25
            for n in (0, 1):
                assert abs(point[n] - (edges[n] + edges[n + 2]) / 2) <= steps[n] / 2 + 0.5
            least, most = BOUNDS.bounds(rules)
            assert least <= height * width <= most
            if VariantKind.CROP not in kinds:
                assert part.region is None
            if VariantKind.FLIP not in kinds:
                assert not part.mirrored
            tokens = image_tokens([part], options, more_than=-1)
            assert tokens in (None, stored.tokens)
            assert image_tokens_of(part, options) == stored.tokens
            seen.append((part.region, part.mirrored, stored.size))
        shown.add(tuple(seen))
    assert len(shown) == len(variants)
    first = replace(variants[0], variant={})
    assert first == made


def test_the_content_alone_decides() -> None:
    image = ImagePart(file_of(300, 400, (100, 90, 200, 150)))
    made = Conversation(
        (Message("user", (image,)), Message("assistant", (BoxPart((100, 90, 200, 150)), TextPart("."))))
    )

    def shown(content: Any, number: int) -> list[Any]:
        parts = [each.images[0] for each in variants_of(made, config(variants=6), content, number)]
        return [(part.region, part.mirrored, part.resized_height, part.resized_width) for part in parts]

    assert shown("a", 0) == shown("a", 12_345)
    assert shown("a", 0) != shown("b", 0)
    more = [each.images[0].region for each in variants_of(made, config(variants=3), "a")]
    assert more == [region for region, *_ in shown("a", 0)][:3]  # more variants change none of the others
    listed = with_variants([Candidate(made, 0, 2), Candidate(made, 1, 2)], Row(0, {}), config(variants=3))
    assert [(each.sample, each.of) for each in listed] == [(n, 6) for n in range(6)]
    regions = [each.made.images[0].region for each in listed if isinstance(each.made, Conversation)]
    assert regions[1:3] != regions[4:6]


ASKED = Message("user", (ImagePart(file_of(200, 300, (100, 90, 200, 150))), TextPart("Where?")))
WRITTEN = '{"bbox_2d": [1, 2, 3, 4]}'


@pytest.mark.parametrize(
    ("name", "made", "kinds", "expected"),
    [
        ("qwen3_vl", Conversation((Message("user", (TextPart("?"),)), Message("assistant", ()))), ALL, "no image"),
        (
            "qwen3_vl",
            Conversation(
                (
                    replace(
                        ASKED,
                        parts=(*ASKED.parts, VideoPart(b"")),
                    ),
                )
            ),
            ALL,
            "a video",
        ),
        ("qwen2_5_vl", Conversation((ASKED, Message("assistant", (TextPart(WRITTEN),)))), ALL, "coordinates"),
        ("qwen3_vl", Conversation((ASKED, Message("assistant", (TextPart(WRITTEN),)))), ALL, {"scale"}),
        ("qwen3_vl", Conversation((ASKED,), tools=({"name": "zoom"},)), ALL, {"scale"}),
        ("qwen3_vl", Conversation((ASKED,), tools=({"name": "zoom"},)), ALL[1:], "coordinates"),
        (
            "qwen3_vl",
            Conversation((ASKED, Message("assistant", (TextPart('"bbox_2d": [x1, y1]'),)))),
            ALL[1:2],
            "no oth",
        ),
        ("qwen3_vl", Conversation((ASKED,)), ALL[1:2], "no other size or crop"),  # a crop would not know what to keep
    ],
)
def test_what_has_no_variants_says_why(name: str, made: Any, kinds: Any, expected: Any) -> None:
    found = variants_of(made, config(name, kinds=kinds))
    if isinstance(expected, str):
        assert len(found) == 1
        assert found[0].variant["none"].startswith(expected)
        return
    assert len(found) > 1
    assert all(part.region is None and not part.mirrored for each in found for part in each.images)


def test_what_cannot_be_used_is_rejected_once() -> None:
    damaged = Conversation((Message("user", (ImagePart(b"no image"),)), Message("assistant", (TextPart("?"),))))
    outside = Conversation((ASKED, Message("assistant", (BoxPart((0, 0, 900, 10)),))))
    rejected, document = RowRejected(Reason.NO_SAMPLES, "none"), Document((TextPart("?"),))
    for made in (damaged, outside, rejected, document):
        assert variants_of(made, config()) == [made]


def test_regions_are_checked() -> None:
    image = ImagePart(file_of(200, 300, (100, 90, 200, 150)), region=(90, 80, 300, 60))
    with pytest.raises(RowRejected, match=r"its region \[90, 80, 300, 60\] .* is not within the image of 300x200"):
        encode_image(image, BOUNDS, family("qwen3_vl"), "image")
    part = replace(image, region=(90, 80, 100, 100))
    made = Conversation((Message("user", (part,)), Message("assistant", (BoxPart((100, 90, 200, 150)),))))
    with pytest.raises(RowRejected, match=r"it is not within the used region \[90, 80, 100, 100\]") as error:
        with_grounding_as_text(made, config())
    assert error.value.reason is Reason.BOX_BOUNDS
    for wrong in ((1, 2, 3), (0, 0, 0, 5), [0, 0, 1, 1], (0, 0, 1.0, 1), (-1, 0, 1, 1)):
        with pytest.raises(ValueError, match=r"ImagePart\.region is"):
            ImagePart(b"", region=wrong)  # type: ignore[arg-type]


def test_parts_of_one_file_have_their_own_pixels() -> None:
    whole = ImagePart(file_of(200, 300, (30, 40, 200, 150)))
    parts = [whole, replace(whole, region=(10, 20, 250, 160)), replace(whole, mirrored=True), whole]
    together = encode_images(parts, config())
    for part, (seen,) in zip(parts, together, strict=True):
        (alone,) = encode_image(part, BOUNDS, family("qwen3_vl"), "image")
        assert np.array_equal(seen.patches, alone.patches)
        context = RecipeContext.of(PreprocessConfig(family="qwen3_vl", image=BOUNDS))
        assert context.final_size(part) == seen.size
    assert together[0] is together[3]


def test_a_recipe_that_scales_coordinates_itself_is_told() -> None:
    with pytest.raises(RowRejected, match="--variants 4 makes images of several sizes"):
        RecipeContext.of(config()).final_size((100, 200))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variants": 0}, "variants is 0; it must be at least 1"),
        ({"variants": 2, "variant_kinds": ("turn",)}, "variant_kinds is turn; name some of scale, crop, flip"),
        ({"variants": 2, "variant_kinds": ("crop", "crop")}, "each once"),
        ({"variant_kinds": ("flip",)}, "it has no effect without variants"),
        ({"variants": 2, "family": "internvl"}, "sizes of images of the family internvl are not free"),
        ({"variants": 2, "pixels": "source"}, "pixels=source stores whole files: name only scale"),
    ],
)
def test_refused_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PreprocessConfig(**options)


def rows() -> list[dict[str, Any]]:
    """A row with boxes in two turns, one without, one without an image, and one that is rejected."""
    box = (100, 90, 200, 150)
    uri = "data:image/png;base64," + base64.b64encode(file_of(260, 380, box)).decode()
    asked = {"role": "user", "content": "<image>Where?"}
    answer = {"role": "assistant", "content": '{"bbox_2d": <bbox>}'}
    again = [{"role": "user", "content": "And its nose?"}, {"role": "assistant", "content": '{"point_2d": <bbox>}'}]
    objects = {"bbox": [list(box), [150, 120]]}
    return [
        {"messages": [asked, answer, *again], "images": [uri], "objects": objects},
        {"messages": [turn("user", image_item(seed=3, width=300, height=200), "?"), turn("assistant", "Noise.")]},
        {"messages": [turn("user", "Hello?"), turn("assistant", "Hello.")]},
        {"messages": [turn("user", {"type": "image", "image": "missing.png"}, "?"), turn("assistant", "A cat.")]},
    ]


VARIED: dict[str, Any] = {"recipe": "chat", "image": BOUNDS, "variants": 3, "variant_kinds": ALL, "rows_per_shard": 2}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("variants") / "rows.jsonl", rows())


@pytest.mark.parametrize("turns", list(TrainTurns))
@pytest.mark.parametrize("name", GROUNDED)
def test_a_dataset_of_variants(source: Path, tmp_path: Path, turns: TrainTurns, name: str) -> None:
    options = {**VARIED, "train_turns": turns, "family": name}
    directory = build_dataset(source, tmp_path / "data", **options)
    assert verify_dataset(directory).faults == []
    dataset = open_dataset(directory)
    assert dataset.manifest.config["options"]["variants"] == 3
    assert dataset.manifest.config["options"]["variant_kinds"] == ["scale", "crop", "flip"]
    keys = [dataset.index.key(i) for i in range(len(dataset))]
    per_turn = 2 if turns is TrainTurns.EACH else 1
    assert len(set(keys)) == len(keys) == 3 * per_turn + 3 + 1
    assert sum(dataset.manifest.rejects.values()) == 1
    numbers = [dataset.metadata(i)["variant"] for i in range(len(dataset))]
    assert numbers[: 3 * per_turn] == [{"number": n} for n in range(3) for _ in range(per_turn)]
    assert numbers[-1] == {"none": "no image"}
    for i in range(3 * per_turn):
        described = describe_sample(dataset, i)
        box = described.boxes[0]
        assert box.pixels is not None
        edges = drawn(rebuild_image(dataset.as_stored(i), 0, dataset.family))
        assert max(abs(a - b) for a, b in zip(box.pixels, edges, strict=True)) < 0.8
    assert "wrong_box" not in {group.kind for group in describe_dataset(dataset, check=None).findings}


def test_workers_and_the_order_of_rows_change_nothing(source: Path, tmp_path: Path) -> None:
    one = build_dataset(source, tmp_path / "one", **VARIED)
    assert tree_bytes(build_dataset(source, tmp_path / "two", workers=2, **VARIED)) == tree_bytes(one)
    turned = write_jsonl(tmp_path / "turned.jsonl", rows()[::-1])
    first, other = open_dataset(one), open_dataset(build_dataset(turned, tmp_path / "turned", **VARIED))

    def contents(dataset: Any, row: int) -> list[Any]:
        mine = [i for i in range(len(dataset)) if int(dataset.index.source_row[i]) == row]
        return [(dataset[i].input_ids.tobytes(), dataset[i].patches.tobytes()) for i in mine]

    assert [contents(first, n) for n in range(4)] == [contents(other, 3 - n) for n in range(4)]


def test_a_version_has_the_variants_of_a_run_from_the_start(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows.jsonl", rows()[1:3])
    build_dataset(source, tmp_path / "grown", **VARIED)
    write_jsonl(source, [rows()[1], rows()[2], rows()[0]])
    grown = open_dataset(build_dataset(source, tmp_path / "grown", **VARIED))
    assert grown.manifest.version["number"] == 2
    fresh = open_dataset(build_dataset(source, tmp_path / "fresh", **VARIED))
    assert len(grown) == len(fresh) == 3 + 1 + 3
    for key in (fresh.index.key(i) for i in range(len(fresh))):
        ours, theirs = grown[grown.index.position_of(key)], fresh[fresh.index.position_of(key)]
        assert ours.input_ids.tobytes() == theirs.input_ids.tobytes()
        assert ours.patches.tobytes() == theirs.patches.tobytes()
    assert verify_dataset(tmp_path / "grown").faults == []


@pytest.mark.parametrize("kept", [False, True], ids=["source", "shards"])
def test_retokenizing_keeps_the_variants(source: Path, tmp_path: Path, kept: bool) -> None:
    options = {**VARIED, "keep_conversations": kept}
    old = build_dataset(source, tmp_path / "old", **options)
    fresh = build_dataset(source, tmp_path / "fresh", system_prompt="Look.", **options)
    dataset = OldDataset.open(old)
    new = replace(old_config(dataset), system_prompt="Look.")
    given = None if kept else open_source(str(source), recipe="chat")
    retokenize_dataset(dataset, open_store(tmp_path / "out"), new, source=given, keep_rejected=True)
    assert tree_bytes(tmp_path / "out") == tree_bytes(fresh)


def test_the_command_makes_and_traces_variants(source: Path, tmp_path: Path, vlmdata: Callable[..., Ended]) -> None:
    base = (source, "--recipe", "chat", "--tokenizer", "embedded", "--variants", 3, "--variant-kinds", "crop,scale")
    traced = vlmdata("preprocess", *base, "--trace", 0)
    assert "a list of 3, 2 variants among them" in traced.said
    assert "no image" in vlmdata("preprocess", *base, "--trace", 2).said
    lengths = vlmdata("preprocess", *base, "--lengths", "64", "--json").stdout
    assert json.loads(lengths)["samples"] == 3 + 3 + 1
    assert vlmdata("preprocess", *base, "--out", tmp_path / "out", "--max-reject-rate", 1).code == 0
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["config"]["options"]["variants"] == 3
    assert "scale, crop, flip" in vlmdata("preprocess", *base[:-1], "turn", "--out", tmp_path / "no").said


def test_without_the_option_nothing_is_recorded(source: Path, tmp_path: Path) -> None:
    dataset = open_dataset(build_dataset(source, tmp_path / "data", recipe="chat"))
    assert "variants" not in dataset.manifest.config["options"]
    assert "variant_kinds" not in dataset.manifest.config["options"]
    assert all("variant" not in dataset.metadata(i) for i in range(len(dataset)))
