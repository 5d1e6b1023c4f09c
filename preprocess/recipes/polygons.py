"""Polygons in data, such as COCO's ``segmentation`` and rotated quads of text: boxes around them, on request."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from itertools import chain
from typing import Any

from vlmdata.preprocess.grounding import coordinates_fault
from vlmdata.preprocess.reject import RowRejected, excerpt
from vlmdata.reasons import Reason
from vlmdata.wording import counted

#: Columns, and keys of objects, that hold polygons.
POLYGONS = ("segmentation", "polygon", "quad")


class Polygons(StrEnum):
    """Handling of polygons that have no box beside them."""

    REJECT = "reject"
    BOX = "box"


def box_around(value: Any, polygons: Polygons, field: str) -> tuple[float, float, float, float]:
    """Returns the corners (x1, y1, x2, y2) of the smallest upright box around a polygon.

    Args:
        value: ``[x1, y1, x2, y2, …]``, ``[[x1, y1], [x2, y2], …]``, ``{"x1": …, "y1": …, …}`` (CORD), or several of
            the first form (COCO), which are parts of one object.
        polygons: Handling of polygons.
        field: Place in the row, for messages.

    Raises:
        RowRejected: UNSUPPORTED_CONTENT for polygons that are not asked for, and for masks in run lengths; BOX_BOUNDS
            for what is not a polygon.
    """
    if polygons is Polygons.REJECT:
        raise RowRejected(
            Reason.UNSUPPORTED_CONTENT,
            f"{field} is a polygon, and no family writes polygons; give a box, or let the smallest box around it be "
            "learned: -O polygons=box",
        )
    if isinstance(value, Mapping) and "counts" in value:
        raise RowRejected(
            Reason.UNSUPPORTED_CONTENT,
            f"{field} is a mask in run lengths; give its box, for example of pycocotools.mask.toBbox",
        )
    corners = chain.from_iterable(_rings(value, field))
    xs, ys = zip(*corners, strict=True)
    return min(xs), min(ys), max(xs), max(ys)


def _rings(value: Any, field: str) -> list[list[tuple[float, float]]]:
    """Reads the corners of each part of a polygon."""
    if isinstance(value, Mapping):
        count = max(1, len(value) // 2)
        value = [value.get(f"{axis}{n}") for n in range(1, count + 1) for axis in "xy"]
    if isinstance(value, list) and value and all(isinstance(each, list) for each in value):
        if all(len(each) == 2 for each in value):
            value = list(chain.from_iterable(value))
        else:
            return [_ring(each, f"{field}[{i}]") for i, each in enumerate(value)]
    return [_ring(value, field)]


def _ring(numbers: Any, field: str) -> list[tuple[float, float]]:
    if fault := coordinates_fault(numbers):
        raise RowRejected(Reason.BOX_BOUNDS, f"{field}{fault}")
    if len(numbers) < 6 or len(numbers) % 2:
        raise RowRejected(
            Reason.BOX_BOUNDS,
            f"{field} has {counted(len(numbers), 'number')}: {excerpt(numbers)}; a polygon has x and y of three points "
            "or more",
        )
    return list(zip(numbers[::2], numbers[1::2], strict=True))
