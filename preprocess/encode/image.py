"""Encodes the bytes of image files to stored patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vlmdata.families import Family, View
from vlmdata.families.chat import IMAGE
from vlmdata.media.decode import DecodedImage, decode_image, header_size
from vlmdata.media.error import MediaError
from vlmdata.media.resize import SizeRequest, resize_to_patches, target_size
from vlmdata.preprocess.config import ImageConfig, PreprocessConfig
from vlmdata.preprocess.conversation import ImagePart
from vlmdata.preprocess.encode.sample import SampleItem, Views
from vlmdata.preprocess.encode.stored import StoredImage
from vlmdata.preprocess.reject import RowRejected
from vlmdata.reasons import Reason


def encode_image(part: ImagePart, config: ImageConfig, family: Family, what: str) -> Views:
    """Decodes and normalises an image, and resizes its views and splits them into patches.

    Raises:
        RowRejected: If the image cannot be used.
    """
    try:
        pixels, origin = used_pixels(part, config, what)
        height, width = pixels.shape[:2]
        views = _views(height, width, part, family, config.bounds(family), what)
    except MediaError as error:
        raise RowRejected(error.reason, error.message) from error
    made = []
    for number, view in enumerate(views):
        memory = pixels
        if view.crop is not None:
            top, left, rows, columns = view.crop
            memory = np.ascontiguousarray(memory[top : top + rows, left : left + columns])
        patches = resize_to_patches(memory, *view.size, family, part=view.part)
        grid = _grid(view, family)
        origin_of_view = origin | (_place(number, view) if len(views) > 1 else {})
        whole = view.is_whole and not _used_part(part)
        tokens = tokens_of((view,), family)
        made.append(SampleItem(patches, grid, view.shape, tokens, origin_of_view, part.data, number, whole))
    return tuple(made)


def used_pixels(part: ImagePart, config: ImageConfig, what: str) -> tuple[npt.NDArray[np.uint8], dict[str, Any]]:
    """Decodes an image. Returns the pixels of it that are used, uint8 (H, W, 3), and the facts of its file.

    ``what`` names it in messages.

    Raises:
        MediaError: If the image cannot be used.
    """
    decoded = decode_image(part.data, config.max_source_pixels, what)
    return _used(decoded.memory, part), _origin(decoded) | _used_part(part)


def encode_images(parts: Sequence[ImagePart], config: PreprocessConfig) -> list[Views]:
    """Encodes the images of a sample. References to equal files of equal size share their views.

    Raises:
        RowRejected: If an image cannot be used.
    """
    made: dict[_Same, Views] = {}
    for part in parts:
        same = _same(part)
        if not isinstance(part, StoredImage) and same not in made:
            made[same] = encode_image(part, config.image, config.model_family, part.field)
    return [part.views if isinstance(part, StoredImage) else made[_same(part)] for part in parts]


#: What makes the views of two images equal: the file, the requested size, and what is used of it.
type _Same = tuple[bytes, SizeRequest, tuple[int, int, int, int] | None, bool]


def _same(part: ImagePart) -> _Same:
    return part.data, size_request(part), part.region, bool(part.mirrored)


def used_size(part: ImagePart, height: int, width: int) -> tuple[int, int]:
    """Returns the (height, width) of what is used of an image of a height and width, in pixels.

    Raises:
        MediaError: IMAGE_BOUNDS if its region is not within the image.
    """
    if part.region is None:
        return height, width
    left, top, columns, rows = part.region
    if left + columns > width or top + rows > height:
        raise MediaError(
            Reason.IMAGE_BOUNDS,
            f"{part.field}: its region {list(part.region)} (left, top, width, height) is not within the image of "
            f"{width}x{height} pixels",
        )
    return rows, columns


def _used(memory: npt.NDArray[np.uint8], part: ImagePart) -> npt.NDArray[np.uint8]:
    """Returns the pixels of a decoded image that are used, mirrored if wanted."""
    rows, columns = used_size(part, *memory.shape[:2])
    left, top = (0, 0) if part.region is None else part.region[:2]
    used = memory[top : top + rows, left : left + columns]
    return np.ascontiguousarray(used[:, ::-1] if part.mirrored else used)


def _used_part(part: ImagePart) -> dict[str, Any]:
    region = {} if part.region is None else {"region": list(part.region)}
    return region | ({"mirrored": True} if part.mirrored else {})


def _views(
    height: int, width: int, part: ImagePart, family: Family, bounds: tuple[int, int], what: str
) -> tuple[View, ...]:
    return family.views(height, width, target_size(height, width, size_request(part), bounds, family, what))


def image_tokens(parts: Sequence[ImagePart], config: PreprocessConfig, more_than: int) -> int | None:
    """Returns the number of tokens of some images, from the headers of their files.

    So a sample that is too long is rejected without decoding its images.

    Args:
        parts: The images.
        config: The options.
        more_than: Only larger numbers are of interest.

    Returns:
        The number of tokens; None if it is not larger than ``more_than``, or not certain before decoding.
    """
    family = config.model_family
    bounds = config.image.bounds(family)
    requests = [size_request(part) for part in parts]
    if set(requests) <= {SizeRequest()} and len(parts) * family.most_views * bounds[1] <= more_than * family.factor**2:
        return None
    counts: dict[_Same, int | None] = {}
    tokens = 0
    for part in parts:
        if isinstance(part, StoredImage):
            tokens += sum(view.tokens for view in part.views)
            continue
        same = _same(part)
        if same not in counts:
            counts[same] = _tokens_of(part, config.image, family, bounds)
        count = counts[same]
        if count is None:
            return None
        tokens += count
    return tokens if tokens > more_than else None


def _tokens_of(part: ImagePart, config: ImageConfig, family: Family, bounds: tuple[int, int]) -> int | None:
    """Returns the number of tokens of an image; None if its header is damaged, or does not tell it."""
    try:
        width, height = header_size(part.data, config.max_source_pixels, part.field)
        if part.region is not None:  # of the image as it is shown
            width, height = part.region[2:]
        # Decoding turns images as their EXIF says, which some formats have after the pixels.
        counts = {
            tokens_of(views, family)
            for views in (
                _views(height, width, part, family, bounds, part.field),
                *([_views(width, height, part, family, bounds, part.field)] if part.region is None else []),
            )
        }
    except MediaError:
        return None
    return counts.pop() if len(counts) == 1 else None


def tokens_of(views: Sequence[View], family: Family) -> int:
    """Returns the number of tokens of the pictures of an image."""
    return int(family.item_tokens(IMAGE, [_grid(view, family) for view in views]).sum())


def _grid(view: View, family: Family) -> tuple[int, int, int]:
    height, width = view.shape
    return 1, height // family.patch_size, width // family.patch_size


def size_request(part: ImagePart) -> SizeRequest:
    """Returns the size that the data requests for an image."""
    return SizeRequest(part.min_pixels, part.max_pixels, part.resized_height, part.resized_width)


def _place(number: int, view: View) -> dict[str, Any]:
    """Returns which of the views of an image it is, and what it shows: see :class:`View`."""
    crop = {} if view.crop is None else {"crop": list(view.crop)}
    return {"view": number, **crop} | ({} if view.part is None else {"part": list(view.part), "of": list(view.size)})


def _origin(decoded: DecodedImage) -> dict[str, Any]:
    width, height = decoded.file_size
    return {
        "format": decoded.file_format,
        "mode": decoded.mode,
        "width": width,
        "height": height,
        "normalised": list(decoded.steps),
    }
