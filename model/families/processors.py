"""The files of transformers' processors: what they call themselves, and where they keep their bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlmdata.families import Family

#: Pillow's numbers of the filters.
_FILTERS = {"bilinear": 2, "bicubic": 3}


@dataclass(frozen=True)
class ProcessorFiles:
    """The files of a processor whose ``size`` bounds the area of an image, and that of all frames of a video.

    Attributes:
        processor: Its class.
        images: The class of its image processor.
        videos: The class of its video processor.
    """

    processor: str
    images: str
    videos: str

    def image_file(self, family: Family, constants: Mapping[str, Any], bounds: tuple[int, int]) -> dict[str, Any]:
        """Returns the content of ``preprocessor_config.json``.

        Args:
            family: The family of the data.
            constants: Mean, deviation and patch sizes.
            bounds: Smallest and largest area of an image, in pixels.
        """
        own = {"do_convert_rgb": True, "resample": _FILTERS[family.resample]}
        kind = {"processor_class": self.processor, "image_processor_type": self.images}
        size = {"shortest_edge": bounds[0], "longest_edge": bounds[1]}
        return {**kind, "size": size, **own, **constants}

    def video_file(self, constants: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the content of ``video_preprocessor_config.json``.

        Args:
            constants: Mean, deviation and patch sizes.
            made: How videos are sampled and resized: fields of :class:`vlmdata.families.video.VideoSettings`.
        """
        kind = {"processor_class": self.processor, "video_processor_type": self.videos}
        settings = {name: made[name] for name in ("fps", "min_frames", "max_frames")}
        settings["size"] = {"shortest_edge": made["min_pixels"], "longest_edge": made["max_pixels"]}
        if made["cap_pixels_per_frame"]:
            settings["cap_pixels_per_frame"] = True
        return {**kind, **settings, **constants}

    def image_bounds(self, content: Mapping[str, Any]) -> tuple[int, int]:
        """Reads the bounds of a file with the settings of images.

        Raises:
            KeyError, TypeError, ValueError: If it has none.
        """
        size = content["size"]
        return int(size["shortest_edge"]), int(size["longest_edge"])


#: Of Qwen3-VL, which Qwen3.5 shares.
QWEN3_VL = ProcessorFiles("Qwen3VLProcessor", "Qwen2VLImageProcessorFast", "Qwen3VLVideoProcessor")
