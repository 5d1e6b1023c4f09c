"""Videos as ``qwen_vl_utils`` samples and resizes them: its own code reads the same frames."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.families.reference import FAMILIES
from tests.families.test_videos import processor
from vlmdata.families import family
from vlmdata.families.base import AspectRatioError
from vlmdata.families.qwen_vl_utils import QWEN_VL_UTILS
from vlmdata.families.video import VideoFramesError, VideoRules
from vlmdata.media.video.patches import VideoPatches


def rules_of(name: str) -> VideoRules:
    return dict(family(name).other_video)[QWEN_VL_UTILS]


class Reader:
    """Takes the place of decord's reader, which is not installed: the frames are those of a list."""

    frames: np.ndarray = np.zeros((1, 1, 1, 3), np.uint8)
    rate = 1.0

    def __init__(self, _: str) -> None:
        pass

    def __len__(self) -> int:
        return len(self.frames)

    def get_avg_fps(self) -> float:
        return self.rate

    def get_batch(self, indices: list[int]) -> Any:
        equal = self.frames.strides[0] == 0  # they have no memory of their own, and no copies are needed
        return SimpleNamespace(asnumpy=lambda: self.frames[: len(indices)] if equal else self.frames[indices])


def theirs(
    monkeypatch: pytest.MonkeyPatch, frames: np.ndarray, rate: float, patch_size: int, **asked: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The resized frames, and the metadata for the processor."""
    from qwen_vl_utils import vision_process

    monkeypatch.setattr(Reader, "frames", frames)
    monkeypatch.setattr(Reader, "rate", rate)
    monkeypatch.setitem(sys.modules, "decord", SimpleNamespace(VideoReader=Reader))
    monkeypatch.setattr(vision_process, "get_video_reader_backend", lambda: "decord")
    # On an error of a reader it goes on with another one.
    monkeypatch.setitem(vision_process.VIDEO_READER_BACKENDS, "torchvision", vision_process._read_video_decord)
    made: Any = vision_process.fetch_video({"video": "a.mp4", **asked}, patch_size, return_video_metadata=True)
    return made


rates = st.sampled_from([24.0, 25.0, 30000 / 1001, 60.0, 1.0, 0.5, 7.3])
samplings = st.fixed_dictionaries(
    {},
    optional={
        "fps": st.sampled_from([2.0, 1.0, 0.25, 3.7, 30.0]),
        "min_frames": st.sampled_from([4, 2, 1, 5, 16]),
        "max_frames": st.sampled_from([768, 16, 7, 2, 1]),
    },
) | st.fixed_dictionaries({"nframes": st.sampled_from([1, 2, 3, 5, 16, 33])})


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=150)
@given(total=st.integers(2, 3000) | st.integers(2, 12), rate=rates, asked=samplings)
@example(total=300, rate=30000 / 1001, asked={})
@example(total=9, rate=1.0, asked={})
def test_the_sampled_frames_are_those_of_qwen_vl_utils(
    name: str, total: int, rate: float, asked: dict[str, Any]
) -> None:
    rules = rules_of(name)
    chosen = replace(rules.defaults, **{("num_frames" if key == "nframes" else key): asked[key] for key in asked})
    frames = np.broadcast_to(np.zeros((1, 1, 1, 3), np.uint8), (total, 8, 8, 3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchvision.transforms.functional.resize", lambda video, *_, **__: video)
        try:
            _, metadata = theirs(patch, frames, rate, family(name).patch_size, **asked)
        except ValueError:
            with pytest.raises(VideoFramesError):
                rules.frame_indices(total, rate, chosen, 2)
            return
    assert rules.frame_indices(total, rate, chosen, 2).tolist() == list(metadata["frames_indices"])


def test_a_video_of_one_frame_becomes_one_patch() -> None:
    rules = rules_of("qwen3_5")
    assert rules.frame_indices(1, 30.0, rules.defaults, 2).tolist() == [0, 0]


bounds = st.fixed_dictionaries(
    {},
    optional={
        "min_pixels": st.sampled_from([4_000, 131_072, 1_000_000]),
        "max_pixels": st.sampled_from([9_000, 200_000, 5_000_000]),
        "total_pixels": st.sampled_from([500_000, 20_000_000]),
    },
)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=150)
@given(
    pairs=st.integers(1, 384) | st.integers(1, 4),
    height=st.integers(1, 2200),
    width=st.integers(1, 2200),
    asked=bounds,
)
@example(pairs=384, height=1080, width=1920, asked={})
def test_the_size_is_that_of_qwen_vl_utils(
    name: str, pairs: int, height: int, width: int, asked: dict[str, int]
) -> None:
    made, rules, count = family(name), rules_of(name), 2 * pairs
    frames = np.broadcast_to(np.zeros((1, 1, 1, 3), np.uint8), (count, height, width, 3))
    sizes: list[tuple[int, int]] = []

    def resize(video: Any, size: list[int], **_: Any) -> Any:
        sizes.append((size[0], size[1]))
        return torch.zeros(1)

    def bounded() -> tuple[int, int]:
        least, most, total = (asked.get(key) for key in ("min_pixels", "max_pixels", "total_pixels"))
        return rules.size(count, height, width, rules.bounded(rules.defaults, count, 2, least, most, total), made)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchvision.transforms.functional.resize", resize)
        patch.setattr("torch.tensor", lambda array: torch.as_tensor(np.zeros(1)).expand(*array.shape))
        try:
            theirs(patch, frames, 30.0, made.patch_size, nframes=count, **asked)
        except (ValueError, AssertionError):
            with pytest.raises((AspectRatioError, VideoFramesError)):
                bounded()
            return
    if 0 not in sizes[0]:  # it makes nothing of some long and narrow frames
        assert bounded() == sizes[0]


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=15)
@given(
    pairs=st.integers(1, 3),
    height=st.integers(40, 150),
    width=st.integers(40, 150),
    most=st.sampled_from([None, 20_000]),
    seed=st.integers(0, 99),
)
def test_the_pixels_are_those_of_qwen_vl_utils_but_for_rounding(
    name: str, pairs: int, height: int, width: int, most: int | None, seed: int
) -> None:
    """It resizes in float32, and we in uint8, as transformers does."""
    made, rules, count = family(name), rules_of(name), 2 * pairs
    coarse = np.random.default_rng(seed).integers(30, 226, (count, 5, 5, 3), np.uint8)
    frames = np.stack(
        [np.asarray(Image.fromarray(each).resize((width, height), Image.Resampling.BILINEAR)) for each in coarse]
    )
    least = None if most is None else 4_000
    asked = {} if most is None else {"min_pixels": least, "max_pixels": most}
    with pytest.MonkeyPatch.context() as patch:
        expected, _ = theirs(patch, frames, 30.0, made.patch_size, nframes=count, **asked)
    size = rules.size(count, height, width, rules.bounded(rules.defaults, count, 2, least, most), made)
    patches = VideoPatches(count, size, made)
    for number, frame in enumerate(frames):
        patches.put(number, frame)
    found = made.pixel_values(torch.from_numpy(patches.rows), copies=2)
    wanted = processor(name)([expected], do_sample_frames=False, do_resize=False, return_tensors="pt")
    level = 1 / 255 / min(made.image_std)
    assert torch.allclose(found, wanted["pixel_values_videos"], rtol=0, atol=1.01 * level)
