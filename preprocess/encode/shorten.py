"""Shortens what is over ``--max-length`` until it fits: ``--overlong drop-turns`` and ``shrink-images``.

The result is a conversation or document like any other, which is then encoded. So a shortened sample is what
preprocessing the shorter conversation gives. Only rows that are too long are shortened.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from vlmdata.families import Family
from vlmdata.families.base import ImageBoundsError
from vlmdata.preprocess.config import SHORTENING, Overlong, PreprocessConfig
from vlmdata.preprocess.conversation import Conversation, Document, ImagePart, Message
from vlmdata.preprocess.encode.encoder import Encoder
from vlmdata.preprocess.encode.lengths import LengthMeter, SampleLength, image_tokens_of
from vlmdata.preprocess.encode.sample import EncodedSample
from vlmdata.preprocess.encode.stored import StoredImage
from vlmdata.preprocess.reject import RowRejected
from vlmdata.reasons import Reason
from vlmdata.wording import counted

# Names of what was taken, in ``Conversation.shortened``.
#: Turns that were dropped, and the images and videos in them.
TURNS, MEDIA = "dropped_turns", "dropped_images_and_videos"
#: The pixel budget to which images were shrunk, and their number.
MAX_PIXELS, IMAGES = "max_pixels", "shrunk_images"

type Made = Conversation | Document
type Outcomes = Sequence[EncodedSample | RowRejected]


def encode_shortened(made: Made, encoder: Encoder) -> tuple[Made, Outcomes]:
    """Encodes a recipe's result, shortened if it is too long and the options ask for it.

    Returns:
        What was encoded, with boxes, points and labels as text, and its samples: see :meth:`Encoder.encode_all`.

    Raises:
        RowRejected: If nothing of it can be encoded.
    """
    text = encoder.as_text(made)
    try:
        return text, encoder.encode_all(text)
    except RowRejected as error:
        if error.reason is not Reason.OVERLONG or encoder.config.overlong not in SHORTENING:
            raise
        if encoder.config.overlong is Overlong.SHRINK_IMAGES:
            shorter = encoder.as_text(_with_smaller_images(made, encoder, error))  # boxes may be in pixels
            return shorter, encoder.encode_all(shorter)
        if isinstance(text, Document):
            raise RowRejected(error.reason, f"{error.message}; a document has no turns to drop") from error
        return _without_early_turns(text, encoder, error)


def _without_early_turns(made: Conversation, encoder: Encoder, error: RowRejected) -> tuple[Made, Outcomes]:
    """Drops as few of the earliest exchanges as possible. Images in a conversation are never dropped all."""
    starts = _exchanges(made.messages)
    possible = [
        each for each in (_from(made, starts[0], start) for start in starts[1:]) if each.media or not made.media
    ]

    @cache
    def tried(number: int) -> Outcomes | RowRejected:
        try:
            return encoder.encode_all(possible[number])
        except RowRejected as found:
            return found

    def fits(number: int) -> bool:
        found = tried(number)
        return not isinstance(found, RowRejected) or found.reason is not Reason.OVERLONG

    first = _first(len(possible), fits)
    found = tried(first) if first < len(possible) else None
    if found is None or isinstance(found, RowRejected):
        why = f"; {found.message}" if found is not None else ""
        kept = " that leave an image" if made.media else ""
        raise RowRejected(
            error.reason,
            f"{error.message}; it has {counted(len(possible), 'shorter form')} without its earliest exchanges{kept}, "
            f"and none fits{why}",
        ) from error
    return possible[first], found


def _exchanges(messages: Sequence[Message]) -> list[int]:
    """Returns where each exchange begins: with the first turn of a user after another speaker. There is at least one.

    The first begins after the system's turns.
    """
    begin = next((n for n, each in enumerate(messages) if each.role != "system"), len(messages))
    return [
        n
        for n in range(begin, len(messages))
        if n == begin or (messages[n].role == "user" and messages[n - 1].role != "user")
    ] or [begin]


def _from(made: Conversation, begin: int, start: int) -> Conversation:
    """Returns a conversation without the turns from ``begin`` to before ``start``."""
    gone = made.messages[begin:start]
    before = sum(len(list(each.media)) for each in made.messages[:begin])
    media = sum(len(list(each.media)) for each in gone)
    boxes = tuple(
        box if box[0] < before else (box[0] - media, *box[1:])
        for box in made.box_images
        if not before <= box[0] < before + media
    )
    took = {TURNS: len(gone), MEDIA: media}
    messages = made.messages[:begin] + made.messages[start:]
    return replace(made, messages=messages, box_images=boxes, shortened=took)


def _first(count: int, fits: Callable[[int], bool]) -> int:
    """Returns the first number below ``count`` that fits, if all after one that fits do; ``count`` if none fits."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


@dataclass(frozen=True)
class _Budget:
    """A pixel budget of a row's images, in the options of a run."""

    pixels: int
    config: PreprocessConfig

    def applied(self, part: ImagePart) -> ImagePart:
        """Returns an image within the budget; unchanged if it is, or if the data requests its size."""
        if part.resized_height is not None or (isinstance(part, StoredImage) and not part.data):
            return part
        least, most = self.config.image.bounds(self.config.model_family)
        least, most = part.min_pixels or least, part.max_pixels or most
        names = [field.name for field in dataclasses.fields(ImagePart)]
        plain = ImagePart(**{name: getattr(part, name) for name in names})  # decoded anew, if a dataset has its pixels
        small = replace(plain, max_pixels=max(self.pixels, least))
        if most <= max(self.pixels, least):
            return part
        return small if image_tokens_of(small, self.config) < image_tokens_of(plain, self.config) else part


def _with_smaller_images(made: Made, encoder: Encoder, error: RowRejected) -> Made:
    """Lowers the budget of the images as little as possible: by one token, or to the next that the family takes."""
    config = encoder.config
    family, meter = config.model_family, LengthMeter(encoder)
    least, most = config.image.bounds(family)
    most = max([most, *(part.max_pixels for part in made.images if part.max_pixels)])
    floor = least if config.overlong_min_pixels is None else config.overlong_min_pixels
    budgets = _budgets(family, least, floor, most)

    def shorter(number: int) -> Made:
        return _shrunk(made, _Budget(budgets[number], config))

    def fits(number: int) -> bool:
        try:
            (length,) = meter.measure(shorter(number))
        except RowRejected:
            return False
        return isinstance(length, SampleLength) and length.tokens <= config.max_length

    # Nothing fits if the smallest does not; this finds rows of too much text at once.
    first = _first(len(budgets), fits) if made.images and budgets and fits(len(budgets) - 1) else len(budgets)
    if first == len(budgets):
        raise RowRejected(
            error.reason, f"{error.message}; with {counted(len(made.images), 'image')} of at most {floor} pixels, too"
        ) from error
    return shorter(first)


def _budgets(family: Family, least: int, floor: int, most: int) -> list[int]:
    """Returns the budgets from below ``most`` to ``floor`` that a family takes, the largest first."""
    step = family.factor**2

    def taken(pixels: int) -> bool:
        try:
            family.require_bounds(least, pixels)
        except ImageBoundsError:
            return False
        return True

    return [pixels for pixels in range((most - 1) // step * step, floor - 1, -step) if taken(pixels)]


def _shrunk(made: Made, budget: _Budget) -> Made:
    """Returns a conversation or document with its images within a budget."""
    count = 0

    def part_of(part: Any) -> Any:
        nonlocal count
        if not isinstance(part, ImagePart):
            return part
        small = budget.applied(part)
        count += small is not part
        return small

    if isinstance(made, Document):
        made = replace(made, parts=tuple(map(part_of, made.parts)))
    else:
        messages = tuple(replace(each, parts=tuple(map(part_of, each.parts))) for each in made.messages)
        made = replace(made, messages=messages)
    return replace(made, shortened={MAX_PIXELS: budget.pixels, IMAGES: count})
