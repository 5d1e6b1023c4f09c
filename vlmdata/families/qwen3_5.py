"""Qwen3.5 (dense and with experts): patches of 16 pixels, mean and deviation 0.5.

Sources: the published ``preprocessor_config.json`` of Qwen3.5, ``Qwen3_5Model.get_rope_index`` of transformers.
The checkpoints allow images of 65,536 to 16,777,216 pixels. The defaults here, 196 to 980 tokens per image, are those
of the CORD-V2 example that this project follows. For videos they are those of the published
``video_preprocessor_config.json`` and of ``Qwen3VLVideoProcessor``: up to 25,165,824 pixels over all frames.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlmdata.families import qwen
from vlmdata.families.base import Family
from vlmdata.families.qwen_vl_utils import QWEN_VL_UTILS, qwen_utils_video
from vlmdata.families.video import VideoRules, VideoSettings, at_least_one_patch


@dataclass(frozen=True)
class Qwen3Video(VideoRules):
    """The rules of ``Qwen3VLVideoProcessor``: evenly spaced frames, and one budget of pixels for all of them."""

    def frame_indices(self, total: int, rate: float, settings: VideoSettings, temporal: int) -> npt.NDArray[np.int64]:
        """See :meth:`VideoRules.frame_indices`."""
        count = settings.num_frames
        if count is None:
            count = int(total / rate * settings.fps)
            count = min(max(count, settings.min_frames), settings.max_frames, total)
        indices = np.linspace(0, total - 1, count).round().astype(np.int64)
        return at_least_one_patch(indices, temporal)

    def size(self, frames: int, height: int, width: int, settings: VideoSettings, family: Family) -> tuple[int, int]:
        """See :meth:`VideoRules.size`."""
        factor, most = family.factor, settings.max_pixels
        if settings.cap_pixels_per_frame:
            cap = settings.max_video_tokens * factor**2
            most = frames * max(min(cap, settings.max_pixels // frames), int(settings.min_pixels * 1.05))
        if height < factor or width < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        family.require_aspect_ratio(height, width)
        new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
        temporal = family.temporal_patch_size
        area = round(frames / temporal) * temporal * new_height * new_width
        if area > most:
            scale = math.sqrt((frames * height * width) / most)
            new_height = max(factor, math.floor(height / scale / factor) * factor)
            new_width = max(factor, math.floor(width / scale / factor) * factor)
        elif area < settings.min_pixels:
            scale = math.sqrt(settings.min_pixels / (frames * height * width))
            new_height = math.ceil(height * scale / factor) * factor
            new_width = math.ceil(width * scale / factor) * factor
        return new_height, new_width


FAMILY = Family(
    name="qwen3_5",
    model_types=("qwen3_5", "qwen3_5_moe"),
    chat=qwen.CHATML,
    items=qwen.ITEMS_WITH_TIMES,
    patch_size=16,
    merge_size=2,
    temporal_patch_size=2,
    image_mean=(0.5, 0.5, 0.5),
    image_std=(0.5, 0.5, 0.5),
    min_pixels=200_704,
    max_pixels=1_003_520,
    processors=("Qwen3VLProcessor",),  # Qwen3-VL shares it, and its images and positions are equal
    token_settings=qwen.TOKEN_SETTINGS,
    video=Qwen3Video(
        defaults=VideoSettings(
            fps=2.0,
            min_frames=4,
            max_frames=768,
            min_pixels=4096,
            max_pixels=25_165_824,
            max_video_tokens=768,
        ),
    ),
    other_video=((QWEN_VL_UTILS, qwen_utils_video(factor=32)),),
    grounding=qwen.GROUNDING_OF_1000,
)
