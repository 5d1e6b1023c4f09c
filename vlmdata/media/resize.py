"""Resizes images, to a size that follows from the run's bounds or from those in the data.

Source: ``fetch_image`` of qwen_vl_utils with the family's ``image_patch_size``.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vlmdata.families import Family
from vlmdata.families.base import CHANNELS, AspectRatioError, ImageBoundsError
from vlmdata.media.error import MediaError
from vlmdata.reasons import Reason

#: Bytes of pixels that are cut into patches at a time, in whole rows of tokens.
_BAND_BYTES = 192 << 10


@dataclass(frozen=True)
class SizeRequest:
    """The size that the data requests for an image. None leaves it to the run."""

    min_pixels: int | None = None  # at least about this many pixels
    max_pixels: int | None = None  # at most this many pixels
    resized_height: int | None = None  # height in pixels; used with ``resized_width``; these two override the bounds
    resized_width: int | None = None  # width in pixels


def target_size(
    height: int, width: int, request: SizeRequest, bounds: tuple[int, int], family: Family, what: str
) -> tuple[int, int]:
    """Returns the (height, width) to which an image is resized, in pixels.

    ``resized_height`` and ``resized_width`` override all bounds. Otherwise, a bound of the image replaces that of the
    run. If only one is given and the run's other bound contradicts it, the run's is ignored.

    Args:
        height: Height of the decoded image.
        width: Width of the decoded image.
        request: The size requested by the data.
        bounds: The run's minimum and maximum pixels.
        family: Family with the size rule.
        what: Name of the field for messages.

    Raises:
        MediaError: ASPECT_RATIO over 200; IMAGE_BOUNDS for impossible bounds.
    """
    try:
        return _target_size(height, width, request, bounds, family, what)
    except AspectRatioError as error:
        raise MediaError(Reason.ASPECT_RATIO, f"{what}: {error}") from error
    except ImageBoundsError as error:
        raise MediaError(Reason.IMAGE_BOUNDS, f"{what}: {error}") from error


def _target_size(
    height: int, width: int, request: SizeRequest, bounds: tuple[int, int], family: Family, what: str
) -> tuple[int, int]:
    if request.resized_height is not None and request.resized_width is not None:
        return family.requested_size(request.resized_height, request.resized_width)
    if request.min_pixels is None and request.max_pixels is None:
        return family.image_size(height, width, *bounds)
    least, most = _bounds(request, bounds, family, what)
    family.require_bounds(least, most)
    return family.image_size(height, width, least, most, least_side=family.factor)


def _bounds(request: SizeRequest, bounds: tuple[int, int], family: Family, what: str) -> tuple[int, int]:
    most_possible, smallest = family.largest_image, family.smallest_image
    for name, value in (("min_pixels", request.min_pixels), ("max_pixels", request.max_pixels)):
        if value is not None and value > most_possible:
            raise MediaError(
                Reason.IMAGE_BOUNDS,
                f"{what}: {name} is {value:,}; at most {most_possible:,} is possible in the family {family.name}. "
                "Lower it, or drop it: then the bounds of the run hold",
            )
    if request.max_pixels is not None and request.max_pixels < smallest:
        raise MediaError(
            Reason.IMAGE_BOUNDS,
            f"{what}: max_pixels is {request.max_pixels:,}; the smallest image has {smallest:,}",
        )
    least = bounds[0] if request.min_pixels is None else request.min_pixels
    most = bounds[1] if request.max_pixels is None else request.max_pixels
    if least > most:
        if request.min_pixels is not None and request.max_pixels is not None:
            raise MediaError(Reason.IMAGE_BOUNDS, f"{what}: min_pixels is {least:,}, more than max_pixels {most:,}")
        least = most = most if request.min_pixels is None else least
    return least, most


def resize_image(
    pixels: npt.NDArray[np.uint8], height: int, width: int, resample: str = "bicubic"
) -> npt.NDArray[np.uint8]:
    """Resizes with an antialiased filter of torchvision on uint8.

    Args:
        pixels: uint8 (H, W, 3), C-contiguous; only read.
        height: New height.
        width: New width.
        resample: The filter: bicubic or bilinear.

    Returns:
        uint8 (3, height, width), C-contiguous.
    """
    return np.ascontiguousarray(_resized(pixels, height, width, resample).transpose(2, 0, 1))


def resize_to_patches(
    memory: npt.NDArray[np.uint8],
    height: int,
    width: int,
    family: Family,
    out: npt.NDArray[np.uint8] | None = None,
    part: tuple[int, int, int, int] | None = None,
) -> npt.NDArray[np.uint8]:
    """Resizes as :func:`resize_image` does, and cuts the result into patches, a band of rows at a time.

    Args:
        memory: uint8 (H, W, 3 or 4), C-contiguous: RGB and possibly a fourth byte without meaning; only read.
        height: New height, a multiple of the family's factor if there is no ``part``.
        width: New width, a multiple of the family's factor if there is no ``part``.
        family: The family of the patches.
        out: As for :meth:`~vlmdata.families.Family.patchify`.
        part: (top, left, height, width) of the resized image to cut, multiples of the family's factor; None cuts all.

    Returns:
        uint8 (P, bytes per patch).
    """
    image = _resized(memory, height, width, family.resample)
    if part is not None:
        top, left, height, width = part
        image = image[top : top + height, left : left + width]
    pixels = np.ascontiguousarray(image)
    if out is None:
        out = np.empty((height * width // family.patch_size**2, family.patch_bytes), np.uint8)
    split = _planes_of_bytes if pixels.shape[2] == CHANNELS else _planes_of_numbers
    # A few rows of tokens at a time, so that they stay in cache.
    rows = family.factor * max(1, _BAND_BYTES // (family.factor * pixels[0].nbytes))
    for top in range(0, height, rows):
        band = pixels[top : top + rows]
        first, last = (at * width // family.patch_size**2 for at in (top, top + len(band)))
        family.patchify(split(band), out[first:last])
    return out


def _planes_of_bytes(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Returns pixels of three bytes, (H, W, 3), as planes, (3, H, W)."""
    planes = np.empty((CHANNELS, *pixels.shape[:2]), np.uint8)
    for channel in range(CHANNELS):  # one assignment for all channels takes longer
        planes[channel] = pixels[..., channel]
    return planes


def _planes_of_numbers(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Returns pixels of four bytes, (H, W, 4), as planes of the first three, (3, H, W)."""
    # A pixel is one number, red its lowest byte; conversion to uint8 keeps the lowest.
    numbers = pixels.view("<u4")[..., 0]
    planes = np.empty((CHANNELS, *numbers.shape), np.uint8)
    planes[0] = numbers
    shifted = np.empty(numbers.shape, np.uint32)
    for channel in range(1, CHANNELS):
        np.right_shift(numbers, 8 * channel, out=shifted)
        planes[channel] = shifted
    return planes


def _resized(memory: npt.NDArray[np.uint8], height: int, width: int, resample: str) -> npt.NDArray[np.uint8]:
    """Returns the resized image: uint8 (height, width, C), a view if it has this size already."""
    if (height, width) == memory.shape[:2]:
        return memory  # without torch, whose import takes a second
    import torch

    # A view: (1, H, W, C) memory as (1, C, H, W) is torch's channels-last format, which the kernel reads uncopied.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # it is not written to
        image = torch.from_numpy(memory)[None].permute(0, 3, 1, 2)
    # The call that torchvision's resize makes. Importing torchvision takes a second, mostly for torch's compiler.
    image = torch.nn.functional.interpolate(image, (height, width), mode=resample, align_corners=False, antialias=True)
    resized: npt.NDArray[np.uint8] = image[0].permute(1, 2, 0).numpy()
    return resized
