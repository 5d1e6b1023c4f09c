"""Compares how a dataset samples and sizes videos with the processor that a model is served with."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from vlmdata.families.chat import VIDEO
from vlmdata.format.manifest import Manifest
from vlmdata.format.schema import KIND_FEATURES
from vlmdata.integrations.processors import read_processor

_SETTINGS = ("fps", "min_frames", "max_frames", "min_pixels", "max_pixels", "cap_pixels_per_frame")
_BY_TRANSFORMERS = "transformers"


def video_notes(datasets: Sequence[tuple[str, Manifest]], model: str | None = None) -> list[str]:
    """Tells what differs in videos between datasets, and between them and the processor of a model.

    Args:
        datasets: Names and manifests. Those without videos do not count.
        model: Folder or hub id. None, or one without a video processor that can be read, is not compared.

    Returns:
        A line for each dataset that differs.
    """
    with_videos = [(name, manifest) for name, manifest in datasets if has_videos(manifest)]
    notes = []
    for (name, one), (other, two) in pairwise(with_videos):
        different = list(_different(_of_servers(one), _of_servers(two)))
        if different:
            notes.append(
                f"videos: {_listed(name, different, 1)}, and {_listed(other, different, 2)}; a model is served with "
                "one of them. Preprocess both alike"
            )
    processor = read_processor("AutoVideoProcessor", model) if model is not None and with_videos else None
    if processor is not None:
        notes += [note for name, each in with_videos for note in processor_notes(name, each, processor, str(model))]
    return notes


def processor_notes(name: str, manifest: Manifest, processor: Any, model: str = "the model") -> list[str]:
    """Tells what differs between a dataset and a video processor of transformers.

    Args:
        name: The dataset, for messages.
        manifest: Its manifest.
        processor: The video processor, or a processor that has one.
        model: Whose processor it is, for messages.

    Returns:
        A line if something differs; none if the dataset has no videos, or the frames of qwen-vl-utils, which a
        processor takes as they are.
    """
    made = manifest.video_options
    if not has_videos(manifest) or not made or "sampler" in made:
        return []
    different = list(_different(made, served(getattr(processor, "video_processor", processor))))
    if not different:
        return []
    return [
        f"videos: {_listed(name, different, 1)}, and {_listed(f'the processor of {model}', different, 2)}. Preprocess "
        "with the options of the processor, or serve the model with those of the dataset"
    ]


def served(processor: Any) -> dict[str, Any]:
    """Returns the settings of a video processor of transformers, by the names of a dataset's options.

    A setting that it does not have, or leaves to the caller, is None.
    """
    size = getattr(processor, "size", None) or {}
    return {
        **{name: getattr(processor, name, None) for name in ("fps", "min_frames", "max_frames")},
        "min_pixels": size.get("shortest_edge"),
        "max_pixels": size.get("longest_edge"),
        "cap_pixels_per_frame": _caps_each_frame(processor),
    }


def _caps_each_frame(processor: Any) -> bool:
    """Whether a video processor limits the pixels of each frame.

    transformers announced that processors without the setting do so always. Earlier ones without it never did. So the
    size that such a processor gives to a small video tells it, with one token allowed per frame.
    """
    if hasattr(type(processor), "cap_pixels_per_frame"):
        return bool(processor.cap_pixels_per_frame)
    size = getattr(processor, "size", None) or {}
    if size.get("shortest_edge") is None or size.get("longest_edge") is None:
        return False  # not one whose sizes have bounds
    import torch

    side = processor.patch_size * processor.merge_size
    bounded = copy.copy(processor)
    bounded.max_video_tokens, bounded.size = 1, type(size)(shortest_edge=side**2, longest_edge=64 * side**2)
    video = torch.zeros(processor.temporal_patch_size, 3, 4 * side, 4 * side, dtype=torch.uint8)
    grid = bounded([video], do_sample_frames=False, return_tensors="pt")["video_grid_thw"]
    return bool(grid.prod() < (4 * processor.merge_size) ** 2)


def has_videos(manifest: Manifest) -> bool:
    """Whether a dataset has samples with videos."""
    return KIND_FEATURES[VIDEO] in manifest.features


def _of_servers(manifest: Manifest) -> dict[str, Any]:
    """Returns what no model is served with in two ways at once."""
    defaults = {
        "sampler": _BY_TRANSFORMERS,
        "layout": _BY_TRANSFORMERS,
        "positions": "whole-seconds",
        "cap_pixels_per_frame": False,
    }
    return {name: manifest.video_options.get(name, default) for name, default in defaults.items()}


def _different(one: Mapping[str, Any], two: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in (*_SETTINGS, "sampler", "layout", "positions"):
        a, b = one.get(name), two.get(name)
        if a is not None and b is not None and a != b:
            yield name, a, b


def _listed(what: str, different: Sequence[tuple[str, Any, Any]], place: int) -> str:
    return f"{what} has " + ", ".join(f"{each[0]} {_value(each[place])}" for each in different)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) else f"{value}"
