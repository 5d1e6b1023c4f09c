"""Writes the boxes, points and labels of a conversation as text, in the family's convention.

A coordinate is multiplied by the size of the image in the family's unit and divided by its size in the given unit. The
product is exact (rational numbers), and rounded once to the nearest whole number, halves to even. Sides of a box that
would round to one number get the whole numbers around them, so that the box is not empty.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from vlmdata.families.grounding import Grounding
from vlmdata.media.decode import shown_size
from vlmdata.media.error import MediaError
from vlmdata.media.resize import target_size
from vlmdata.preprocess.config import PreprocessConfig
from vlmdata.preprocess.conversation import ContentPart, Conversation, ImagePart, Message, TextPart
from vlmdata.preprocess.encode.image import size_request, used_size
from vlmdata.preprocess.grounding import BoxPart, Form, GroundingPart, LabelPart, PointPart, Unit
from vlmdata.preprocess.reject import RowRejected
from vlmdata.reasons import Reason
from vlmdata.wording import counted

#: What a coordinate may be outside of the image, in pixels of it, as rounding of the data's numbers puts it.
_TOLERANCE = Fraction(1, 2)
#: What a whole side is in units that are shares of it.
_SHARES = {Unit.ONE: 1, Unit.HUNDRED: 100, Unit.THOUSAND: 1000}


@dataclass(frozen=True)
class Sizes:
    """The (height, width) of an image in pixels, and what is used of it."""

    shown: tuple[int, int]  # as it is shown: after EXIF rotation, before resizing
    final: tuple[int, int]  # after resizing
    region: tuple[int, int, int, int] | None = None  # left, top, width, height of what is used; None for all
    mirrored: bool = False


def with_grounding_as_text(made: Conversation, config: PreprocessConfig) -> Conversation:
    """Replaces boxes, points and labels by text, which is joined to the text around it.

    Raises:
        RowRejected: BOX_BOUNDS for a box that is outside of its image, reversed or empty, or a point outside.
            UNSUPPORTED_CONTENT if the family does not write boxes in this way. As for images, if one cannot be used.
    """
    if not any(isinstance(part, GroundingPart) for message in made.messages for part in message.parts):
        return made
    writer = _Writer(made.images, config)
    messages = tuple(_written(message, writer) for message in made.messages)
    return replace(made, messages=messages, box_images=_box_images(made, writer.written))


def _box_images(made: Conversation, written: Sequence[tuple[int, list[int]]]) -> tuple[tuple[int, ...], ...]:
    """Returns the image of each box for the metadata, since the text does not tell it; none of a single image."""
    items = [number for number, part in enumerate(made.media) if isinstance(part, ImagePart)]
    found = [(items[image], *numbers) for image, numbers in written] if len(items) > 1 else []
    return tuple(dict.fromkeys(found))


def _written(message: Message, writer: _Writer) -> Message:
    if not any(isinstance(part, GroundingPart) for part in message.parts):
        return message
    parts: list[ContentPart] = []
    for part in message.parts:
        text = TextPart(writer.text(part)) if isinstance(part, GroundingPart) else part
        if isinstance(text, TextPart) and parts and isinstance(before := parts[-1], TextPart):
            parts[-1] = TextPart(before.text + text.text)
        else:
            parts.append(text)
    return replace(message, parts=tuple(parts))


class _Writer:
    """Writes the boxes, points and labels of one conversation."""

    def __init__(self, images: Sequence[ImagePart], config: PreprocessConfig):
        self._images, self._config = images, config
        self._sizes: dict[int, Sizes] = {}
        self.written: list[tuple[int, list[int]]] = []  # number of the image, coordinates

    def text(self, part: GroundingPart) -> str:
        """Returns the text of a part."""
        family = self._config.model_family
        rules = family.grounding
        if rules is None:
            raise RowRejected(
                Reason.UNSUPPORTED_CONTENT,
                f"{part.field}: the family {family.name} has no convention for boxes and points; write them as text "
                "in the model's own notation",
            )
        if isinstance(part, LabelPart):
            return _marked(part.label, rules.label_marks, part.field, family.name)
        numbers = converted(part, self._sizes_of(part), rules, self._field(part))
        self.written.append((part.image, numbers))
        if part.form is Form.LIST:
            return json.dumps(numbers)
        if part.form is Form.JSON:
            key = rules.box_key if isinstance(part, BoxPart) else rules.point_key
            if not key:
                raise RowRejected(
                    Reason.UNSUPPORTED_CONTENT,
                    f"{part.field}: the family {family.name} has no JSON for it; choose the form of its tokens "
                    "(recipe grounding: -O form=tokens; your own recipe: Form.TOKENS)",
                )
            label = {} if part.label is None else {rules.label_key: part.label}
            return json.dumps({key: numbers, **label}, ensure_ascii=False)
        if rules.lists and isinstance(part, PointPart):
            raise RowRejected(
                Reason.UNSUPPORTED_CONTENT,
                f"{part.field}: the family {family.name} has no notation for points; give a box, or choose a plain "
                "list (Form.LIST)",
            )
        pairs = ",".join(f"({x},{y})" for x, y in zip(numbers[::2], numbers[1::2], strict=True))
        pairs = json.dumps([numbers]) if rules.lists else pairs
        name = "" if part.label is None else _marked(part.label, rules.label_marks, part.field, family.name)
        return name + _marked(pairs, rules.box_marks, part.field, family.name)

    def _field(self, part: BoxPart | PointPart) -> str:
        return self._images[part.image].field

    def _sizes_of(self, part: BoxPart | PointPart) -> Sizes:
        number = part.image
        if number >= len(self._images):
            raise RowRejected(
                Reason.BOX_BOUNDS,
                f"{part.field} is of image {number}, and the conversation has {counted(len(self._images), 'image')}, "
                "numbered from 0",
            )
        if number not in self._sizes:
            self._sizes[number] = sizes_of(self._images[number], self._config)
        return self._sizes[number]


def sizes_of(image: ImagePart, config: PreprocessConfig) -> Sizes:
    """Returns the sizes of an image.

    Raises:
        RowRejected: If the image cannot be used.
    """
    family = config.model_family
    try:
        shown = shown_size(image.data, config.image.max_source_pixels, image.field)
        used = used_size(image, *shown)
        final = target_size(*used, size_request(image), config.image.bounds(family), family, image.field)
    except MediaError as error:
        raise RowRejected(error.reason, error.message) from error
    return Sizes(shown, final, image.region, bool(image.mirrored))


def converted(part: BoxPart | PointPart, sizes: Sizes, rules: Grounding, image: str) -> list[int]:
    """Returns the coordinates of a box or point in the unit of the family.

    Args:
        part: The box or point.
        sizes: The sizes of its image.
        rules: The family's convention.
        image: Place of the image in the row, for messages.

    Raises:
        RowRejected: BOX_BOUNDS if a coordinate is more than half a pixel outside of the image, or the box is reversed
            or empty.
    """
    shares = _in_region(shares_of(part, sizes, image), part, sizes, image)
    extent = rules.extent(*sizes.final)
    exact = [share * extent[number % 2] for number, share in enumerate(shares)]
    rounded = list(map(round, exact))
    if isinstance(part, BoxPart):
        for axis in (0, 1):
            if rounded[axis] == rounded[axis + 2]:
                rounded[axis], rounded[axis + 2] = math.floor(exact[axis]), math.ceil(exact[axis + 2])
    return rounded


def shares_of(part: BoxPart | PointPart, sizes: Sizes, image: str) -> list[Fraction]:
    """Returns the coordinates of a box or point as shares of the sides of its whole image.

    Raises:
        RowRejected: See :func:`converted`.
    """
    height, width = sizes.shown
    per_side = (width, height) if part.unit is Unit.PIXELS else (_SHARES[part.unit],) * 2
    shares = []
    for number, value in enumerate(part.coordinates):
        axis = number % 2
        share, side = Fraction(value) / per_side[axis], (width, height)[axis]
        beyond = _TOLERANCE / side
        if not -beyond <= share <= 1 + beyond:
            raise _refused(part, sizes, image, f"its {'xy'[axis]} {value} is outside of the image")
        shares.append(min(max(share, Fraction(0)), Fraction(1)))
    if isinstance(part, BoxPart):
        for axis, (first, second) in enumerate(zip(shares[:2], shares[2:], strict=True)):
            if first >= second:
                what = "is reversed" if first > second else "is empty"
                before, after = part.xyxy[axis], part.xyxy[axis + 2]
                raise _refused(part, sizes, image, f"it {what}: {'xy'[axis]} goes from {before} to {after}")
    return shares


def _in_region(shares: list[Fraction], part: BoxPart | PointPart, sizes: Sizes, image: str) -> list[Fraction]:
    """Returns shares of the whole image as shares of what is used of it."""
    if sizes.region is not None:
        shares = [
            (share * sizes.shown[1 - n % 2] - sizes.region[n % 2]) / sizes.region[2 + n % 2]
            for n, share in enumerate(shares)
        ]
        if not all(0 <= share <= 1 for share in shares):
            raise _refused(part, sizes, image, f"it is not within the used region {list(sizes.region)}")
    if sizes.mirrored:
        xs = [1 - share for share in shares[::2]][::-1]
        shares = [xs[n // 2] if n % 2 == 0 else share for n, share in enumerate(shares)]
    return shares


def _refused(part: BoxPart | PointPart, sizes: Sizes, image: str, why: str) -> RowRejected:
    height, width = sizes.shown
    form = "[x1, y1, x2, y2]" if isinstance(part, BoxPart) else "[x, y]"
    unit = "in pixels" if part.unit is Unit.PIXELS else f"from 0 to {_SHARES[part.unit]}"
    return RowRejected(
        Reason.BOX_BOUNDS,
        f"{part.field} is {list(part.coordinates)}, and {image} is {width}x{height} pixels: {why}. It is read as "
        f"{form} {unit}; correct it, or state the unit that it has",
    )


def _marked(text: str, marks: tuple[str, str] | None, field: str, family: str) -> str:
    if marks is None:
        raise RowRejected(
            Reason.UNSUPPORTED_CONTENT, f"{field}: the family {family} has no tokens for it; choose another form"
        )
    return f"{marks[0]}{text}{marks[1]}"
