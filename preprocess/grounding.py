"""Boxes, points and labels in conversations: coordinates with their unit, and the image that they belong to.

The family's convention for coordinates (``vlmdata.families.grounding``) applies when they are written as text, after
the size of the image is known. All coordinates are from the upper left corner of the image, x before y.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self


class Unit(StrEnum):
    """Unit of coordinates."""

    #: Pixels of the image as it is shown, after EXIF rotation and before resizing.
    PIXELS = "pixels"
    #: Shares of the image's width and height.
    ONE = "0..1"
    #: Percent of the image's width and height.
    HUNDRED = "0..100"
    #: Thousandths of the image's width and height.
    THOUSAND = "0..1000"


class Form(StrEnum):
    """Form of a box or point in text."""

    #: ``{"bbox_2d": [x1, y1, x2, y2], "label": "a dog"}`` or ``{"point_2d": [x, y]}``, with the keys of the family.
    JSON = "json"
    #: ``[x1, y1, x2, y2]`` or ``[x, y]``, without the label.
    LIST = "list"
    #: ``<|box_start|>(x1,y1),(x2,y2)<|box_end|>`` after the label in its own marks, with the tokens of the family.
    TOKENS = "tokens"


@dataclass(frozen=True)
class BoxPart:
    """A box in an image of the conversation.

    Attributes:
        xyxy: x and y of the upper left corner, and of the lower right one. The first corner must be above and left of
            the second one. See :meth:`from_xywh`.
        unit: Unit of ``xyxy``.
        image: Number of the image among those of the conversation, from 0.
        label: Name of what is in the box.
        form: Form in the text.
        field: Place in the row, for messages.
    """

    xyxy: tuple[float, float, float, float]
    unit: Unit = Unit.PIXELS
    image: int = 0
    label: str | None = None
    form: Form = Form.JSON
    field: str = "box"

    def __post_init__(self) -> None:
        _require_coordinates("BoxPart.xyxy", self.xyxy, 4)
        _require_place("BoxPart", self.unit, self.image, self.form)

    @classmethod
    def from_xywh(cls, xywh: tuple[float, float, float, float], **others: Any) -> Self:
        """Makes a box of the x and y of its upper left corner, its width and its height (COCO).

        Args:
            xywh: The four numbers.
            **others: Other attributes of the box.
        """
        _require_coordinates("BoxPart.from_xywh", xywh, 4)
        x, y, width, height = xywh
        return cls((x, y, x + width, y + height), **others)

    @property
    def coordinates(self) -> tuple[float, ...]:
        """The coordinates, x and y in turn."""
        return self.xyxy


@dataclass(frozen=True)
class PointPart:
    """A point in an image of the conversation.

    Attributes:
        xy: x and y.
        unit: Unit of ``xy``.
        image: Number of the image among those of the conversation, from 0.
        label: Name of what is at the point.
        form: Form in the text.
        field: Place in the row, for messages.
    """

    xy: tuple[float, float]
    unit: Unit = Unit.PIXELS
    image: int = 0
    label: str | None = None
    form: Form = Form.JSON
    field: str = "point"

    def __post_init__(self) -> None:
        _require_coordinates("PointPart.xy", self.xy, 2)
        _require_place("PointPart", self.unit, self.image, self.form)

    @property
    def coordinates(self) -> tuple[float, ...]:
        """The coordinates, x and y."""
        return self.xy


@dataclass(frozen=True)
class LabelPart:
    """The name of an object, between the family's tokens for it (``<|object_ref_start|>``)."""

    label: str
    field: str = "label"


GroundingPart = BoxPart | PointPart | LabelPart


def coordinates_fault(values: Any) -> str:
    """Says why values are not coordinates, as the rest of a sentence that begins with their name; "" if they are."""
    if not isinstance(values, list | tuple):
        return f" is {values!r}; it must be a list of numbers"
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return f" is {list(values)!r}; {value!r} is not a finite number"
    return ""


def _require_coordinates(name: str, values: Any, count: int) -> None:
    if fault := coordinates_fault(values):
        raise ValueError(f"{name}{fault}")
    if len(values) != count:
        raise ValueError(f"{name} is {list(values)!r}; it must have {count} numbers")


def _require_place(name: str, unit: Any, image: Any, form: Any) -> None:
    if type(image) is not int or image < 0:
        raise ValueError(f"{name}.image is {image!r}; it must be a number of an image from 0")
    for field, value, kind in (("unit", unit, Unit), ("form", form, Form)):
        if not isinstance(value, kind):
            raise ValueError(f"{name}.{field} is {value!r}; it must be one of {', '.join(map(repr, kind))}")
