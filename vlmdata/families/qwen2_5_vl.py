"""Qwen2.5-VL: patches of 14 pixels, CLIP's mean and deviation.

Sources: the published ``preprocessor_config.json`` of Qwen2.5-VL, ``Qwen2_5_VLModel.get_rope_index`` of transformers.
The checkpoints allow images of 3,136 to 12,845,056 pixels. The defaults here, 256 to 1,280 tokens per image, are those
in the model card's example. For images its positions equal Qwen3-VL's. For videos they differ: it spaces frames by
time, by the published config's ``tokens_per_second``. The defaults for videos are those of ``Qwen2VLVideoProcessor``,
with the 2 frames per second of qwen-vl-utils: the processor itself samples none.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlmdata.families import qwen
from vlmdata.families.base import Family
from vlmdata.families.qwen_vl_utils import QWEN_VL_UTILS, qwen_utils_video
from vlmdata.families.video import VideoFramesError, VideoRules, VideoSettings, at_least_one_patch


@dataclass(frozen=True)
class Qwen2Video(VideoRules):
    """The rules of ``Qwen2VLVideoProcessor``: whole patches of frames, and bounds for each frame."""

    def frame_indices(self, total: int, rate: float, settings: VideoSettings, temporal: int) -> npt.NDArray[np.int64]:
        """See :meth:`VideoRules.frame_indices`."""
        import torch

        if settings.num_frames is not None:
            count: float = round(settings.num_frames / temporal) * temporal
        else:
            most = math.floor(min(settings.max_frames, total) / temporal) * temporal
            count = min(max(total / rate * settings.fps, settings.min_frames), most, total)
            count = math.floor(count / temporal) * temporal
        if count > total:
            raise VideoFramesError(
                f"{count} frames are requested, and the video has {total}; request fewer frames (nframes), or by fps"
            )
        # A video that is shorter than a patch: the processor divides by zero.
        indices = torch.arange(0, total, total / count).int().numpy() if count else np.zeros(1)
        return at_least_one_patch(indices.astype(np.int64), temporal)

    def size(self, frames: int, height: int, width: int, settings: VideoSettings, family: Family) -> tuple[int, int]:
        """See :meth:`VideoRules.size`."""
        factor, most = family.factor, settings.max_pixels
        if settings.cap_pixels_per_frame:
            total = int(settings.max_video_tokens * factor**2 * 0.9)
            most = max(min(most, total * family.temporal_patch_size // frames), int(settings.min_pixels * 1.05))
        return family.image_size(height, width, settings.min_pixels, most)


FAMILY = Family(
    name="qwen2_5_vl",
    model_types=("qwen2_5_vl",),
    chat=qwen.CHATML,
    items=qwen.ITEMS,
    patch_size=14,
    merge_size=2,
    temporal_patch_size=2,
    image_mean=(0.48145466, 0.4578275, 0.40821073),
    image_std=(0.26862954, 0.26130258, 0.27577711),
    min_pixels=200_704,
    max_pixels=1_003_520,
    processors=("Qwen2_5_VLProcessor",),
    token_settings=qwen.TOKEN_SETTINGS,
    video=Qwen2Video(
        defaults=VideoSettings(
            fps=2.0,
            min_frames=4,
            max_frames=768,
            min_pixels=100_352,
            max_pixels=602_112,
            max_video_tokens=128_000,
        ),
        bounds_each_frame=True,
        tokens_per_second=2,
    ),
    other_video=((QWEN_VL_UTILS, qwen_utils_video(factor=28, tokens_per_second=2)),),
    grounding=qwen.GROUNDING,
)
