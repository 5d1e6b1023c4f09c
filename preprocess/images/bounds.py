"""The size an image is resized to: by the run's bounds, or by those that the data gives for this image.

Source: ``fetch_image`` of qwen_vl_utils with the family's ``image_patch_size``.
"""

from __future__ import annotations

from preprocess.config import ImageConfig
from preprocess.conversation import ImagePart
from preprocess.reject import RowRejected
from vlmdata.families import Family
from vlmdata.families.base import AspectRatioError
from vlmdata.format.ledger import Reason

#: Bounds of qwen_vl_utils, in tokens, which hold for explicit sizes. The data may not ask for more.
_LEAST_TOKENS, _MOST_TOKENS = 4, 16_384


def most_pixels(family: Family) -> int:
    """The largest image that data may ask for, in pixels."""
    return _MOST_TOKENS * family.factor**2


def target_size(
    height: int, width: int, part: ImagePart, config: ImageConfig, family: Family, what: str
) -> tuple[int, int]:
    """The (height, width) to resize an image to, in pixels.

    ``resized_height`` and ``resized_width`` decide alone. Else a bound of the image replaces that of the run; where
    only one is given and the run's other bound contradicts it, the run's gives way.

    Args:
        height: Of the decoded image.
        width: Of the decoded image.
        part: The image's own bounds.
        config: The run's bounds.
        family: Whose rule of sizes holds.
        what: Name of the field for messages.

    Raises:
        RowRejected: ASPECT_RATIO over 200; IMAGE_BOUNDS for bounds that cannot be obeyed.
    """
    try:
        return _target_size(height, width, part, config, family, what)
    except AspectRatioError as error:
        raise RowRejected(Reason.ASPECT_RATIO, str(error)) from error


def _target_size(
    height: int, width: int, part: ImagePart, config: ImageConfig, family: Family, what: str
) -> tuple[int, int]:
    factor, most_possible = family.factor, most_pixels(family)
    if part.resized_height is not None and part.resized_width is not None:
        size = f"{part.resized_width}x{part.resized_height} (resized_width x resized_height)"
        if part.resized_height * part.resized_width > most_possible:
            raise RowRejected(Reason.IMAGE_BOUNDS, f"{what}: {size} is more than {most_possible:,} pixels")
        least_pixels = _LEAST_TOKENS * factor**2
        return family.image_size(
            part.resized_height, part.resized_width, least_pixels, most_possible, least_side=factor
        )
    if part.min_pixels is None and part.max_pixels is None:
        return family.image_size(height, width, config.min_pixels, config.max_pixels)
    least, most = _bounds(part, config, family, what)
    return family.image_size(height, width, least, most, least_side=factor)


def _bounds(part: ImagePart, config: ImageConfig, family: Family, what: str) -> tuple[int, int]:
    most_possible, smallest = most_pixels(family), family.factor**2
    for name, value in (("min_pixels", part.min_pixels), ("max_pixels", part.max_pixels)):
        if value is not None and value > most_possible:
            raise RowRejected(
                Reason.IMAGE_BOUNDS, f"{what}: {name} is {value:,}; at most {most_possible:,} is possible"
            )
    if part.max_pixels is not None and part.max_pixels < smallest:
        raise RowRejected(
            Reason.IMAGE_BOUNDS,
            f"{what}: max_pixels is {part.max_pixels:,}; the smallest image has {smallest:,} ({family.factor}²)",
        )
    least = config.min_pixels if part.min_pixels is None else part.min_pixels
    most = config.max_pixels if part.max_pixels is None else part.max_pixels
    if least > most:
        if part.min_pixels is not None and part.max_pixels is not None:
            raise RowRejected(Reason.IMAGE_BOUNDS, f"{what}: min_pixels is {least:,}, more than max_pixels {most:,}")
        least = most = most if part.min_pixels is None else least
    return least, most
