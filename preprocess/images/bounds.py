"""The size an image is resized to: by the run's bounds, or by those that the data gives for this image.

Source: ``fetch_image`` of qwen_vl_utils with ``image_patch_size=16``.
"""

from __future__ import annotations

from preprocess.config import ImageConfig
from preprocess.conversation import ImagePart
from preprocess.images.resize import smart_resize
from preprocess.reject import RowRejected
from vlmdata.format.ledger import Reason
from vlmdata.format.schema import IMAGE_FACTOR

#: Bounds of qwen_vl_utils (4 and 16,384 tokens), which hold for explicit sizes.
_LEAST_PIXELS = 4 * IMAGE_FACTOR**2
#: The data may not ask for more. It is also the ``max_pixels`` of published checkpoints.
MAX_PIXELS = 16_384 * IMAGE_FACTOR**2


def target_size(height: int, width: int, part: ImagePart, config: ImageConfig, what: str) -> tuple[int, int]:
    """The (height, width) to resize an image to, in pixels.

    ``resized_height`` and ``resized_width`` decide alone. Else a bound of the image replaces that of the run; where
    only one is given and the run's other bound contradicts it, the run's gives way.

    Args:
        height: Of the decoded image.
        width: Of the decoded image.
        part: The image's own bounds.
        config: The run's bounds.
        what: Name of the field for messages.

    Raises:
        RowRejected: ASPECT_RATIO over 200; IMAGE_BOUNDS for bounds that cannot be obeyed.
    """
    if part.resized_height is not None and part.resized_width is not None:
        size = f"{part.resized_width}x{part.resized_height} (resized_width x resized_height)"
        if part.resized_height * part.resized_width > MAX_PIXELS:
            raise RowRejected(Reason.IMAGE_BOUNDS, f"{what}: {size} is more than {MAX_PIXELS:,} pixels")
        return smart_resize(part.resized_height, part.resized_width, _LEAST_PIXELS, MAX_PIXELS, least_side=IMAGE_FACTOR)
    if part.min_pixels is None and part.max_pixels is None:
        return smart_resize(height, width, config.min_pixels, config.max_pixels)
    least, most = _bounds(part, config, what)
    return smart_resize(height, width, least, most, least_side=IMAGE_FACTOR)


def _bounds(part: ImagePart, config: ImageConfig, what: str) -> tuple[int, int]:
    for name, value in (("min_pixels", part.min_pixels), ("max_pixels", part.max_pixels)):
        if value is not None and value > MAX_PIXELS:
            raise RowRejected(Reason.IMAGE_BOUNDS, f"{what}: {name} is {value:,}; at most {MAX_PIXELS:,} is possible")
    if part.max_pixels is not None and part.max_pixels < IMAGE_FACTOR**2:
        raise RowRejected(
            Reason.IMAGE_BOUNDS,
            f"{what}: max_pixels is {part.max_pixels:,}; the smallest image has {IMAGE_FACTOR**2:,} ({IMAGE_FACTOR}²)",
        )
    least = config.min_pixels if part.min_pixels is None else part.min_pixels
    most = config.max_pixels if part.max_pixels is None else part.max_pixels
    if least > most:
        if part.min_pixels is not None and part.max_pixels is not None:
            raise RowRejected(Reason.IMAGE_BOUNDS, f"{what}: min_pixels is {least:,}, more than max_pixels {most:,}")
        least = most = most if part.min_pixels is None else least
    return least, most
