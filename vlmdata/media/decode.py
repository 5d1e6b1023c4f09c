"""Decodes file bytes to an upright 8-bit RGB image, or raises an error with a reason.

File contents are normalised before resizing: EXIF orientation is applied, alpha composited on white, 16-bit and
float images scaled to 8 bit by a fixed rule, and the first frame of an animation used. (transformers and
qwen_vl_utils each get some of these wrong.)
"""

from __future__ import annotations

import io
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from PIL import Image, ImageOps, UnidentifiedImageError

from vlmdata.media.error import MediaError
from vlmdata.media.jpeg import decode_plain_jpeg
from vlmdata.media.signatures import IDENTIFIED_ONLY, Found, recognise
from vlmdata.reasons import Reason
from vlmdata.wording import counted

_EXIF_ORIENTATION = 0x0112
_FIRST_TURNED = 5  # orientations from here on exchange width and height
_ALPHA_MODES = frozenset({"RGBA", "LA", "PA", "RGBa", "La"})


@dataclass(frozen=True, eq=False)
class DecodedImage:
    """A normalised image."""

    #: uint8 (H, W, 3 or 4), C-contiguous: RGB, upright, and possibly a fourth byte without meaning; read-only.
    memory: npt.NDArray[np.uint8]
    file_format: str  # Pillow's name of the format, such as ``JPEG``
    mode: str  # Pillow's mode of the file's content
    file_size: tuple[int, int]  # (width, height) as stored in the file, before EXIF orientation
    steps: tuple[str, ...]  # normalisation steps: any of ``first_frame``, ``exif``, ``alpha``, ``depth``, ``mode``

    @property
    def pixels(self) -> npt.NDArray[np.uint8]:
        """uint8 (H, W, 3), RGB; a read-only view."""
        return self.memory[..., :3]


def decode_image(data: bytes, max_source_pixels: int, what: str = "image") -> DecodedImage:
    """Decodes and normalises an image file.

    Args:
        data: The file's bytes.
        max_source_pixels: Larger images are rejected before decoding their pixels.
        what: Name of the field for messages, such as ``images[2]``.

    Returns:
        The image as RGB.

    Raises:
        MediaError: With NOT_AN_IMAGE, UNSUPPORTED_IMAGE, TRUNCATED_IMAGE, IMAGE_TOO_LARGE, EMPTY_IMAGE or PIXEL_RANGE.
    """
    if not data:
        raise _empty(what)
    with _pillow_limit(max_source_pixels):
        image = _open(data, max_source_pixels, what)
        if image.format == "JPEG" and _orientation(image) in (None, 1):
            plain = decode_plain_jpeg(data, image)
            if plain is not None:
                return DecodedImage(plain, "JPEG", image.mode, image.size, ())
        try:
            image.load()
        except MemoryError:
            raise
        except Exception as error:  # Pillow's plugins raise OSError, SyntaxError, struct.error, zlib.error, ...
            raise MediaError(
                Reason.TRUNCATED_IMAGE,
                f"{what}: {image.format} of {image.width}x{image.height} and {counted(len(data), 'byte')} "
                f"does not decode: {type(error).__name__}: {error}",
            ) from error
        return _normalise(image, what)


def header_size(data: bytes, max_source_pixels: int, what: str = "image") -> tuple[int, int]:
    """Returns (width, height) as the header of an image file has them, before EXIF orientation.

    Args:
        data: The file's bytes.
        max_source_pixels: Larger images are rejected.
        what: As in :func:`decode_image`.

    Raises:
        MediaError: If the header cannot be read, or the image is not supported or too large.
    """
    if not data:
        raise _empty(what)
    with _pillow_limit(max_source_pixels):
        return _open(data, max_source_pixels, what).size


def shown_size(data: bytes, max_source_pixels: int, what: str = "image") -> tuple[int, int]:
    """Returns the (height, width) of an image file as it is shown, after EXIF orientation, in pixels.

    Of a JPEG the header has both. Other files are decoded: they may have the orientation after the pixels.

    Raises:
        MediaError: As :func:`decode_image`; damage after the header of a JPEG is not found.
    """
    if not data:
        raise _empty(what)
    with _pillow_limit(max_source_pixels):
        image = _open(data, max_source_pixels, what)
        if image.format == "JPEG":
            turned = (_orientation(image) or 1) >= _FIRST_TURNED
            return (image.width, image.height) if turned else (image.height, image.width)
    height, width = decode_image(data, max_source_pixels, what).memory.shape[:2]
    return height, width


def _empty(what: str) -> MediaError:
    return MediaError(Reason.EMPTY_IMAGE, f"{what}: the file has 0 bytes")


def _open(data: bytes, max_source_pixels: int, what: str) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(data))
    except Image.DecompressionBombError as error:
        # Only Pillow's text has the number of pixels; it has twice the limit, too, as Pillow only warns in between.
        found = re.search(r"\((\d+) pixels\)", str(error))
        pixels = found[1] if found else f"over {2 * max_source_pixels}"
        raise MediaError(Reason.IMAGE_TOO_LARGE, f"{what}: {pixels} pixels, {_over(max_source_pixels)}") from error
    except (UnidentifiedImageError, NotImplementedError):  # the second of a pixel format that a plugin does not know
        raise _not_opened(data, recognise(data), what) from None
    except MemoryError:
        raise
    except Exception as error:  # as in decode_image
        raise MediaError(
            Reason.TRUNCATED_IMAGE,
            f"{what}: the header of {counted(len(data), 'byte')} does not parse: {type(error).__name__}: {error}",
        ) from error
    if image.format is not None and image.format in IDENTIFIED_ONLY:
        raise _not_opened(data, IDENTIFIED_ONLY[image.format], what)
    if image.width < 1 or image.height < 1:
        raise MediaError(Reason.EMPTY_IMAGE, f"{what}: {image.format} of {image.width}x{image.height} pixels")
    if image.width * image.height > max_source_pixels:
        raise MediaError(
            Reason.IMAGE_TOO_LARGE,
            f"{what}: {image.width}x{image.height} = {image.width * image.height} pixels, {_over(max_source_pixels)}",
        )
    return image


def _over(max_source_pixels: int) -> str:
    return f"over the limit of {max_source_pixels} (--max-source-pixels)"


def _not_opened(data: bytes, found: Found | None, what: str) -> MediaError:
    size = counted(len(data), "byte")
    if found is None:
        head = data[:8].hex(" ")
        return MediaError(
            Reason.NOT_AN_IMAGE, f"{what}: {size}, not an image that can be opened; they begin with {head}"
        )
    verdict = "which is not supported" if found.reason is Reason.UNSUPPORTED_IMAGE else "not an image"
    return MediaError(found.reason, f"{what}: {found.name} ({size}), {verdict}. {found.remedy}.")


class _PillowLimit:
    """Sets Pillow's own decompression bomb check to the same limit (also for frames and tiles).

    The check is global to the process, so it stays until the last of several threads has decoded its image.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._undo = ExitStack()

    @contextmanager
    def __call__(self, max_source_pixels: int) -> Iterator[None]:
        with self._lock:
            if self._users == 0:
                self._undo.callback(setattr, Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
                self._undo.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")  # images between 1x and 2x the limit: this module raises for those
                Image.MAX_IMAGE_PIXELS = max_source_pixels
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._undo.close()


_pillow_limit = _PillowLimit()


def _normalise(image: Image.Image, what: str) -> DecodedImage:
    file_format, mode, size = image.format or "unknown", image.mode, image.size
    steps = []
    if _frames(image) > 1:
        steps.append("first_frame")  # Image.open selects frame 0
    if _orientation(image) not in (None, 1):
        image = ImageOps.exif_transpose(image)
        steps.append("exif")
    if image.mode.startswith(("I", "F")):
        image = Image.fromarray(_to_8_bit(np.asarray(image), image.mode, what), mode="L")
        steps.append("depth")
    if image.mode in _ALPHA_MODES or "transparency" in image.info:
        image = composite_on_white(image)
        steps.append("alpha")
    if image.mode != "RGB":
        image = image.convert("RGB")
        steps.append("mode")
    return DecodedImage(_memory(image), file_format, mode, size, tuple(steps))


def _frames(image: Image.Image) -> int:
    try:
        return int(getattr(image, "n_frames", 1))
    except Exception:  # of a frame after the first, such as a layer of a PSD, whose first is the whole picture
        return 1


def _memory(image: Image.Image) -> npt.NDArray[np.uint8]:
    """Returns the pixels of an RGB image: Pillow's own memory, four bytes per pixel, or else a copy of three."""
    if hasattr(image, "__arrow_c_array__"):  # Pillow 11.2
        try:
            # to_numpy imports pandas
            memory = np.asarray(np.from_dlpack(pa.array(image).flatten()), np.uint8)
        except ValueError:  # images over 16 MiB are in several blocks
            pass
        else:
            return memory.reshape(image.height, image.width, 4)
    return np.asarray(image)


def _orientation(image: Image.Image) -> int | None:
    try:
        value = image.getexif().get(_EXIF_ORIENTATION)
    except Exception:  # a damaged EXIF block is no reason to reject the image
        return None
    return value if value in range(1, 9) else None


def composite_on_white(image: Image.Image) -> Image.Image:
    """Returns an image with transparency as RGB on white."""
    rgba = image.convert("RGBA")
    white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, rgba).convert("RGB")


def _to_8_bit(values: npt.NDArray[np.generic], mode: str, what: str) -> npt.NDArray[np.uint8]:
    """Scales a deep grey image to 8 bit by the range of its values.

    16-bit (and 32-bit integers within 16 bits): ``round(v * 255 / 65535)``. Floats: 0..1, 0..255 or 0..65535,
    the smallest of these ranges that contains every value.

    Raises:
        MediaError: PIXEL_RANGE if no range contains the values.
    """
    wide = values.astype(np.float64)
    low, high = float(wide.min()), float(wide.max())
    if not (np.isfinite(wide).all() and low >= 0 and high <= 65535):
        raise MediaError(
            Reason.PIXEL_RANGE,
            f"{what}: mode {mode} with values from {low:g} to {high:g}; 0 to 65535 can be scaled to 8 bit",
        )
    if mode.startswith("F") and high <= 1.0:
        top = 1.0
    elif mode.startswith("F") and high <= 255.0:
        top = 255.0
    else:
        top = 65535.0
    return np.rint(wide * (255.0 / top)).astype(np.uint8)
