"""The frames of a video in a sample: where each temporal patch is in the tokens, and when it is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vlmdata.families import Family
from vlmdata.families.blocks import Blocks, are_placeholders
from vlmdata.families.chat import VIDEO
from vlmdata.format.schema import Sample
from vlmdata.format.tokenizer_info import TokenizerInfo
from vlmdata.media.codecs import ItemShape


@dataclass(frozen=True)
class FrameDescription:
    """A temporal patch of a video: the frames that its tokens stand for."""

    patch: int  # number of the temporal patch
    start: int  # first token
    tokens: int  # in the sequence
    told: float | None  # seconds that the model is told, or None if not recorded
    seconds: tuple[float, ...]  # when each of its frames is shown in the file; empty if not recorded
    source: tuple[int, ...]  # number of each of its frames in the file; empty if not recorded


def item_starts(
    sample: Sample, starts: Sequence[int], family: Family, tokenizer: TokenizerInfo
) -> tuple[tuple[int, ...], ...]:
    """Returns the first token of an image, and of each temporal patch of a video, for all items of a sample.

    If the tokens do not match the grids, the temporal patches of a video are taken to follow one another.

    Args:
        sample: The sample.
        starts: First token of each item, from the index.
        family: Family of the dataset.
        tokenizer: Tokenizer of the dataset.
    """
    kinds = [(item.kind, item.grid) for item in sample.items]
    if all(kind != VIDEO for kind, _ in kinds):
        return tuple((start,) for start in starts)
    blocks = Blocks.of(family, kinds, tokenizer.placeholders)
    try:
        found = blocks.locate(sample.input_ids[: sample.length]).tolist()
    except ValueError:
        found = []
    made: list[tuple[int, ...]] = []
    for (kind, grid), start, first in zip(kinds, starts, blocks.firsts.tolist(), strict=True):
        patches = grid[0] if kind == VIDEO else 1
        count = int(family.item_tokens(kind, [grid])[0]) // patches
        apart = len(family.expansion(kind).blocks(grid)) > 1
        made.append(
            tuple(found[first : first + patches])
            if found and apart
            else tuple(start + number * count for number in range(patches))
        )
    return tuple(made)


def cells_of(item: ItemShape, family: Family) -> tuple[int, ...] | None:
    """Returns which merged patch each token of a block of an item shows, in reading order, -1 for none.

    Placeholders stand for merged patches in order; those beyond, and tokens between them, show none. None if each token
    shows the merged patch of its own number, or the block has several temporal patches.
    """
    block = family.expansion(item.kind).blocks(item.grid)[0]
    shows, merged = are_placeholders(family, item.kind, block), int(np.prod(block)) // family.patches_per_token
    if (shows.all() and len(shows) == merged) or block[0] > 1:
        return None
    numbers = np.cumsum(shows) - 1
    known = shows & (numbers < merged) & (int(shows.sum()) >= merged)
    return tuple(np.where(known, numbers, -1).tolist())


def frames_of(
    item: ItemShape, starts: Sequence[int], source: Mapping[str, Any], family: Family
) -> tuple[FrameDescription, ...]:
    """Describes the temporal patches of an item; none for an image.

    Args:
        item: The item.
        starts: First token of each temporal patch.
        source: What the metadata records of the file.
        family: Family of the dataset.
    """
    if item.kind != VIDEO:
        return ()
    size, count = family.temporal_patch_size, int(family.item_tokens(VIDEO, [item.grid])[0]) // item.grid[0]
    told = _numbers(source.get("patch_seconds"))
    seconds, numbers = _numbers(source.get("seconds")), _numbers(source.get("frames"))
    return tuple(
        FrameDescription(
            patch=number,
            start=start,
            tokens=count,
            told=told[number] if number < len(told) else None,
            seconds=tuple(seconds[number * size : (number + 1) * size]),
            source=tuple(map(int, numbers[number * size : (number + 1) * size])),
        )
        for number, start in enumerate(starts)
    )


def shown_frames(total: int, most: int) -> list[int]:
    """Returns at most so many of ``total`` frames, evenly spaced, the first and the last among them."""
    if total <= most:
        return list(range(total))
    return [round(number * (total - 1) / (most - 1)) for number in range(most)]


def _numbers(recorded: Any) -> list[float]:
    """Returns a list of numbers of the metadata, which may hold anything."""
    numbers = recorded if isinstance(recorded, list) else []
    return numbers if all(isinstance(each, int | float) and not isinstance(each, bool) for each in numbers) else []
