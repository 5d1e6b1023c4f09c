"""What a family fixes about videos: which frames are sampled, their size, and the times that the model is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from vlmdata.families.base import Family


class VideoFramesError(ValueError):
    """A video cannot be sampled as requested."""


@dataclass(frozen=True)
class VideoSettings:
    """How a video is sampled and resized: arguments of transformers' video processors.

    Attributes:
        fps: Sampled frames per second, unless ``num_frames`` is given.
        num_frames: Sampled frames; None leaves it to ``fps``.
        min_frames: Fewest sampled frames, if the video has as many; used with ``fps``.
        max_frames: Most sampled frames; used with ``fps``.
        min_pixels: ``size["shortest_edge"]`` of the processor, in pixels.
        max_pixels: ``size["longest_edge"]`` of the processor, in pixels.
        cap_pixels_per_frame: The argument of that name.
        max_video_tokens: The argument of that name, used with ``cap_pixels_per_frame``.
        total_pixels: Of all temporal patches together, as qwen_vl_utils counts them; None is its default.
    """

    fps: float
    min_frames: int
    max_frames: int
    min_pixels: int
    max_pixels: int
    max_video_tokens: int
    cap_pixels_per_frame: bool = False
    num_frames: int | None = None
    total_pixels: int | None = None


@dataclass(frozen=True)
class VideoRules:
    """The rules of a family. A subclass has those of its processor.

    Attributes:
        defaults: The settings that a run begins with.
        bounds_each_frame: Whether the bounds of pixels are those of a frame, or of all frames together.
        tokens_per_second: Steps of the first axis of positions per second between temporal patches; 0 steps by one.
    """

    defaults: VideoSettings
    bounds_each_frame: bool = False
    tokens_per_second: int = 0

    def frame_indices(self, total: int, rate: float, settings: VideoSettings, temporal: int) -> npt.NDArray[np.int64]:
        """Returns the frames to sample, as ``sample_frames`` of the processor does.

        Args:
            total: Frames of the video, at least 1.
            rate: Frames of the video per second.
            settings: How to sample.
            temporal: Frames per patch.

        Returns:
            int64 (n,), ascending.

        Raises:
            VideoFramesError: If the processor refuses it.
        """
        raise NotImplementedError

    def size(self, frames: int, height: int, width: int, settings: VideoSettings, family: Family) -> tuple[int, int]:
        """Returns the (height, width) in pixels to which the frames are resized, as the processor's ``resize`` does.

        Args:
            frames: Number of sampled frames, before the last one is repeated.
            height: Height of a frame in pixels.
            width: Width of a frame in pixels.
            settings: The bounds.
            family: The family of the rules.

        Raises:
            AspectRatioError: If the aspect ratio is above the family's limit.
        """
        raise NotImplementedError

    def bounded(
        self,
        settings: VideoSettings,
        frames: int,
        temporal: int,
        least: int | None = None,
        most: int | None = None,
        total: int | None = None,
    ) -> VideoSettings:
        """Returns settings with the bounds that the data requests for a video, as the keys of qwen_vl_utils mean them.

        Args:
            settings: Those of the run.
            frames: Number of sampled frames.
            temporal: Frames per patch.
            least: ``min_pixels`` of the data: smallest area of a frame.
            most: ``max_pixels``: largest area of a frame, which replaces that of the run.
            total: ``total_pixels``: largest area of all temporal patches together.

        Raises:
            VideoFramesError: If the bounds contradict each other.
        """
        scale = 1 if self.bounds_each_frame else frames
        upper = settings.max_pixels if most is None else most * scale
        upper = upper if total is None else min(upper, total * temporal * scale // frames)
        lower = settings.min_pixels if least is None else least * scale
        if lower > upper:
            if least is not None:
                raise VideoFramesError(
                    f"min_pixels {least:,} needs {lower:,} pixels, and max_pixels and total_pixels allow {upper:,} for "
                    f"{frames} frames"
                )
            lower = upper
        return replace(settings, min_pixels=lower, max_pixels=upper)

    def temporal_step(self, seconds_per_patch: float, fractions: bool = False) -> float:
        """Returns the step of the first axis of positions from one temporal patch of a block to the next.

        Seconds are a float32, as in ``get_rope_index`` of the models.

        Args:
            seconds_per_patch: Seconds of video per temporal patch: ``second_per_grid_ts`` of the processor.
            fractions: Whether fractions of a second count, as in transformers from 5.24 on; whole seconds alone did
                before.

        Returns:
            An int if whole seconds count, else a value of float32.
        """
        if not self.tokens_per_second:
            return 1
        seconds = np.float32(seconds_per_patch)
        return float(self.tokens_per_second * seconds) if fractions else self.tokens_per_second * int(seconds)


def seconds_per_patch(sampled: int, total: int, rate: float, temporal: int) -> float:
    """Returns ``second_per_grid_ts`` of ``Qwen2_5_VLProcessor``.

    Args:
        sampled: Number of sampled frames.
        total: Frames of the video.
        rate: Frames of the video per second.
        temporal: Frames per patch.
    """
    return temporal / (sampled / total * rate)


def patch_seconds(indices: Sequence[float], rate: float, temporal: int) -> tuple[float, ...]:
    """Returns the time of each temporal patch in seconds: the mean of its first and last frame.

    Source: ``Qwen3VLProcessor._calculate_timestamps``.

    Args:
        indices: Sampled frames; the last is repeated if they do not fill the last patch.
        rate: Frames of the video per second.
        temporal: Frames per patch.
    """
    times = [index / rate for index in indices]
    times += times[-1:] * (-len(times) % temporal)
    return tuple((times[at] + times[at + temporal - 1]) / 2 for at in range(0, len(times), temporal))


def at_least_one_patch(indices: npt.NDArray[np.int64], temporal: int) -> npt.NDArray[np.int64]:
    """Repeats the only frame of a video, of which the processors refuse to make a patch."""
    return np.pad(indices, (0, max(temporal - len(indices), 0)), mode="edge")
