"""Samples a video file: a rule chooses frames from its contents, and these are decoded one after another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlmdata.media.video.container import VideoLimits, VideoSource
from vlmdata.media.video.contents import VideoContents, damaged, read_contents
from vlmdata.media.video.decode import DamagedFrameError, decode_frames

#: Takes frame n of those chosen: uint8 (H, W, 3).
type Put = Callable[[int, npt.NDArray[np.uint8]], None]


@dataclass(frozen=True, eq=False)
class SampledVideo:
    """Which frames of a file were sampled.

    Attributes:
        contents: The frames of the file; only those before the damage of a damaged file.
        indices: int64 (n,), what the rule chose: numbers of frames in a file with an even rate.
        numbers: int64 (n,), the frames of the file that are shown at the times of ``indices``; ascending.
    """

    contents: VideoContents
    indices: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.int64]

    @property
    def seconds(self) -> npt.NDArray[np.float64]:
        """When the frames are shown, in seconds after the first of the file: float64 (n,)."""
        return self.contents.seconds(self.numbers)


def sample_video(
    source: VideoSource,
    choose: Callable[[VideoContents], npt.NDArray[np.integer]],
    begin: Callable[[VideoContents, npt.NDArray[np.int64]], Put],
    limits: VideoLimits = VideoLimits(),
    what: str = "video",
    contents: VideoContents | None = None,
) -> SampledVideo:
    """Decodes the frames that a rule chooses.

    Args:
        source: The file.
        choose: Returns the indices (n,), ascending, as of a file with an even rate, for the contents of the file.
        begin: Is called with the contents and the indices, and returns what takes each frame, in order. If a damaged
            file is kept up to the damage, both are called again for what is left of it.
        limits: What is accepted.
        what: Name of the field for messages, such as ``videos[2]``.
        contents: The contents of the file, if they are known.

    Raises:
        MediaError: As for :func:`~vlmdata.media.video.contents.read_contents`; DAMAGED_VIDEO also if a chosen frame
            does not decode, unless ``keep_damaged``.
    """
    contents = contents or read_contents(source, limits, what)
    while True:
        indices = np.asarray(choose(contents)).astype(np.int64)
        numbers = contents.shown_at(indices)
        put = begin(contents, indices)
        places = np.searchsorted(numbers, np.unique(numbers), side="right").tolist()
        first = 0
        try:
            frames = decode_frames(source, contents, np.unique(numbers).tolist(), limits, what)
            for (_, pixels), stop in zip(frames, places, strict=True):
                for place in range(first, stop):  # a frame that is shown long is chosen several times
                    put(place, pixels)
                first = stop
        except DamagedFrameError as error:
            if error.number == 0 or not limits.keep_damaged:
                raise damaged(contents, error.number, error.message, what) from error
            contents = contents.up_to(error.number, error.message)
            continue
        return SampledVideo(contents, indices, numbers)
