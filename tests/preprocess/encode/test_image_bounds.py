"""Sizes that content items ask for, from the row to the stored patches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.conftest import encoded_image
from tests.preprocess.recipes.chat_recipe import check_rejected, convert, user
from vlmdata.errors import UsageError
from vlmdata.families.qwen3_5 import FAMILY
from vlmdata.preprocess.chat.tokenizer import ChatTokenizer
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig
from vlmdata.preprocess.conversation import ImagePart
from vlmdata.preprocess.encode import encode_image
from vlmdata.preprocess.encode.probe import require_usable
from vlmdata.reasons import Reason

RUN = ImageConfig(min_pixels=16_384, max_pixels=65_536)


def test_images_are_stored_in_that_size() -> None:
    data = encoded_image(width=200, height=100)
    (encoded,) = encode_image(ImagePart(data, resized_height=96, resized_width=160), RUN, FAMILY, "image")
    assert encoded.grid == (1, 6, 10)
    assert encoded.patches.shape == (60, 768)
    (plain,) = encode_image(ImagePart(data), ImageConfig(1024, 2048), FAMILY, "image")
    (bounded,) = encode_image(ImagePart(data, min_pixels=1024, max_pixels=2048), RUN, FAMILY, "image")
    assert np.array_equal(bounded.patches, plain.patches)


def test_bounds_default_to_those_of_the_family() -> None:
    small = replace(FAMILY, min_pixels=4096, max_pixels=8192)
    image = ImagePart(encoded_image(width=400, height=300))
    for given, expected in (
        (ImageConfig(), (4096, 8192)),
        (ImageConfig(max_pixels=16_384), (4096, 16_384)),
        (ImageConfig(min_pixels=1024), (1024, 8192)),
    ):
        assert given.bounds(small) == expected
        (encoded,) = encode_image(image, given, small, "image")
        assert len(encoded.patches) == len(encode_image(image, ImageConfig(*expected), small, "image")[0].patches)
        assert 0.7 * expected[1] < 256 * len(encoded.patches) <= expected[1]
    written = PreprocessConfig().to_json()["image"]
    assert (written["min_pixels"], written["max_pixels"]) == (200_704, 1_003_520)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ImageConfig(max_pixels=2000),
            r"max_pixels is 2000, less than min_pixels 4096 \(the default of family qwen3_5\)",
        ),
        (
            ImageConfig(min_pixels=9000),
            r"max_pixels is 8192 \(the default of family qwen3_5\), less than min_pixels 9000",
        ),
        (ImageConfig(5000, 4000), r"max_pixels is 4000, less than min_pixels 5000\. Set both"),
        (
            ImageConfig(min_pixels=1023),
            r"min_pixels is 1023; it must be at least 1024, the smallest image of family qwen3_5",
        ),
    ],
)
def test_bounds_that_contradict_each_other_are_refused(given: ImageConfig, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        given.bounds(replace(FAMILY, min_pixels=4096, max_pixels=8192))


def test_a_family_of_large_tokens_is_tried_with_images_of_its_own_size(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A side of 56 pixels to a token: more than the 32 of built-in families."""
    large = replace(FAMILY, patch_size=28, min_pixels=4096, max_pixels=8192)
    monkeypatch.setattr(PreprocessConfig, "model_family", large)
    require_usable(tokenizer, PreprocessConfig(image=ImageConfig(max_pixels=20_000)))
    small = replace(large, min_pixels=1024)
    with pytest.raises(
        UsageError, match=r"min_pixels is 1024 \(the default of family qwen3_5\); it must be at least 3136"
    ):
        ImageConfig().bounds(small)


def item(**bounds: Any) -> dict[str, Any]:
    return {"messages": user([{"type": "image", "image": b"a", **bounds}])}


class TestContentItems:
    def test_say_it_for_images_they_name_and_images_they_take(self) -> None:
        for row in (item(min_pixels=3136, max_pixels=50_176.0), {**item(), "images": [b"a"]}):
            row["messages"][0]["content"][0].update(resized_height=64, resized_width=96)
            if "images" in row:
                del row["messages"][0]["content"][0]["image"]
            (image,) = convert(row).images
            assert (image.resized_height, image.resized_width) == (64, 96)
            assert (image.min_pixels, image.max_pixels) == ((None, None) if "images" in row else (3136, 50_176))

    @pytest.mark.parametrize("value", [0, -1, 0.5, "small", True, [3136]])
    def test_with_values_that_are_no_numbers_of_pixels(self, value: Any) -> None:
        message = r"messages\[0\]\.content\[0\]\.max_pixels is .*; it must be a positive number of pixels"
        check_rejected(item(max_pixels=value), Reason.IMAGE_BOUNDS, message)

    def test_with_one_side_only(self) -> None:
        check_rejected(item(resized_width=64), Reason.IMAGE_BOUNDS, "only one of resized_height and resized_width")

    @pytest.mark.parametrize("more", [{}, {"max_pixels": 9000}])
    def test_say_more_than_the_file_and_the_file_more_than_the_row(self, more: dict[str, int]) -> None:
        """All three places are read: ``min_pixels`` of the row, ``max_pixels`` of the file, then those of the item."""
        row = {"messages": user([{"type": "image", **more}]), "images": [{"bytes": b"a", "max_pixels": 8000}]}
        conversation = convert({**row, "min_pixels": "2000", "max_pixels": 7000})
        (image,) = conversation.images
        assert (image.min_pixels, image.max_pixels) == (2000, more.get("max_pixels", 8000))
        assert conversation.unknown == ()


class TestOtherPlaces:
    def test_files_of_a_column_and_of_an_item(self) -> None:
        size = {"resized_height": 64, "resized_width": 96}
        taken = {"messages": user("<image>?"), "images": [{"bytes": b"a", **size}]}
        for row in (taken, item(image={"bytes": b"a", **size})):
            conversation = convert(row)
            (image,) = conversation.images
            assert (image.resized_height, image.resized_width, conversation.unknown) == (64, 96, ())

    def test_with_values_that_are_no_numbers_of_pixels(self) -> None:
        row = {"messages": user("<image>?"), "images": [{"bytes": b"a", "max_pixels": -1}]}
        check_rejected(
            row, Reason.IMAGE_BOUNDS, r"images\[0\]\.max_pixels is -1; it must be a positive number of pixels"
        )
        row = {"messages": user("<image>?"), "images": [b"a"], "max_pixels": "small"}
        check_rejected(row, Reason.IMAGE_BOUNDS, r"row\.max_pixels is small; it must be a positive number of pixels")
