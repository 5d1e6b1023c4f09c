"""Encodes videos to stored patches: first which frames, so that the text can tell their times, then their pixels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from vlmdata.families import Family
from vlmdata.families.base import AspectRatioError
from vlmdata.families.chat import VIDEO
from vlmdata.families.video import (
    VideoFramesError,
    VideoRules,
    VideoSettings,
    at_least_one_patch,
    patch_seconds,
    seconds_per_patch,
)
from vlmdata.media.decode import decode_image
from vlmdata.media.error import MediaError
from vlmdata.media.video import VideoContents, read_contents, sample_video
from vlmdata.media.video.contents import on_display
from vlmdata.media.video.patches import VideoPatches
from vlmdata.media.video.sample import Put
from vlmdata.preprocess.config import PreprocessConfig
from vlmdata.preprocess.conversation import Conversation, VideoPart
from vlmdata.preprocess.encode.sample import SampleItem
from vlmdata.preprocess.encode.stored import StoredVideo
from vlmdata.preprocess.reject import RowRejected
from vlmdata.reasons import Reason
from vlmdata.wording import counted


@dataclass(frozen=True, eq=False)
class VideoPlan:
    """What is stored of a video.

    Attributes:
        part: The video.
        size: (height, width) of the resized frames in pixels.
        indices: The frames that the family's rule samples.
        numbers: The frames of the file that are shown then.
        times: When each is shown in the file, in seconds after its first.
        patch_times: When each temporal patch is shown, as the model is told.
        seconds_per_patch: ``second_per_grid_ts`` of the processor.
        origin: Data of the file and its sampling, for the metadata.
        contents: The frames of the file; None if the data has the frames themselves.
        made: The patches, if they had to be made to know the frames.
    """

    part: VideoPart
    size: tuple[int, int]
    indices: tuple[int, ...]
    numbers: tuple[int, ...]
    times: tuple[float, ...]
    patch_times: tuple[float, ...]
    seconds_per_patch: float
    origin: Mapping[str, Any]
    contents: VideoContents | None
    made: VideoPatches | None = field(default=None, repr=False)

    def token_count(self, family: Family) -> int:
        """Returns the number of tokens."""
        height, width = self.size
        grid = len(self.patch_times), height // family.patch_size, width // family.patch_size
        return int(family.item_tokens(VIDEO, [grid])[0])


def planned(conversation: Conversation, config: PreprocessConfig) -> tuple[Conversation, Mapping[VideoPart, VideoPlan]]:
    """Chooses the frames of the videos of a conversation.

    Returns:
        The conversation, whose videos have their times if the family tells them, and the plan of each video.

    Raises:
        RowRejected: If a video cannot be used.
    """
    if not any(isinstance(part, VideoPart) for part in conversation.media):
        return conversation, {}
    plans: dict[VideoPart, VideoPlan] = {}

    def known(part: Any) -> Any:
        if not isinstance(part, VideoPart):
            return part
        plan = _plan_of_stored(part) if isinstance(part, StoredVideo) else plan_video(part, config)
        told = config.model_family.expansion(VIDEO).caption != ""
        part = dataclasses.replace(part, seconds=plan.patch_times if told else ())
        plans[part] = plan
        return part

    messages = [dataclasses.replace(each, parts=tuple(map(known, each.parts))) for each in conversation.messages]
    return dataclasses.replace(conversation, messages=tuple(messages)), plans


def plan_video(part: VideoPart, config: PreprocessConfig) -> VideoPlan:
    """Chooses the frames of a video, from its packets alone; a file that is kept if it is damaged is decoded.

    Raises:
        RowRejected: If the video cannot be used.
    """
    family = config.model_family
    if family.video is None:
        raise RowRejected(
            Reason.UNSUPPORTED_CONTENT,
            f"{part.field} is a video, and vlmdata has no videos in the family {family.name}. Drop the row, or give "
            "frames of the video as images",
        )
    with _rejecting(part):
        if not isinstance(part.data, bytes):
            return _plan_of_frames(part, part.data, config)
        limits = config.video.limits(config.image.max_source_pixels)
        plan = _plan_of_file(part, read_contents(part.data, limits, part.field), config)
        return _decoded(plan, config) if limits.keep_damaged else plan


def _plan_of_stored(part: StoredVideo) -> VideoPlan:
    """Returns the plan of a video of which a dataset has the frames, as the metadata of its sample tells it."""
    told = part.item.origin
    patch_times, seconds = tuple(told["patch_seconds"]), float(told["seconds_per_patch"])
    numbers, times = tuple(told["frames"]), tuple(told["seconds"])
    return VideoPlan(part, part.item.size, (), numbers, times, patch_times, seconds, told, None)


def encode_video(plan: VideoPlan, config: PreprocessConfig) -> SampleItem:
    """Decodes and resizes the frames of a plan.

    Raises:
        RowRejected: If a frame does not decode.
    """
    with _rejecting(plan.part):
        made = plan if plan.made is not None else _decoded(plan, config)
    assert made.made is not None
    patches, family = made.made, config.model_family
    assert family.video is not None
    data = plan.part.data
    return SampleItem(
        patches.rows,
        patches.shape.grid,
        plan.size,
        plan.token_count(family),
        plan.origin,
        data if isinstance(data, bytes) else b"".join(data),
        kind=VIDEO,
        copies=patches.shape.copies,
        step=family.video.temporal_step(plan.seconds_per_patch, config.video.counts_fractions(family)),
    )


def _decoded(plan: VideoPlan, config: PreprocessConfig) -> VideoPlan:
    """Returns the plan with its patches; if the file is kept up to damage, that of the frames before."""
    family, part = config.model_family, plan.part
    if plan.contents is None:
        patches = VideoPatches(len(plan.numbers), plan.size, family)
        for place, number in enumerate(plan.numbers):
            patches.put(place, _picture(part, number, plan.origin, config))
        return dataclasses.replace(plan, made=patches)
    assert isinstance(part.data, bytes)
    made = [plan]

    def choose(contents: VideoContents) -> npt.NDArray[np.int64]:
        made[0] = plan if contents is plan.contents else _plan_of_file(part, contents, config)
        return np.array(made[0].indices)

    def begin(contents: VideoContents, indices: npt.NDArray[np.int64]) -> Put:
        patches = VideoPatches(len(indices), made[0].size, family)
        made[0] = dataclasses.replace(made[0], made=patches)
        return patches.put

    limits = config.video.limits(config.image.max_source_pixels)
    sample_video(part.data, choose, begin, limits, part.field, plan.contents)
    return made[0]


def _plan_of_file(part: VideoPart, contents: VideoContents, config: PreprocessConfig) -> VideoPlan:
    family, rules = config.model_family, _rules(config)
    first, last = _window(part, contents)
    settings = _settings(part, config)
    temporal, rate, total = family.temporal_patch_size, float(contents.rate), last - first + 1
    sampled = first + rules.frame_indices(total, rate, settings, temporal)
    indices, numbers = sampled.tolist(), contents.shown_at(sampled)
    origin = {
        "kind": VIDEO,
        "format": contents.container,
        "codec": contents.codec,
        "width": contents.file_size[1],
        "height": contents.file_size[0],
        **contents.colour,
        "file_frames": len(contents),
        "rate": rate,
    }
    if contents.declared_frames not in (0, len(contents)):
        origin["declared_frames"] = contents.declared_frames
    if contents.leading:
        origin["leading_frames"] = len(contents.leading)
    if contents.damage:
        origin["damage"] = contents.damage
    times = tuple(round(time, 6) for time in contents.seconds(numbers).tolist())
    told, size = patch_seconds(indices, rate, temporal), contents.size
    return _plan(part, size, indices, numbers.tolist(), times, told, total, rate, settings, origin, contents, config)


def _plan_of_frames(part: VideoPart, files: tuple[bytes, ...], config: PreprocessConfig) -> VideoPlan:
    """Makes the plan of a video that the data has as frames."""
    decoded = decode_image(files[0], config.image.max_source_pixels, f"{part.field}[0]")
    size, temporal = decoded.memory.shape[:2], config.model_family.temporal_patch_size
    settings = _settings(part, config)
    if part.timestamps is not None:
        numbers, total, rate = _of_timestamps(part, part.timestamps, settings, config)
        seconds = [part.timestamps[number] for number in numbers]
        told = patch_seconds(seconds, 1.0, temporal)
    else:
        assert part.rate is not None
        rate, total = part.rate, len(files)
        numbers = at_least_one_patch(np.arange(total), temporal).tolist()
        seconds = [number / rate for number in numbers]
        told = patch_seconds(numbers, rate, temporal)
    origin = {"kind": VIDEO, "format": "frames", "width": size[1], "height": size[0], "rate": rate}
    origin["file_frames"] = len(files)
    times = tuple(round(time, 6) for time in seconds)
    return _plan(part, size, numbers, numbers, times, told, total, rate, settings, origin, None, config)


def _of_timestamps(
    part: VideoPart, timestamps: tuple[float, ...], settings: VideoSettings, config: PreprocessConfig
) -> tuple[list[int], int, float]:
    """Chooses frames of a list by the times at which they are shown.

    All frames of the requested part are used, unless the data asks for a rate or a number of frames. Then the family's
    rule samples a video of as many frames at their mean rate, and the frames on display at its times are used, as of
    files.

    Returns:
        The chosen frames, the number of frames in the part, and their mean rate.

    Raises:
        VideoFramesError: If no frame lies in the part.
    """
    shown = np.array(timestamps)
    within = np.flatnonzero((shown >= (part.start or 0)) & (shown <= (math.inf if part.end is None else part.end)))
    if not len(within):
        raise _nothing_within(part, f"its frames are shown from {shown[0]:g} to {shown[-1]:g} s")
    since, total, temporal = shown[within] - shown[within[0]], len(within), config.model_family.temporal_patch_size
    rate = float((total - 1) / since[-1]) if total > 1 else settings.fps  # one frame has no rate
    indices = at_least_one_patch(np.arange(total), temporal)
    if any(asked is not None for asked in (part.fps, part.num_frames, part.min_frames, part.max_frames)):
        indices = _rules(config).frame_indices(total, rate, settings, temporal)
        ticks = np.rint(since / _unit(timestamps)).astype(np.int64)
        indices = on_display(ticks, Fraction(total - 1, max(int(ticks[-1]), 1)), indices)
    return within[indices].tolist(), total, rate


def _unit(timestamps: Iterable[float]) -> float:
    """Returns the unit in seconds to which times are rounded, by their decimals: a microsecond or more."""
    decimals = (-int(Decimal(repr(time)).as_tuple().exponent) for time in timestamps)
    return 10.0 ** -min(max(0, *decimals), 6)


def _plan(
    part: VideoPart,
    file_size: tuple[int, int],
    indices: list[int],
    numbers: list[int],
    times: tuple[float, ...],
    patch_times: tuple[float, ...],
    total: int,
    rate: float,
    settings: VideoSettings,
    origin: dict[str, Any],
    contents: VideoContents | None,
    config: PreprocessConfig,
) -> VideoPlan:
    family, rules, count = config.model_family, _rules(config), len(indices)
    temporal = family.temporal_patch_size
    bounded = rules.bounded(settings, count, temporal, part.min_pixels, part.max_pixels, part.total_pixels)
    try:
        size = rules.size(count, *file_size, bounded, family)
    except AspectRatioError as error:
        if error.size == file_size:
            raise
        enlarged = f"frames of {file_size[1]}x{file_size[0]} pixels, enlarged to {error}"
        raise RowRejected(Reason.ASPECT_RATIO, f"{part.field}: {enlarged}") from error
    seconds = seconds_per_patch(count, total, rate, temporal)
    told = {"patch_seconds": list(patch_times), "seconds_per_patch": seconds}
    origin |= {"frames": numbers, "seconds": list(times), **told}
    return VideoPlan(part, size, tuple(indices), tuple(numbers), times, patch_times, seconds, origin, contents)


def _settings(part: VideoPart, config: PreprocessConfig) -> VideoSettings:
    """Returns the settings of the run with what the data requests instead."""
    given = {name: getattr(part, name) for name in ("fps", "num_frames", "min_frames", "max_frames")}
    given = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(config.video.settings(config.model_family), **given)


def _rules(config: PreprocessConfig) -> VideoRules:
    return config.video.rules(config.model_family)  # plan_video refuses families without videos


def _window(part: VideoPart, contents: VideoContents) -> tuple[int, int]:
    """Returns the first and the last index of the part to sample, as qwen_vl_utils does."""
    last, rate = len(contents) - 1, float(contents.rate)
    first = 0 if part.start is None else math.ceil(part.start * rate)
    stop = last if part.end is None else min(math.floor(part.end * rate), last)
    if first > stop:
        raise _nothing_within(part, f"the video has {counted(last + 1, 'frame')} in {(last + 1) / rate:.2f} s")
    return first, stop


def _nothing_within(part: VideoPart, found: str) -> VideoFramesError:
    end = "the end" if part.end is None else f"{part.end:g} s"
    return VideoFramesError(f"no frame from video_start {part.start or 0:g} s to video_end {end}; {found}")


def _picture(
    part: VideoPart, number: int, origin: Mapping[str, Any], config: PreprocessConfig
) -> npt.NDArray[np.uint8]:
    """Decodes a frame that the data has as an image file."""
    data, what = part.data[number], f"{part.field}[{number}]"
    assert isinstance(data, bytes)
    pixels = decode_image(data, config.image.max_source_pixels, what).pixels
    if pixels.shape[:2] != (origin["height"], origin["width"]):
        raise MediaError(
            Reason.UNSUPPORTED_VIDEO,
            f"{what}: {pixels.shape[1]}x{pixels.shape[0]} pixels, but the first frame has {origin['width']}x"
            f"{origin['height']}; all frames of a video must have one size",
        )
    return np.ascontiguousarray(pixels)


@contextmanager
def _rejecting(part: VideoPart) -> Iterator[None]:
    """Turns errors of media and families into rejections of the row."""
    try:
        yield
    except MediaError as error:
        raise RowRejected(error.reason, error.message) from error
    except AspectRatioError as error:
        raise RowRejected(Reason.ASPECT_RATIO, f"{part.field}: {error}") from error
    except VideoFramesError as error:
        raise RowRejected(Reason.VIDEO_FRAMES, f"{part.field}: {error}") from error
