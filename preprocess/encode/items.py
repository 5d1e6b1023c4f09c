"""Encodes the images and videos of a conversation, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vlmdata.preprocess.config import PreprocessConfig
from vlmdata.preprocess.conversation import ImagePart, MediaPart, VideoPart
from vlmdata.preprocess.encode.image import encode_images, image_tokens
from vlmdata.preprocess.encode.sample import Views
from vlmdata.preprocess.encode.stored import StoredVideo
from vlmdata.preprocess.encode.video import VideoPlan, encode_video

Plans = Mapping[VideoPart, VideoPlan]


def encode_items(parts: Sequence[MediaPart], plans: Plans, config: PreprocessConfig) -> list[Views]:
    """Encodes images and videos. References to equal files of equal size and times share their pixels.

    Raises:
        RowRejected: If one of them cannot be used.
    """
    images = iter(encode_images([part for part in parts if isinstance(part, ImagePart)], config))
    videos: dict[tuple[object, ...], Views] = {}
    made = []
    for part in parts:
        if isinstance(part, ImagePart):
            made.append(next(images))
            continue
        if isinstance(part, StoredVideo):
            made.append((part.item,))
            continue
        plan = plans[part]
        same = part.data, plan.numbers, plan.size, plan.times, plan.patch_times, plan.seconds_per_patch
        if same not in videos:
            videos[same] = (encode_video(plan, config),)
        made.append(videos[same])
    return made


def item_tokens(parts: Sequence[MediaPart], plans: Plans, config: PreprocessConfig, more_than: int) -> int | None:
    """Returns the number of placeholders of images and videos, without decoding them.

    So a sample that is too long is rejected before.

    Args:
        parts: The images and videos.
        plans: Which frames of the videos are stored.
        config: The options.
        more_than: Only larger numbers are of interest.

    Returns:
        The number of tokens; None if it is not larger than ``more_than``, or not certain before decoding.
    """
    family = config.model_family
    videos = sum(plans[part].token_count(family) for part in parts if isinstance(part, VideoPart))
    images = [part for part in parts if isinstance(part, ImagePart)]
    of_images = image_tokens(images, config, more_than - videos)
    return None if of_images is None else of_images + videos
