"""The audit of what the metadata say of a sample's videos: their frames and times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vlmdata.families import Family
from vlmdata.format.index_row import IndexRow
from vlmdata.media.codecs import VIDEO


def steps_of(
    metadata: Mapping[str, Any], row: IndexRow, family: Family, fractions: bool = False
) -> tuple[float, ...] | None:
    """Returns the step of positions between the temporal patches of each item, which follows from their seconds.

    Args:
        metadata: The sample's metadata.
        row: Its index row.
        family: Its family.
        fractions: Whether its positions count fractions of a second.

    Returns:
        A step per item; None without videos.

    Raises:
        ValueError: If the metadata does not describe the videos, or contradicts their grids.
    """
    if all(item.shape.kind != VIDEO for item in row.items) or family.video is None:
        return None
    origins: Any = metadata.get("images")
    if not _is_list(origins, Mapping, len(row.items)):
        raise ValueError(f"images is not a list of {len(row.items)} objects, one per image and video")
    steps: list[float] = []
    for number, (item, origin) in enumerate(zip(row.items, origins, strict=True)):
        if item.shape.kind != VIDEO:
            steps.append(1)
            continue
        frames, times, seconds = (origin.get(name) for name in ("frames", "patch_seconds", "seconds_per_patch"))
        count, temporal = item.shape.grid[0], family.temporal_patch_size
        if not isinstance(frames, list) or -(-len(frames) // temporal) != count:
            raise ValueError(f"video {number} has the frames {frames}, but its grid has {count} temporal patches")
        if not _is_list(times, int | float, count) or sorted(times) != times:
            raise ValueError(f"video {number} has the patch_seconds {times}, but {count} ascending ones are needed")
        if type(seconds) not in (int, float) or not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"video {number} has the seconds_per_patch {seconds!r}; it must be a positive number")
        steps.append(family.video.temporal_step(seconds, fractions))
    return tuple(steps)


def _is_list(value: Any, of: Any, length: int) -> bool:
    return isinstance(value, list) and len(value) == length and all(isinstance(each, of) for each in value)
