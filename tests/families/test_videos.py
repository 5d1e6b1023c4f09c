"""Sampling, sizes and pixels of videos against the video processors of transformers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.families.reference import rope_index
from vlmdata.families import family
from vlmdata.families.base import AspectRatioError
from vlmdata.families.blocks import Blocks
from vlmdata.families.chat import IMAGE, VIDEO
from vlmdata.families.positions import locate_blocks
from vlmdata.families.video import VideoFramesError, VideoSettings, patch_seconds, seconds_per_patch
from vlmdata.media.video.patches import VideoPatches
from vlmdata.preprocess.config import VideoConfig

FAMILIES = ("qwen3_5", "qwen3_vl", "qwen2_5_vl")


@cache
def processor(name: str) -> Any:
    """The video processor of a family, as published checkpoints configure it."""
    from transformers import Qwen2VLVideoProcessor, Qwen3VLVideoProcessor

    if name == "qwen2_5_vl":
        return Qwen2VLVideoProcessor(do_sample_frames=True, fps=2)
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return Qwen3VLVideoProcessor(size={"shortest_edge": 4096, "longest_edge": 25_165_824}, **half)


def arguments(chosen: VideoSettings) -> dict[str, Any]:
    """The same settings for a processor."""
    by = {"fps": chosen.fps} if chosen.num_frames is None else {"num_frames": chosen.num_frames, "fps": None}
    return {"min_frames": chosen.min_frames, "max_frames": chosen.max_frames, **by}


rates = st.sampled_from([24.0, 25.0, 30.0, 24000 / 1001, 30000 / 1001, 60.0, 1.0, 0.5, 7.3, 120.0])
samplings = st.builds(
    dict,
    fps=st.sampled_from([2.0, 1.0, 0.25, 4.0, 3.7, 30.0, 100.0]),
    min_frames=st.sampled_from([4, 2, 1, 5, 16]),
    max_frames=st.sampled_from([768, 16, 7, 6]),
    num_frames=st.sampled_from([None, None, 2, 3, 4, 9, 16, 33]),
)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=200)
@given(total=st.integers(2, 3000) | st.integers(2, 12), rate=rates, sampling=samplings)
@example(total=300, rate=30000 / 1001, sampling={})
def test_the_sampled_frames_are_those_of_the_processor(
    name: str, total: int, rate: float, sampling: dict[str, Any]
) -> None:
    from transformers.video_utils import VideoMetadata

    rules, theirs = family(name).video, processor(name)
    chosen = replace(rules.defaults, **sampling)
    metadata = VideoMetadata(total_num_frames=total, fps=rate)
    keep = {key: getattr(theirs, key) for key in ("fps", "min_frames", "max_frames")}
    try:
        for key, value in arguments(chosen).items():
            if key != "num_frames":
                setattr(theirs, key, value)
        try:
            expected = np.asarray(theirs.sample_frames(metadata, **arguments(chosen)))
        except ValueError:
            expected = None
        except ZeroDivisionError:  # less than a patch: we make one patch of the first frame
            expected = np.zeros(1, np.int64)
    finally:
        for key, value in keep.items():
            setattr(theirs, key, value)
    if expected is None:
        with pytest.raises(VideoFramesError):
            rules.frame_indices(total, rate, chosen, 2)
        return
    found = rules.frame_indices(total, rate, chosen, 2)
    assert found.dtype == np.int64
    if len(expected) == 1:
        expected = np.repeat(expected, 2)  # the processor refuses to make a patch of it
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_video_of_one_frame_becomes_one_patch_of_equal_halves(name: str) -> None:
    rules = family(name).video
    assert rules.frame_indices(1, 30.0, rules.defaults, 2).tolist() == [0, 0]


bounds = st.sampled_from([None, (4096, 200_000), (131_072, 786_432), (50_000, 60_000), (3136, 12_845_056)])


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=200)
@given(
    frames=st.integers(2, 768) | st.integers(2, 9),
    height=st.integers(1, 2200),
    width=st.integers(1, 2200),
    edges=bounds,
    cap=st.booleans(),
)
@example(frames=5, height=20, width=33, edges=None, cap=False)
@example(frames=3, height=1080, width=1920, edges=None, cap=True)
def test_the_size_is_that_of_the_processor(
    name: str, frames: int, height: int, width: int, edges: tuple[int, int] | None, cap: bool
) -> None:
    from transformers.image_utils import SizeDict

    made, theirs = family(name), processor(name)
    least, most = edges or (made.video.defaults.min_pixels, made.video.defaults.max_pixels)
    chosen = replace(made.video.defaults, min_pixels=least, max_pixels=most, cap_pixels_per_frame=cap)
    # Their size is all that matters, so the frames have no memory of their own.
    video = torch.zeros(1, 1, 1, 1, 1, dtype=torch.uint8).expand(1, frames, 1, height, width)
    sizes: list[tuple[int, int]] = []

    def resize(self: Any, image: Any, size: Any, **_: Any) -> Any:
        sizes.append((size.height, size.width))
        return image

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.video_processing_utils.TorchvisionBackend.resize", resize)
        try:
            theirs.resize(
                video,
                SizeDict(shortest_edge=least, longest_edge=most),
                None,
                factor=made.factor,
                temporal_factor=2,
                cap_pixels_per_frame=cap,
            )
        except ValueError:
            with pytest.raises(AspectRatioError):
                made.video.size(frames, height, width, chosen, made)
            return
    assert made.video.size(frames, height, width, chosen, made) == sizes[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_defaults_are_those_of_the_processor(name: str) -> None:
    defaults, theirs = family(name).video.defaults, processor(name)
    for setting in ("fps", "min_frames", "max_frames", "max_video_tokens"):
        assert getattr(defaults, setting) == getattr(theirs, setting)
    assert (defaults.min_pixels, defaults.max_pixels) == (theirs.size["shortest_edge"], theirs.size["longest_edge"])
    assert defaults.cap_pixels_per_frame is bool(theirs.cap_pixels_per_frame)


def patches_of(name: str, frames: np.ndarray, chosen: VideoSettings) -> tuple[tuple[int, ...], torch.Tensor]:
    made = family(name)
    size = made.video.size(len(frames), *frames.shape[1:3], chosen, made)
    patches = VideoPatches(len(frames), size, made)
    for number, frame in enumerate(frames):
        patches.put(number, frame)
    values = made.pixel_values(torch.from_numpy(patches.rows), copies=patches.shape.copies)
    return patches.shape.grid, values


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=25)
@given(
    frames=st.integers(2, 7),
    height=st.integers(16, 150),
    width=st.integers(16, 150),
    edges=st.sampled_from([(3136, 20_000), (100_000, 200_000)]),
    cap=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_pixel_values_are_those_of_the_processor_bit_for_bit(
    name: str, frames: int, height: int, width: int, edges: tuple[int, int], cap: bool, seed: int
) -> None:
    made = family(name)
    pixels = np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), np.uint8)
    chosen = replace(made.video.defaults, min_pixels=edges[0], max_pixels=edges[1], cap_pixels_per_frame=cap)
    theirs = processor(name)(
        [pixels],
        do_sample_frames=False,
        size={"shortest_edge": edges[0], "longest_edge": edges[1]},
        cap_pixels_per_frame=cap,
        return_tensors="pt",
    )
    grid, values = patches_of(name, pixels, chosen)
    assert theirs["video_grid_thw"].tolist() == [list(grid)]
    assert torch.equal(values, theirs["pixel_values_videos"])


@settings(max_examples=200)
@given(st.lists(st.integers(0, 5000), min_size=1, max_size=20).map(sorted), rates)
def test_the_times_are_those_of_the_processor(indices: list[int], rate: float) -> None:
    from transformers import Qwen3VLProcessor

    expected = Qwen3VLProcessor._calculate_timestamps(None, list(indices), rate, 2)
    assert list(patch_seconds(indices, rate, 2)) == expected


TEXT, IMAGE_PAD, VIDEO_PAD = 1, 9, 8
items = st.tuples(
    st.sampled_from([IMAGE, VIDEO]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.floats(0.1, 9),
)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=80)
@given(drawn=st.lists(items, max_size=5), first=st.integers(0, 3))
def test_positions_with_images_and_videos_are_those_of_the_models(
    name: str, drawn: list[tuple[str, int, int, int, int, float]], first: int
) -> None:
    made = family(name)
    ids, shapes, steps = [TEXT] * first, [], []
    grids: dict[str, list[tuple[int, int, int]]] = {IMAGE: [], VIDEO: []}
    seconds = []
    for kind, t, rows, columns, between, time in drawn:
        grid = (t if kind == VIDEO else 1, 2 * rows, 2 * columns)
        grids[kind].append(grid)
        seconds += [time] * (kind == VIDEO)
        shapes.append((kind, grid))
        fractions = VideoConfig().counts_fractions(made)
        steps.append(made.video.temporal_step(time, fractions) if kind == VIDEO else 1)
        for block in made.expansion(kind).blocks(grid):
            ids += [IMAGE_PAD if kind == IMAGE else VIDEO_PAD] * (block[0] * rows * columns) + [TEXT] * between
    input_ids = np.array(ids, np.int64)
    blocks = Blocks.of(made, shapes, {IMAGE: (IMAGE_PAD,), VIDEO: (VIDEO_PAD,)}, steps)
    starts = blocks.locate(input_ids)
    assert len(blocks.firsts) == len(shapes)
    found = made.position_ids(len(ids), starts, blocks.grids, blocks.steps)
    if not ids:
        return
    types = torch.from_numpy(np.where(input_ids == IMAGE_PAD, 1, np.where(input_ids == VIDEO_PAD, 2, 0)))[None]
    tensors = {kind: torch.tensor(each) if each else None for kind, each in grids.items()}
    expected = rope_index(
        name, torch.from_numpy(input_ids)[None], types, tensors[IMAGE], tensors[VIDEO], torch.tensor(seconds)
    )
    assert torch.equal(torch.from_numpy(found).long(), expected[:, 0])


@given(count=st.integers(1, 800), start=st.integers(0, 5), seconds=st.floats(0.0625, 60, width=32))
def test_both_rules_of_seconds_are_those_of_torch(count: int, start: int, seconds: float) -> None:
    """As ``get_vision_position_ids`` computes them in the one version, and in the other."""
    rules, times = family("qwen2_5_vl"), torch.arange(count)
    starts, grid = np.array([start]), np.array([[count, 2, 2]])
    expected = {False: times * (2 * int(torch.tensor(seconds))), True: (times * (2 * torch.tensor(seconds))).long()}
    for fractions, wanted in expected.items():
        steps = np.array([rules.video.temporal_step(seconds, fractions)])
        positions = rules.position_ids(start + count, starts, grid, steps)[0, start:]
        assert (positions - start).tolist() == wanted.tolist()


def test_half_seconds_count_where_fractions_do() -> None:
    rules = family("qwen2_5_vl")
    found = [
        rules.position_ids(6, np.array([0]), np.array([[6, 2, 2]]), np.array([rules.video.temporal_step(0.5, each)]))[0]
        for each in (False, True)
    ]
    assert [each.tolist() for each in found] == [[0] * 6, [0, 1, 2, 3, 4, 5]]
    assert family("qwen3_5").video.temporal_step(0.5, True) == 1


def test_a_block_of_the_wrong_kind_is_refused() -> None:
    ids = np.array([1, IMAGE_PAD, IMAGE_PAD, 1, VIDEO_PAD, 1])
    counts, both = np.array([2, 1]), (IMAGE_PAD, VIDEO_PAD)
    assert locate_blocks(ids, counts, np.repeat([IMAGE_PAD, VIDEO_PAD], counts), both).tolist() == [1, 4]
    with pytest.raises(ValueError, match="token 1 is id 9, but block 0 has id 8 there"):
        locate_blocks(ids, counts, np.repeat([VIDEO_PAD, IMAGE_PAD], counts), both)


def test_the_caption_of_a_patch_is_that_of_the_processor() -> None:
    """Also where the decimal is rounded."""
    from types import SimpleNamespace

    from transformers import Qwen3VLProcessor
    from transformers.video_utils import VideoMetadata

    indices, rate = [0, 1, 3, 7, 9, 20, 31], 20.0
    mine = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        vision_start_token="<|vision_start|>",
        video_token="<|video_pad|>",
        vision_end_token="<|vision_end|>",
        _calculate_timestamps=partial(Qwen3VLProcessor._calculate_timestamps, None),
    )
    metadata = VideoMetadata(total_num_frames=40, fps=rate, frames_indices=indices)
    inputs = {"video_grid_thw": torch.tensor([[4, 2, 4]]), "video_metadata": [metadata]}
    expected = Qwen3VLProcessor.replace_video_token(mine, inputs, 0)
    for name in ("qwen3_5", "qwen3_vl"):
        how = family(name).expansion(VIDEO)
        blocks = (
            how.caption.format(seconds=seconds) + how.before[0] + how.token * 2 + how.after[0]
            for seconds in patch_seconds(indices, rate, 2)
        )
        assert "".join(blocks) == expected


@settings(max_examples=100)
@given(st.integers(1, 2000), st.integers(1, 100), rates)
def test_the_seconds_of_a_patch_are_those_of_the_processor(total: int, sampled: int, rate: float) -> None:
    from transformers.video_utils import VideoMetadata

    metadata = VideoMetadata(total_num_frames=total, fps=rate, frames_indices=[0] * sampled)
    assert seconds_per_patch(sampled, total, rate, 2) == 2 / metadata.sampled_fps


@pytest.mark.parametrize("name", FAMILIES)
def test_bounds_in_the_data_replace_those_of_the_run(name: str) -> None:
    rules = family(name).video
    run, scale = rules.defaults, 1 if name == "qwen2_5_vl" else 10
    assert rules.bounded(run, 10, 2) == run
    made = rules.bounded(run, 10, 2, least=2_000, most=50_000)
    assert (made.min_pixels, made.max_pixels) == (2_000 * scale, 50_000 * scale)
    made = rules.bounded(run, 10, 2, most=50_000, total=100_000)  # 20,000 for each frame
    assert made.max_pixels == 20_000 * scale
    assert made.min_pixels == min(run.min_pixels, 20_000 * scale)
    with pytest.raises(VideoFramesError, match="min_pixels 30,000 needs"):
        rules.bounded(run, 10, 2, least=30_000, total=100_000)
