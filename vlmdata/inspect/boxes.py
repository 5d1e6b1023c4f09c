"""Boxes and points in the text of a sample: what the model reads and learns of places in its images.

They are read from the tokens by the convention of the family, not from what preprocessing was given, so they show what
is learned. Lists of numbers without a key or a token of the family are not read: they may be anything.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from vlmdata.families import Family
from vlmdata.families.chat import IMAGE
from vlmdata.families.grounding import Grounding
from vlmdata.format.schema import BOX_IMAGES
from vlmdata.media.codecs.base import ItemShape

_NUMBER = r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
#: How far before a box its object may begin, in characters, so that long texts are not searched again for each box.
_REACH = 2000


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


@dataclass(frozen=True)
class _Found:
    start: int  # characters [start, stop) of the text
    stop: int
    numbers: tuple[float, ...]
    label: str | None


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
    for number, found in enumerate(sorted(_found(text, rules), key=lambda each: each.start)):
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


def may_have_boxes(text: str, rules: Grounding) -> bool:
    """True if a text has a key or a token of boxes or points: a quick look, before it is read token by token."""
    return any(mark in text for mark in (rules.box_key, rules.point_key, *(rules.box_marks or ())[:1]))


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


def _found(text: str, rules: Grounding) -> Iterator[_Found]:
    keys = {rules.box_key: 4, rules.point_key: 2}
    pattern = rf'"({"|".join(map(re.escape, keys))})"\s*:\s*\[\s*({_NUMBER}(?:\s*,\s*{_NUMBER})*)\s*\]'
    before = 0
    for match in re.finditer(pattern, text):
        numbers = _numbers(match[2])
        if len(numbers) == keys[match[1]]:
            start, stop, label = _object_around(text, match, before, rules)
            yield _Found(start, stop, numbers, label)
            before = match.end()
    if rules.box_marks is not None:
        yield from _marked(text, rules.box_marks, rules.label_marks)


def _object_around(text: str, match: re.Match[str], before: int, rules: Grounding) -> tuple[int, int, str | None]:
    """Returns where the JSON object of a box begins and ends, and its label; the box alone if the object is cut."""
    least = max(before, match.start() - _REACH)
    start = text.rfind("{", least, match.start())
    while start >= 0:
        try:
            value, stop = json.JSONDecoder().raw_decode(text, start)
        except (ValueError, RecursionError):
            stop = -1
        if stop >= match.end() and isinstance(value, dict):
            label = value.get(rules.label_key)
            return start, stop, label if isinstance(label, str) else None
        start = text.rfind("{", least, start)
    return match.start(), match.end(), None


def _marked(text: str, marks: tuple[str, str], label_marks: tuple[str, str] | None) -> Iterator[_Found]:
    """Finds boxes between special tokens. One label may stand before several of them."""
    pair = rf"\(\s*{_NUMBER}\s*,\s*{_NUMBER}\s*\)"
    box = rf"{re.escape(marks[0])}\s*({pair}(?:\s*,?\s*{pair})?)\s*{re.escape(marks[1])}"
    label = "(?!)()" if label_marks is None else rf"{re.escape(label_marks[0])}(.*?){re.escape(label_marks[1])}"
    name: str | None = None
    name_start = stop = 0
    for match in re.finditer(rf"{label}|{box}", text, re.DOTALL):
        if match[2] is None:
            name, name_start, stop = match[1], match.start(), match.end()
            continue
        if text[stop : match.start()].strip(" ,\n") or name is None:
            name = None
        first = name_start if name is not None and stop > name_start else match.start()
        yield _Found(first, match.end(), _numbers(match[2]), name)
        name_start = stop = match.end()


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(each) for each in re.findall(_NUMBER, text))


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
