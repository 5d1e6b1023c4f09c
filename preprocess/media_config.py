"""Options of images, videos and the files that rows name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any

from vlmdata.errors import UsageError
from vlmdata.families import DEFAULT_FAMILY, Family
from vlmdata.families import REGISTRY as FAMILIES
from vlmdata.families.base import ImageBoundsError
from vlmdata.families.chat import VIDEO
from vlmdata.families.qwen_vl_utils import QWEN_VL_UTILS
from vlmdata.families.video import VideoRules, VideoSettings
from vlmdata.media.codecs import RAW, ZSTD, ItemCodec
from vlmdata.media.codecs import REGISTRY as CODECS
from vlmdata.options import OptionHelp

if TYPE_CHECKING:
    from vlmdata.media.video.container import VideoLimits

#: Options under the headings of the help page.
data_option = partial(OptionHelp, panel="Data")
image_option = partial(OptionHelp, panel="Images")
video_option = partial(OptionHelp, panel="Videos")


def _familys(name: str, part: str | None = None) -> str:
    """Describes a default that is the family's, by its value in the default family."""
    family = FAMILIES.find(DEFAULT_FAMILY)
    value = getattr(family if part is None else getattr(family, part).defaults, name)
    return f"the family's, {value:,.0f} for {DEFAULT_FAMILY}"


@dataclass(frozen=True)
class ImageConfig:
    """Geometry and limits of images. ``min_pixels`` and ``max_pixels`` of None are the family's defaults."""

    min_pixels: Annotated[
        int | None,
        image_option("Enlarge images with fewer pixels to this.", shown_default=_familys("min_pixels")),
    ] = None
    max_pixels: Annotated[
        int | None,
        image_option("Reduce images with more pixels to this.", shown_default=_familys("max_pixels")),
    ] = None
    #: From this size, Pillow warns of decompression bombs.
    max_source_pixels: Annotated[int, image_option("Reject image files with more pixels before decoding.")] = 89_478_485

    def __post_init__(self) -> None:
        if self.max_source_pixels < 1:
            raise ValueError(f"max_source_pixels is {self.max_source_pixels}; it must be positive")

    def bounds(self, family: Family) -> tuple[int, int]:
        """Returns the smallest and largest area of a resized image, in pixels.

        Raises:
            UsageError: If they contradict each other or the family.
        """
        least = family.min_pixels if self.min_pixels is None else self.min_pixels
        most = family.max_pixels if self.max_pixels is None else self.max_pixels
        default = f" (the default of family {family.name})"
        if least < family.smallest_image:
            raise UsageError(
                f"min_pixels is {least}{default if self.min_pixels is None else ''}; it must be at least "
                f"{family.smallest_image}, the smallest image of family {family.name}"
            )
        if most < least:
            raise UsageError(
                f"max_pixels is {most}{default if self.max_pixels is None else ''}, less than min_pixels {least}"
                f"{default if self.min_pixels is None else ''}. Set both."
            )
        try:
            family.require_bounds(least, most)
        except ImageBoundsError as error:
            raise UsageError(str(error)) from error
        return least, most


class DamagedVideos(StrEnum):
    """Handling of video files that are incomplete or damaged."""

    REJECT = "reject"
    KEEP = "keep"


class VideoSampler(StrEnum):
    """Whose rules choose the frames of videos and their size."""

    TRANSFORMERS = "transformers"
    QWEN_VL_UTILS = QWEN_VL_UTILS


class VideoLayout(StrEnum):
    """Whose text stands around the times and placeholders of a video."""

    TRANSFORMERS = "transformers"
    VLLM = "vllm"


class VideoPositions(StrEnum):
    """What counts of the seconds by which positions of videos are spaced."""

    WHOLE_SECONDS = "whole-seconds"
    FRACTIONS = "fractions"


@dataclass(frozen=True)
class VideoConfig:
    """Sampling and geometry of videos. None are the family's defaults, those of transformers' video processors."""

    fps: Annotated[
        float | None,
        video_option("Frames to sample per second.", name="video_fps", shown_default=_familys("fps", "video")),
    ] = None
    min_frames: Annotated[
        int | None,
        video_option(
            "Sample at least so many frames, if the video has them.",
            name="video_min_frames",
            shown_default=_familys("min_frames", "video"),
        ),
    ] = None
    max_frames: Annotated[
        int | None,
        video_option(
            "Sample at most so many frames.", name="video_max_frames", shown_default=_familys("max_frames", "video")
        ),
    ] = None
    min_pixels: Annotated[
        int | None,
        video_option(
            "Enlarge the frames of videos with fewer pixels, of all frames together (of each in qwen2_5_vl), to this.",
            name="video_min_pixels",
            shown_default=_familys("min_pixels", "video"),
        ),
    ] = None
    max_pixels: Annotated[
        int | None,
        video_option(
            "Reduce the frames of videos with more pixels, counted likewise, to this.",
            name="video_max_pixels",
            shown_default=_familys("max_pixels", "video"),
        ),
    ] = None
    pixels: Annotated[
        str | None,
        video_option(
            "How shards store videos, as for `--pixels`.",
            name="video_pixels",
            shown_default="that of --pixels; zstd for raw and source",
        ),
    ] = None
    cap_pixels_per_frame: Annotated[
        bool, video_option("Limit the pixels of each frame too, as processors with that setting do.")
    ] = False
    sampler: Annotated[
        VideoSampler,
        video_option(
            "Whose rules choose frames and sizes: those of transformers, or of qwen-vl-utils (even numbers of frames, "
            "and bounds for each frame). Give the one that serves the model.",
            name="video_sampler",
        ),
    ] = VideoSampler.TRANSFORMERS
    layout: Annotated[
        VideoLayout,
        video_option(
            "Text around the times of a video: as in transformers, with vision marks around all of it, or as in vllm, "
            "without them.",
            name="video_layout",
        ),
    ] = VideoLayout.TRANSFORMERS
    positions: Annotated[
        VideoPositions | None,
        video_option(
            "Seconds between the positions of videos, in qwen2_5_vl: whole seconds alone, or fractions too.",
            name="video_positions",
            shown_default="that of the installed transformers",
        ),
    ] = None
    damaged: Annotated[
        DamagedVideos,
        video_option(
            "Video files that are incomplete or damaged: reject, or keep the frames before the damage.",
            name="damaged_videos",
        ),
    ] = DamagedVideos.REJECT

    def __post_init__(self) -> None:
        for name in ("fps", "min_frames", "max_frames", "min_pixels", "max_pixels"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"video_{name} is {value}; it must be positive")

    def rules(self, family: Family) -> VideoRules:
        """Returns the rules by which the videos of a family are sampled and resized.

        Raises:
            UsageError: If the family does not have them.
        """
        rules = (
            family.video if self.sampler is VideoSampler.TRANSFORMERS else dict(family.other_video).get(self.sampler)
        )
        if rules is None:
            raise UsageError(f"--video-sampler {self.sampler} is not for the family {family.name}; drop the option")
        return rules

    def settings(self, family: Family) -> VideoSettings:
        """Returns the settings of the run, with the family's defaults filled in.

        Raises:
            UsageError: If they contradict each other, or have no effect in the family.
        """
        rules = self.rules(family)
        defaults = rules.defaults
        if self.sampler is not VideoSampler.TRANSFORMERS and self.cap_pixels_per_frame:
            raise UsageError(f"--cap-pixels-per-frame has no effect with --video-sampler {self.sampler}; drop it")
        if self.layout is VideoLayout.VLLM and not family.expansion(VIDEO).caption:
            raise UsageError(
                f"--video-layout {self.layout} has no effect: the family {family.name} tells no times; drop it"
            )
        if self.positions is not None and not rules.tokens_per_second:
            raise UsageError(f"--video-positions {self.positions} has no effect in the family {family.name}; drop it")
        names = ("fps", "min_frames", "max_frames", "min_pixels", "max_pixels")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        made = dataclasses.replace(defaults, cap_pixels_per_frame=self.cap_pixels_per_frame, **given)
        for name in ("frames", "pixels"):
            least, most = getattr(made, f"min_{name}"), getattr(made, f"max_{name}")
            if least > most:
                raise UsageError(f"video_min_{name} is {least}, more than video_max_{name} {most}. Set both.")
        return made

    def counts_fractions(self, family: Family) -> bool:
        """Whether the positions of a family's videos count fractions of a second.

        Raises:
            UsageError: If that is left to the installed transformers, which cannot be asked.
        """
        if family.video is None or not family.video.tokens_per_second:
            return False
        return (self.positions or positions_of_transformers()) is VideoPositions.FRACTIONS

    def codec(self, images: ItemCodec) -> ItemCodec:
        """Returns what stores the videos of a run.

        Args:
            images: What stores its images.
        """
        return CODECS.find(self.pixels or video_codec_beside(images), "--video-pixels")

    def to_json(self, family: Family, images: ItemCodec) -> dict[str, Any] | None:
        """Returns the options as JSON, with the family's defaults filled in; None if the family has no videos.

        Args:
            family: The family.
            images: What stores the images of the run.

        Raises:
            UsageError: If they contradict each other, or the family has no videos and one is given.
        """
        if family.video is None:
            given = [name for name, value in vars(self).items() if value != getattr(VideoConfig(), name)]
            if given:
                raise UsageError(
                    f"the option for videos `{given[0]}` has no effect: vlmdata has no videos in the family "
                    f"{family.name}; drop it"
                )
            return None
        made = dataclasses.asdict(self.settings(family)) | {"pixels": self.codec(images).name}
        positions = VideoPositions.FRACTIONS if self.counts_fractions(family) else VideoPositions.WHOLE_SECONDS
        options = {name: made.get(name, given) for name, given in dataclasses.asdict(self).items()}
        options["positions"] = positions
        return {name: value for name, value in options.items() if name not in _LATER or value != _LATER[name]}

    def limits(self, max_source_pixels: int) -> VideoLimits:
        """Returns what is accepted of video files."""
        from vlmdata.media.video.container import (
            VideoLimits,  # slow to import: the help of the command needs this module
        )

        return VideoLimits(max_source_pixels, self.damaged is DamagedVideos.KEEP)


#: Options of videos that earlier versions did not have, with their defaults, which are not recorded.
_LATER: Mapping[str, Any] = {
    "sampler": VideoSampler.TRANSFORMERS,
    "layout": VideoLayout.TRANSFORMERS,
    "positions": VideoPositions.WHOLE_SECONDS,
}


@cache
def positions_of_transformers() -> VideoPositions:
    """Returns what counts in the installed transformers: the positions of two patches of half a second tell it.

    Raises:
        UsageError: If its model is another one than vlmdata knows.
    """
    try:
        import torch
        from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

        model: Any = Qwen2_5_VLModel.__new__(Qwen2_5_VLModel)
        torch.nn.Module.__init__(model)
        model.config = Qwen2_5_VLConfig(vision_config={"tokens_per_second": 2, "spatial_merge_size": 2})
        ids, grid = torch.tensor([[1, 2, 2]]), torch.tensor([[2, 2, 2]])
        kinds, seconds = torch.tensor([[0, 2, 2]]), torch.tensor([0.5])
        first, second = model.get_rope_index(ids, kinds, None, grid, second_per_grid_ts=seconds)[0][0, 0, 1:].tolist()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UsageError(
            f"the installed transformers does not tell how it spaces the positions of videos ({error}); give "
            "--video-positions"
        ) from error
    return VideoPositions.FRACTIONS if second > first else VideoPositions.WHOLE_SECONDS


def video_codec_beside(images: ItemCodec) -> str:
    """Returns the name of the codec that stores videos if none is given: that of images, if it makes them smaller.

    Raw frames take 20 to 100 times the space of their file, and ``source`` has no videos (docs/decisions/0090).
    """
    return ZSTD if images.name == RAW or images.needs_file else images.name


@dataclass(frozen=True)
class MediaConfig:
    """Access to image files that rows name."""

    image_root: Annotated[
        str | None,
        data_option(
            "Folder or URL (s3://…) that image paths in the data are relative to and may not leave. Default: the "
            "source's folder."
        ),
    ] = None
    allow_urls: Annotated[bool, data_option("Download http(s) images named in the data.")] = False
    private_hosts: Annotated[
        tuple[str, ...],
        data_option(
            "With --allow-urls: a host in a private network, or on this machine, that may be asked; `host` or "
            "`host:port`. Repeatable.",
            name="allow_private_host",
            metavar="HOST",
            shown_default=False,
        ),
    ] = ()

    def __post_init__(self) -> None:
        for host in self.private_hosts:
            if not host or "/" in host or "@" in host:
                raise ValueError(
                    f"--allow-private-host {host!r} is no host; write it as images.example or 10.0.0.7:8000"
                )
