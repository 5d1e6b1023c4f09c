"""How a family writes boxes and points as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Grounding:
    """The coordinates that models of a family write, from the upper left corner, x before y.

    Attributes:
        scale: Coordinates are whole numbers from 0 to this one, as shares of the image's width and height. None means
            pixels of the image after resizing.
        box_key: Key of a box ``[x1, y1, x2, y2]`` in JSON; "" if the family writes none as JSON.
        point_key: Key of a point ``[x, y]`` in JSON; "" if the family writes none as JSON.
        label_key: Key of the label in JSON.
        box_marks: Texts of the tokens before and after a box; None if the family has no such tokens.
        label_marks: Texts of the tokens before and after a label; None if the family has no such tokens.
        lists: Whether boxes between the tokens are lists in a list, ``[[x1, y1, x2, y2]]``. Points have no such form.
            By default boxes and points are pairs: ``(x1,y1),(x2,y2)``, ``(x,y)``.
    """

    scale: int | None
    box_key: str = "bbox_2d"
    point_key: str = "point_2d"
    label_key: str = "label"
    box_marks: tuple[str, str] | None = None
    label_marks: tuple[str, str] | None = None
    lists: bool = False

    def may_be_in(self, text: str) -> bool:
        """True if a text has a key or a token of boxes or points: a quick look, before it is read."""
        return any(mark in text for mark in (self.box_key, self.point_key, *(self.box_marks or ())[:1]) if mark)

    def extent(self, height: int, width: int) -> tuple[int, int]:
        """Returns the coordinates (x, y) of the lower right corner of an image.

        Args:
            height: Height of the image after resizing, in pixels.
            width: Width of the image after resizing, in pixels.
        """
        return (width, height) if self.scale is None else (self.scale, self.scale)

    def pixels(self, numbers: Sequence[float], height: int, width: int) -> tuple[float, ...]:
        """Converts coordinates, x and y in turn, to pixels of an image.

        Args:
            numbers: The coordinates, in the unit of the family.
            height: Height of the image after resizing, in pixels.
            width: Width of the image after resizing, in pixels.
        """
        extent, sides = self.extent(height, width), (width, height)
        return tuple(number * sides[n % 2] / extent[n % 2] for n, number in enumerate(numbers))
