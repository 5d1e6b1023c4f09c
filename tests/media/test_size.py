"""Sizes that the data asks for: equal to qwen_vl_utils', within the run's bounds otherwise, or refused."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vlmdata.families.qwen3_5 import FAMILY
from vlmdata.media.error import MediaError
from vlmdata.media.resize import SizeRequest, target_size
from vlmdata.reasons import Reason

MOST = FAMILY.largest_image
RUN = (16_384, 65_536)
SIDES = st.integers(1, 400)
BOUNDS = st.lists(st.integers(1024, 200_000), min_size=2, max_size=2).map(sorted)


def of_qwen(height: int, width: int, **bounds: int) -> tuple[int, int] | None:
    """(height, width) after ``fetch_image``; None where it fails because the ratio is too large or a side becomes 0."""
    from qwen_vl_utils.vision_process import fetch_image  # imports torchvision: 2 s in each of pytest's workers

    try:
        width, height = fetch_image({"image": Image.new("RGB", (width, height)), **bounds}, image_patch_size=16).size
    except ValueError:
        return None
    return height, width


def ours(height: int, width: int, **bounds: int) -> tuple[int, int] | None:
    try:
        return target_size(height, width, SizeRequest(**bounds), RUN, FAMILY, "images[0]")
    except MediaError as error:
        return None if error.reason is Reason.ASPECT_RATIO else (0, 0)


def agree(mine: tuple[int, int] | None, theirs: tuple[int, int] | None, ratio: float) -> bool:
    if theirs is None and ratio <= 200:
        return mine is not None and min(mine) == 32  # theirs would have a side of 0
    return mine == theirs


@settings(max_examples=150, deadline=None)
@given(height=SIDES, width=SIDES, bounds=BOUNDS)
def test_both_bounds_are_obeyed_as_qwen_vl_utils_does(height: int, width: int, bounds: list[int]) -> None:
    own = {"min_pixels": bounds[0], "max_pixels": bounds[1]}
    ratio = max(height, width) / min(height, width)
    assert agree(ours(height, width, **own), of_qwen(height, width, **own), ratio)


@settings(max_examples=100, deadline=None)
@given(height=SIDES, width=SIDES, name=st.sampled_from(["min_pixels", "max_pixels"]), value=st.integers(1024, 200_000))
def test_one_bound_meets_the_runs_other_bound(height: int, width: int, name: str, value: int) -> None:
    """The run's bound holds unless it contradicts the image's own; then it is moved to it."""
    if name == "max_pixels":
        both = {"min_pixels": min(RUN[0], value), "max_pixels": value}
    else:
        both = {"min_pixels": value, "max_pixels": max(RUN[1], value)}
    ratio = max(height, width) / min(height, width)
    assert agree(ours(height, width, **{name: value}), of_qwen(height, width, **both), ratio)


@settings(max_examples=60, deadline=None)
@given(height=SIDES, width=SIDES, asked=st.tuples(st.integers(1, 700), st.integers(1, 700)))
def test_a_size_is_obeyed_whatever_the_bounds_and_the_image(height: int, width: int, asked: tuple[int, int]) -> None:
    bounds = {"resized_height": asked[0], "resized_width": asked[1]}
    size = ours(height, width, **bounds, min_pixels=1024, max_pixels=2048)
    assert agree(size, of_qwen(64, 64, **bounds), max(asked) / min(asked))


@given(height=SIDES, width=SIDES)
def test_without_bounds_of_its_own_the_runs_hold(height: int, width: int) -> None:
    if max(height, width) / min(height, width) <= 200:
        assert ours(height, width) == FAMILY.image_size(height, width, RUN[0], RUN[1])


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"max_pixels": 1023}, r"max_pixels is 1,023; the smallest image has 1,024"),
        ({"max_pixels": MOST + 1}, "max_pixels is 16,777,217; at most 16,777,216 is possible"),
        ({"min_pixels": 10**12}, "min_pixels is 1,000,000,000,000; at most"),
        ({"min_pixels": 5000, "max_pixels": 4000}, "min_pixels is 5,000, more than max_pixels 4,000"),
        (
            {"resized_height": 10**6, "resized_width": 10**6},
            r"1000000x1000000 \(resized_width x resized_height\) is more",
        ),
    ],
)
def test_what_cannot_be_obeyed(bounds: dict[str, int], message: str) -> None:
    with pytest.raises(MediaError, match=message) as rejected:
        target_size(64, 64, SizeRequest(**bounds), RUN, FAMILY, "images[0]")
    assert rejected.value.reason is Reason.IMAGE_BOUNDS


def test_a_size_of_extreme_ratio_is_refused() -> None:
    assert ours(64, 64, resized_height=10, resized_width=3000) is None


def test_the_error_survives_the_way_from_a_worker() -> None:
    error = MediaError(Reason.NOT_AN_IMAGE, "image: 3 bytes")
    again = pickle.loads(pickle.dumps(error))
    assert (again.reason, again.message, str(again)) == (error.reason, error.message, "not_an_image: image: 3 bytes")
