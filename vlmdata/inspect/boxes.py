"""Boxes and points in the text of a sample: what the model reads and learns of places in its images.

They are read from the tokens by the convention of the family, not from what preprocessing was given, so they show what
is learned. Lists of numbers without a key or a token of the family are not read: they may be anything.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from vlmdata.families import Family
from vlmdata.families.chat import IMAGE
from vlmdata.families.coordinates import coordinates_in
from vlmdata.families.grounding import Grounding
from vlmdata.format.schema import BOX_IMAGES
from vlmdata.media.codecs.base import ItemShape


@dataclass(frozen=True)
class Picture:
    """An image that boxes may be in."""

    number: int  # among the items of the sample
    start: int  # its first token
    height: int  # in pixels, after resizing
    width: int  # in pixels, after resizing


@dataclass(frozen=True)
class BoxDescription:
    """A box or a point in the text of a sample."""

    number: int  # within the sample, from 0
    image: int | None  # number of its image among the items; None if neither the text nor the metadata tells it
    written: tuple[float, ...]  # x1, y1, x2, y2 or x, y as in the text
    pixels: tuple[float, ...] | None  # the same in pixels of the resized image; None without one
    label: str | None
    start: int  # its tokens [start, stop), with its label
    stop: int
    fault: str  # why it cannot be right: reversed, empty or outside of the image; "" if it can


def boxes_of(
    texts: Sequence[str], rules: Grounding | None, pictures: Sequence[Picture], metadata: Mapping[str, Any]
) -> tuple[BoxDescription, ...]:
    """Reads the boxes and points of a sample from its text.

    Args:
        texts: The text of each token.
        rules: The family's convention; None if it has none.
        pictures: The images of the sample.
        metadata: Its metadata, which tells the image of each box if there are several.
    """
    text = "".join(texts)
    if rules is None:
        return ()
    ends = list(accumulate(map(len, texts)))
    recorded = _recorded(metadata)
    made = []
    for number, found in enumerate(sorted(coordinates_in(text, rules), key=lambda each: each.start)):
        start, last = bisect_right(ends, found.start), bisect_right(ends, found.stop - 1)
        image = _picture_of(found.numbers, start, pictures, recorded)
        made.append(
            BoxDescription(
                number=number,
                image=None if image is None else image.number,
                written=found.numbers,
                pixels=None if image is None else rules.pixels(found.numbers, image.height, image.width),
                label=found.label,
                start=start,
                stop=last + 1,
                fault=_fault(found.numbers, rules, [image] if image is not None else pictures),
            )
        )
    return tuple(made)


def pictures_of(items: Sequence[ItemShape], starts: Sequence[int], family: Family) -> tuple[Picture, ...]:
    """Returns the images of a sample that boxes may be in; a video has none.

    Args:
        items: Its images and videos.
        starts: The first token of each.
        family: Its family.
    """
    side = family.patch_size
    return tuple(
        Picture(number, start, item.grid[1] * side, item.grid[2] * side)
        for number, (item, start) in enumerate(zip(items, starts, strict=True))
        if item.kind == IMAGE
    )


def _recorded(metadata: Mapping[str, Any]) -> dict[tuple[float, ...], set[int]]:
    """Returns the images of boxes that preprocessing recorded, by the numbers in the text. It may hold anything."""
    found: dict[tuple[float, ...], set[int]] = {}
    listed = metadata.get(BOX_IMAGES)
    for each in listed if isinstance(listed, list) else []:
        if isinstance(each, list) and len(each) in (3, 5) and all(type(value) is int for value in each):
            found.setdefault(tuple(map(float, each[1:])), set()).add(each[0])
    return found


def _picture_of(
    numbers: tuple[float, ...],
    start: int,
    pictures: Sequence[Picture],
    recorded: Mapping[tuple[float, ...], set[int]],
) -> Picture | None:
    """Returns the image of a box: the recorded one, else the only one, else the only one before it."""
    told = recorded.get(numbers, set())
    if len(told) == 1:
        return next((each for each in pictures if each.number in told), None)
    if len(pictures) > 1:
        pictures = [each for each in pictures if each.start < start]
    return pictures[0] if len(pictures) == 1 and not told else None


def _fault(numbers: tuple[float, ...], rules: Grounding, pictures: Sequence[Picture]) -> str:
    """Says why a box or point cannot be right; "" if it can in one of the images."""
    if not all(map(math.isfinite, numbers)):
        return "it has a number that is not finite"
    for axis, (first, second) in enumerate(zip(numbers[:2], numbers[2:], strict=False)):
        if first >= second:
            what = "is reversed" if first > second else "is empty"
            return f"it {what}: {'xy'[axis]} goes from {first:g} to {second:g}"
    if not pictures:
        return "the sample has no image"
    extents = [rules.extent(each.height, each.width) for each in pictures]
    most = [max(extent[axis] for extent in extents) for axis in (0, 1)]
    for n, number in enumerate(numbers):
        if not 0 <= number <= most[n % 2]:
            return f"its {'xy'[n % 2]} {number:g} is outside of the image, which goes from 0 to {most[n % 2]}"
    return ""
