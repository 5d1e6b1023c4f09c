"""Boxes and points in the text of a sample: what the model reads and learns of places in its images.

They are read from the tokens by the convention of the family, not from what preprocessing was given, so they show what
is learned. Lists of numbers without a key or a token of the family are not read: they may be anything.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from vlmdata.families import Family
from vlmdata.families.chat import IMAGE
from vlmdata.families.coordinates import coordinates_in
from vlmdata.families.grounding import Grounding
from vlmdata.format.schema import BOX_IMAGES
from vlmdata.media.codecs.base import ItemShape


@dataclass(frozen=True)
class PictureView:
    """An item that shows a picture, or a rectangle of it."""

    item: int  # number among the items of the sample
    corner: tuple[int, int]  # x and y of its upper left corner in the picture, in pixels of the picture
    sides: tuple[int, int]  # width and height of what it shows, in pixels of the picture
    scale: tuple[float, float]  # its own pixels per pixel of the picture

    def pixels(self, numbers: Sequence[float]) -> tuple[float, ...] | None:
        """Converts pixels of the picture, x and y in turn, to those of the item; None if it does not show them."""
        moved = [number - self.corner[n % 2] for n, number in enumerate(numbers)]
        for axis, side in enumerate(self.sides):
            low, high = min(moved[axis::2]), max(moved[axis::2])
            if high < 0 or low > side or (low < high and (high == 0 or low == side)):
                return None
        return tuple(number * self.scale[n % 2] for n, number in enumerate(moved))


@dataclass(frozen=True)
class Picture:
    """An image that boxes may be in, whole: if it is cut into tiles, the picture of all of them."""

    number: int  # of its first item among the items of the sample
    start: int  # its first token
    height: int  # in pixels, after resizing
    width: int  # in pixels, after resizing
    medium: int  # number among the images and videos of the conversation
    views: tuple[PictureView, ...]

    @classmethod
    def whole(cls, number: int, start: int, height: int, width: int, medium: int) -> Picture:
        """Makes the picture of an image that is one item."""
        return cls(number, start, height, width, medium, (PictureView(number, (0, 0), (width, height), (1.0, 1.0)),))


@dataclass(frozen=True)
class BoxPlace:
    """Where an item shows a box or a point."""

    item: int  # number among the items of the sample
    pixels: tuple[float, ...]  # x1, y1, x2, y2 or x, y in pixels of the item; of a tile, perhaps outside of it


@dataclass(frozen=True)
class BoxDescription:
    """A box or a point in the text of a sample."""

    number: int  # within the sample, from 0
    #: Number of its image among the items, of a tiled one of the first tile; None if neither text nor metadata tells it
    image: int | None
    written: tuple[float, ...]  # x1, y1, x2, y2 or x, y as in the text
    pixels: tuple[float, ...] | None  # the same in pixels of the resized image, all tiles together; None without one
    places: tuple[BoxPlace, ...]  # in the items that show it
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
        pixels = None if image is None else rules.pixels(found.numbers, image.height, image.width)
        made.append(
            BoxDescription(
                number=number,
                image=None if image is None else image.number,
                written=found.numbers,
                pixels=pixels,
                places=_places(image, pixels),
                label=found.label,
                start=start,
                stop=last + 1,
                fault=_fault(found.numbers, rules, [image] if image is not None else pictures),
            )
        )
    return tuple(made)


def _places(picture: Picture | None, pixels: Sequence[float] | None) -> tuple[BoxPlace, ...]:
    """Returns where the items of a picture show these pixels of it."""
    if picture is None or pixels is None:
        return ()
    found = ((view.item, view.pixels(pixels)) for view in picture.views)
    return tuple(BoxPlace(item, shown) for item, shown in found if shown is not None)


def pictures_of(
    items: Sequence[ItemShape], starts: Sequence[int], family: Family, metadata: Mapping[str, Any]
) -> tuple[Picture, ...]:
    """Returns the images of a sample that boxes may be in; a video has none.

    Args:
        items: Its images and videos.
        starts: The first token of each.
        family: Its family.
        metadata: Its metadata, which tells the tiles of an image. It may hold anything.
    """
    made, medium = list[Picture](), -1
    for number, (item, start) in enumerate(zip(items, starts, strict=True)):
        source = recorded_source(metadata, number)
        height, width = item.grid[1] * family.patch_size, item.grid[2] * family.patch_size
        of, tile = tile_of(source, height, width)
        if made and made[-1].medium == medium and type(source.get("view")) is int and source["view"] > 0:
            made[-1] = _with_view(made[-1], number, (height, width), None if tile is None else source["part"][:2])
            continue
        medium += 1
        if item.kind != IMAGE:
            continue
        picture = Picture.whole(number, start, height, width, medium)
        if tile is not None:
            picture = replace(picture, height=of[0], width=of[1], views=())
            picture = _with_view(picture, number, (height, width), source["part"][:2])
        made.append(picture)
    return tuple(made)


def _with_view(picture: Picture, item: int, size: tuple[int, int], corner: Sequence[int] | None) -> Picture:
    """Adds an item of a (height, width) that shows a tile of a picture, or without a corner all of it."""
    height, width = size
    if corner is None:
        scale = width / picture.width, height / picture.height
        view = PictureView(item, (0, 0), (picture.width, picture.height), scale)
    else:
        view = PictureView(item, (corner[1], corner[0]), (width, height), (1.0, 1.0))
    return replace(picture, views=(*picture.views, view))


def recorded_source(metadata: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """Returns what the metadata of a sample tells of an item; nothing if it is damaged."""
    recorded = metadata.get("images")
    found = recorded[number] if isinstance(recorded, list) and number < len(recorded) else None
    return found if isinstance(found, dict) else {}


def tile_of(source: Mapping[str, Any], height: int, width: int) -> tuple[tuple[int, int], tuple[int, int] | None]:
    """Returns the (height, width) of the resized image of a picture, and its row and column if it is a tile of it."""
    part, of = sides_in(source.get("part"), 4), sides_in(source.get("of"), 2)
    if part is None or of is None or part[2:] != [height, width] or not min(*part[2:], *of):
        return (height, width), None
    return (of[0], of[1]), (part[0] // height, part[1] // width)


def sides_in(found: Any, count: int) -> list[int] | None:
    """Returns a list of so many sides or offsets of a picture, or None if it is none."""
    if isinstance(found, list) and len(found) == count and all(type(each) is int and each >= 0 for each in found):
        return found
    return None


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
        return next((each for each in pictures if each.medium in told), None)
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
