"""Writes a print as an image file: colour mode, container, orientation."""

import io
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from PIL import Image

from preprocess.demo.page import Colour
from preprocess.demo.photo import Camera, shoot

KINDS: dict[str, int] = {
    "jpeg_photo": 11,
    "jpeg_scan": 4,
    "jpeg_grey": 3,
    "jpeg_cmyk": 1,
    "jpeg_exif": 2,
    "png_rgb": 2,
    "png_palette": 2,
    "png_bilevel": 2,
    "png_cut_out": 1,
    "png_ink": 1,
    "png_grey16": 1,
    "webp_photo": 2,
}
"""Kinds of file, and the number of each in 32 rows."""
_CAMERAS: dict[str, Camera] = {"png_cut_out": "cut_out", "png_bilevel": "crisp"}
_CAMERAS |= dict.fromkeys(("jpeg_scan", "jpeg_grey", "png_grey16"), "scan")
_TURNS = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
"""Inverses of the corrections of EXIF orientations."""
_ORIENTATION_TAG = 0x0112


@dataclass(frozen=True)
class DemoImage:
    """An encoded image: Pillow's container name, and the size in pixels after EXIF rotation."""

    data: bytes
    container: str
    upright: tuple[int, int]


def encode(paper: Image.Image, em: int, ink: Colour, kind: str, rng: Random, noise: np.random.Generator) -> DemoImage:
    """Photographs a black print on white in a way that suits the kind of file, and encodes the file.

    ``em`` is the size of the letters in pixels, ``kind`` a key of ``KINDS``.
    """
    # Coarse quantisation would destroy fine print.
    quality = rng.randint(45 if em >= 22 else 68, 94)
    container = kind.split("_")[0].upper()
    options: dict[str, Any] = {
        "JPEG": {"quality": quality},
        "PNG": {"compress_level": 1},
        "WEBP": {"quality": max(quality, 60), "method": 0},
    }[container]
    image = _picture(paper, em, ink, kind, rng, noise)
    upright = image.size
    if kind == "jpeg_exif":
        orientation = rng.choice(list(_TURNS))
        options["exif"] = Image.Exif()
        options["exif"][_ORIENTATION_TAG] = orientation
        image = image.transpose(_TURNS[orientation])
    buffer = io.BytesIO()
    image.save(buffer, container, **options)
    return DemoImage(buffer.getvalue(), container, upright)


def _picture(
    paper: Image.Image, em: int, ink: Colour, kind: str, rng: Random, noise: np.random.Generator
) -> Image.Image:
    """Returns the image in the mode of its kind of file."""
    if kind == "png_ink":  # on fully transparent paper: unreadable if the alpha channel is dropped
        image = Image.new("RGB", paper.size, ink)
        image.putalpha(paper.point([255 - v for v in range(256)]))
        return image
    clean = kind in ("png_rgb", "png_palette") and rng.random() < 0.5
    shot = shoot(paper, em, ink, "clean" if clean else _CAMERAS.get(kind, "photo"), rng, noise)
    if kind == "png_bilevel":
        # Thin strokes hardly reach black, so the threshold is near white.
        limit = rng.randrange(165, 195)
        return shot.brightness.point([255 * (v >= limit) for v in range(256)], "1")
    if kind == "png_grey16":
        return Image.fromarray(np.asarray(shot.grey()).astype(np.uint16) * np.uint16(257))
    if kind == "jpeg_grey":
        return shot.grey()
    image = shot.colour()
    if kind == "png_cut_out":
        image.putalpha(shot.alpha)
    if kind == "png_palette":
        return image.quantize(rng.choice((16, 64, 256)), Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    return image.convert("CMYK") if kind == "jpeg_cmyk" else image
