"""How ``qwen_vl_utils`` samples and resizes videos, for models that are served with it instead of with transformers.

Sources: ``smart_nframes`` and ``fetch_video`` of qwen-vl-utils. They sample even numbers of frames, and bound each
frame: from 128 to 768 tokens, and less if all frames together would be over 90 % of 128,000.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vlmdata.families.video import VideoFramesError, VideoRules, VideoSettings, at_least_one_patch

if TYPE_CHECKING:
    from vlmdata.families.base import Family

#: Value of the option that chooses these rules.
QWEN_VL_UTILS = "qwen-vl-utils"
_LEAST_TOKENS, _MOST_TOKENS, _ALL_TOKENS = 128, 768, 128_000
_SHARE, _SLACK = 0.9, 1.05


@dataclass(frozen=True)
class QwenUtilsVideo(VideoRules):
    """The rules of ``qwen_vl_utils``: even numbers of frames, evenly spaced, and bounds for each frame."""

    bounds_each_frame: bool = True

    def frame_indices(self, total: int, rate: float, settings: VideoSettings, temporal: int) -> npt.NDArray[np.int64]:
        """See :meth:`VideoRules.frame_indices`. A video that is shorter than a patch becomes one patch."""
        if settings.num_frames is not None:
            count = round(settings.num_frames / temporal) * temporal
            if not temporal <= count <= total:
                raise VideoFramesError(
                    f"{count} frames are requested, and the video has {total}; request fewer frames (nframes), at "
                    f"least {temporal}, or by fps"
                )
        else:
            least = math.ceil(settings.min_frames / temporal) * temporal
            most = math.floor(min(settings.max_frames, total) / temporal) * temporal
            count = math.floor(min(max(total / rate * settings.fps, least), most) / temporal) * temporal
            if count < temporal <= total:
                raise VideoFramesError(f"at most {settings.max_frames} frames are allowed, and a patch has {temporal}")
        # torch.linspace and numpy.linspace differ in the last bit, which decides halves.
        import torch

        indices = torch.linspace(0, total - 1, max(count, 1)).round().long().numpy()
        return at_least_one_patch(indices, temporal)

    def bounded(
        self,
        settings: VideoSettings,
        frames: int,
        temporal: int,
        least: int | None = None,
        most: int | None = None,
        total: int | None = None,
    ) -> VideoSettings:
        """See :meth:`VideoRules.bounded`; :meth:`size` limits them by the number of frames."""
        lower = settings.min_pixels if least is None else least
        upper = settings.max_pixels if most is None else most
        return replace(settings, min_pixels=lower, max_pixels=upper, total_pixels=total or settings.total_pixels)

    def size(self, frames: int, height: int, width: int, settings: VideoSettings, family: Family) -> tuple[int, int]:
        """See :meth:`VideoRules.size`.

        Raises:
            VideoFramesError: If the data requests contradicting bounds.
        """
        token, temporal = family.factor**2, family.temporal_patch_size
        frames += -frames % temporal
        total = settings.total_pixels or settings.max_video_tokens * token * _SHARE
        most = max(min(_MOST_TOKENS * token, total / frames * temporal), int(settings.min_pixels * _SLACK))
        if settings.max_pixels != self.defaults.max_pixels:
            most = min(settings.max_pixels, most)
        if most < settings.min_pixels:
            raise VideoFramesError(
                f"min_pixels {settings.min_pixels:,} is more than the max_pixels {settings.max_pixels:,} of a frame"
            )
        return family.image_size(height, width, settings.min_pixels, most, least_side=family.factor)


def qwen_utils_video(factor: int, tokens_per_second: int = 0) -> QwenUtilsVideo:
    """Returns the rules for a family.

    Args:
        factor: Side of a token's square in pixels.
        tokens_per_second: See :class:`VideoRules`.
    """
    defaults = VideoSettings(
        fps=2.0,
        min_frames=4,
        max_frames=768,
        min_pixels=_LEAST_TOKENS * factor**2,
        max_pixels=_MOST_TOKENS * factor**2,
        max_video_tokens=_ALL_TOKENS,
    )
    return QwenUtilsVideo(defaults, tokens_per_second=tokens_per_second)
