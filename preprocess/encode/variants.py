"""Variants of a conversation: the same turns with its images in other sizes, cropped or mirrored (``--variants``).

What is drawn depends on the content of the row, the place of the conversation in the row's list and the number of the
variant, and on nothing else. Boxes and points stay as they are given, in the whole image: they follow the pixels when
they become text (:mod:`vlmdata.preprocess.encode.grounding`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import xxhash

from vlmdata.families.base import AspectRatioError, ImageBoundsError
from vlmdata.families.coordinates import coordinates_in
from vlmdata.media.error import MediaError
from vlmdata.media.resize import target_size
from vlmdata.preprocess.config import PreprocessConfig, VariantKind
from vlmdata.preprocess.conversation import Conversation, Document, ImagePart, VideoPart
from vlmdata.preprocess.encode.grounding import Sizes, shares_of, sizes_of
from vlmdata.preprocess.encode.image import size_request
from vlmdata.preprocess.grounding import BoxPart, PointPart
from vlmdata.preprocess.recipes.base import Candidate
from vlmdata.preprocess.reject import RowRejected
from vlmdata.preprocess.row import Row
from vlmdata.preprocess.sources.row_digests import row_digest

#: Scales of the sides of a resized image, in thousandths.
_LEAST_SCALE, _MOST_SCALE = 500, 1500
#: A crop takes at most this share of a side from each end, as a divisor.
_CROP = 4
#: Draws of a size within the budget, and of a variant unlike the earlier ones.
_DRAWS = 8
#: An image as it is shown: its region, whether it is mirrored, and its final size.
type _Shown = tuple[tuple[int, int, int, int] | None, bool, tuple[int, int]]


def with_variants(candidates: Sequence[Candidate], row: Row, config: PreprocessConfig) -> list[Candidate]:
    """Returns the candidates of a row, each followed by its variants, numbered as a list.

    A conversation without variants stays alone, and its metadata says why.
    """
    if config.variants == 1:
        return list(candidates)
    seed = row_digest(row)
    made: list[Conversation | Document | RowRejected] = []
    for number, candidate in enumerate(candidates):
        draw = _Draw(seed, (number,))
        made += (
            _variants(candidate.made, draw, config) if isinstance(candidate.made, Conversation) else [candidate.made]
        )
    if len(made) == 1 and candidates[0].sample is None:
        return [Candidate(made[0])]
    return [Candidate(each, number, len(made)) for number, each in enumerate(made)]


@dataclass(frozen=True)
class _Draw:
    """Numbers that depend only on the content of a row and on what they are for."""

    seed: bytes
    path: tuple[int | str, ...]

    def of(self, *path: int | str) -> _Draw:
        """Returns other numbers, for something that has these names."""
        return _Draw(self.seed, (*self.path, *path))

    def below(self, bound: int, *path: int | str) -> int:
        """Returns a number from 0 to ``bound - 1``."""
        return xxhash.xxh3_64_intdigest(self.seed + repr((*self.path, *path)).encode()) % bound


def _variants(made: Conversation, draw: _Draw, config: PreprocessConfig) -> list[Conversation]:
    """Returns a conversation and its variants, as far as they differ."""
    kinds, why = _possible(made, config)
    if not kinds:
        return [replace(made, variant={"none": why})]
    try:
        images = [_Image.of(made, number, config) for number in range(len(made.images))]
    except RowRejected:
        return [made]  # encoding it finds the same reason
    known: set[tuple[_Shown, ...]] = {tuple(image.shown(image.part) for image in images)}
    variants = [replace(made, variant={"number": 0})]
    for number in range(1, config.variants):
        for attempt in range(_DRAWS):
            parts = _drawn(images, kinds, draw.of(number, attempt))
            shown = tuple(image.shown(part) for image, part in zip(images, parts, strict=True))
            if shown not in known:
                known.add(shown)
                variants.append(replace(_with_images(made, parts), variant={"number": number}))
                break
    return variants if len(variants) > 1 else [replace(made, variant={"none": "no other size or crop"})]


def _possible(made: Conversation, config: PreprocessConfig) -> tuple[frozenset[VariantKind], str]:
    """Returns the kinds of variants that keep a conversation true, or none and the reason."""
    if not made.images:
        return frozenset(), "no image"
    if any(isinstance(part, VideoPart) for part in made.media):
        return frozenset(), "a video"
    kinds, rules = frozenset(config.variant_kinds), config.model_family.grounding
    assert rules is not None  # the options are refused otherwise
    if made.tools or any(found for text in _texts(made) for found in coordinates_in(text, rules)):
        # Coordinates that are text do not follow. Shares of the sides stay true in another size.
        kinds &= {VariantKind.SCALE} if rules.scale is not None else frozenset()
    return kinds, "" if kinds else "coordinates in the text or in calls of tools"


def _texts(made: Conversation) -> Iterator[str]:
    for message in made.messages:
        yield message.text
        yield message.reasoning or ""
        yield json.dumps([dict(call) for call in message.tool_calls], default=str)


def _drawn(images: Sequence[_Image], kinds: frozenset[VariantKind], draw: _Draw) -> list[ImagePart]:
    """Draws what a variant shows of each image. All are mirrored or none, so that they agree."""
    others = kinds - {VariantKind.FLIP}
    mirrored = VariantKind.FLIP in kinds and (not others or draw.below(2, "flip") == 1)
    parts = []
    for number, image in enumerate(images):
        part = image.part
        if VariantKind.CROP in kinds:
            part = image.cropped(part, draw.of(number, "crop"))
        if VariantKind.SCALE in kinds:
            part = image.scaled(part, draw.of(number, "scale"))
        parts.append(replace(part, mirrored=(not part.mirrored) or None) if mirrored else part)
    return parts


def _with_images(made: Conversation, images: Sequence[ImagePart]) -> Conversation:
    given = iter(images)

    def part_of(part: Any) -> Any:
        return next(given) if isinstance(part, ImagePart) else part

    messages = tuple(replace(each, parts=tuple(map(part_of, each.parts))) for each in made.messages)
    return replace(made, messages=messages)


@dataclass(frozen=True, eq=False)
class _Image:
    """An image of a conversation, and the boxes and points that a crop must keep."""

    part: ImagePart
    sizes: Sizes
    hull: tuple[int, int, int, int] | None  # left, top, right, bottom of all boxes and points in pixels; None without
    config: PreprocessConfig

    @classmethod
    def of(cls, made: Conversation, number: int, config: PreprocessConfig) -> _Image:
        """Finds the sizes of an image and the hull of its boxes and points.

        Raises:
            RowRejected: If the image or a box cannot be used.
        """
        part = made.images[number]
        sizes = sizes_of(part, config)
        height, width = sizes.shown
        xs, ys = list[Fraction](), list[Fraction]()
        for message in made.messages:
            for each in message.parts:
                if isinstance(each, BoxPart | PointPart) and each.image == number:
                    shares = shares_of(each, sizes, part.field)
                    xs += [share * width for share in shares[::2]]
                    ys += [share * height for share in shares[1::2]]
        if not xs:
            return cls(part, sizes, None, config)
        left, top = (min(math.floor(min(each)), side - 1) for each, side in ((xs, width), (ys, height)))
        right, bottom = max(math.ceil(max(xs)), left + 1), max(math.ceil(max(ys)), top + 1)
        return cls(part, sizes, (left, top, right, bottom), config)

    def shown(self, part: ImagePart) -> _Shown:
        """Returns what a part shows of the image."""
        return part.region, bool(part.mirrored), self._final(part)

    def cropped(self, part: ImagePart, draw: _Draw) -> ImagePart:
        """Draws a crop around the boxes and points, of at least half of each side; none of an image without them."""
        if self.hull is None or part.region is not None or part.resized_height is not None:
            return part
        height, width = self.sizes.shown
        left, top, right, bottom = self.hull
        x1 = draw.below(min(left, width // _CROP) + 1, "left")
        y1 = draw.below(min(top, height // _CROP) + 1, "top")
        x2 = width - draw.below(min(width - right, width // _CROP) + 1, "right")
        y2 = height - draw.below(min(height - bottom, height // _CROP) + 1, "bottom")
        crop = replace(part, region=(x1, y1, x2 - x1, y2 - y1))
        try:
            self._final(crop)
        except MediaError:  # too narrow for the family
            return part
        return part if crop.region == (0, 0, width, height) else crop

    def scaled(self, part: ImagePart, draw: _Draw) -> ImagePart:
        """Draws another size within the budget of the image's pixels, as far as there is one."""
        if part.resized_height is not None:
            return part
        family, final = self.config.model_family, self._final(part)
        least, most = self.config.image.bounds(family)
        least, most = part.min_pixels or least, part.max_pixels or most
        for attempt in range(_DRAWS):
            scale = _LEAST_SCALE + draw.below(_MOST_SCALE - _LEAST_SCALE + 1, attempt)
            height, width = (
                max(1, round(Fraction(side * scale, 1000 * family.factor))) * family.factor for side in final
            )
            if not least <= height * width <= most or (height, width) == final:
                continue
            try:
                if family.requested_size(height, width) != (height, width):
                    continue
            except (AspectRatioError, ImageBoundsError):
                continue
            return replace(part, resized_height=height, resized_width=width)
        return part

    def _final(self, part: ImagePart) -> tuple[int, int]:
        height, width = self.sizes.shown if part.region is None else (part.region[3], part.region[2])
        family = self.config.model_family
        return target_size(height, width, size_request(part), self.config.image.bounds(family), family, part.field)
