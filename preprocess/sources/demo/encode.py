"""Turns a drawing into a file of some kind: colour mode, container, orientation."""

import dataclasses
import io
from dataclasses import dataclass
from random import Random

import numpy as np
from PIL import Image

from preprocess.sources.demo import degrade
from preprocess.sources.demo.draw import Drawing

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
"""What undoes each EXIF orientation's own correction."""

_ORIENTATION_TAG = 0x0112

KINDS: dict[str, int] = {
    "jpeg_photo": 11,
    "jpeg_scan": 4,
    "jpeg_gray": 3,
    "jpeg_cmyk": 1,
    "jpeg_exif": 2,
    "png_rgb": 2,
    "png_palette": 2,
    "png_bilevel": 2,
    "png_cut_out": 1,
    "png_ink": 1,
    "png_gray16": 1,
    "webp": 2,
}
"""Kinds of file and how many of every 32 rows are of each."""


@dataclass(frozen=True)
class EncodedImage:
    """An image file.

    Attributes:
        data: the file.
        format: Pillow's name, "JPEG", "PNG" or "WEBP".
        size: width and height as stored, before any EXIF rotation.
        mode: Pillow's mode of the stored pixels.
        orientation: EXIF orientation, 1 when upright.
    """

    data: bytes
    format: str
    size: tuple[int, int]
    mode: str
    orientation: int = 1


def encode(drawing: Drawing, kind: str, rng: Random, noise: np.random.Generator) -> EncodedImage:
    """Degrades a drawing as suits the kind of file, and writes that file.

    Args:
        drawing: flat print.
        kind: a key of ``KINDS``.
        rng: chooses effects and quality.
        noise: source of textures.
    """
    if kind == "png_ink":
        return _ink_on_nothing(drawing)
    shot = _camera(kind, rng)(drawing, rng, noise)
    # Fine print does not survive coarse quantisation.
    quality = rng.randint(45 if drawing.em >= 22 else 68, 94)
    if kind == "jpeg_gray":
        return _save(shot.gray(), "JPEG", quality=quality)
    if kind == "png_bilevel":
        # Thin strokes hardly reach black: the threshold lies near white.
        limit = rng.randrange(165, 195)
        levels = shot.brightness.point([255 * (v >= limit) for v in range(256)])
        return _save(levels.convert("1"), "PNG")
    if kind == "png_gray16":
        return _save(_gray16(shot.gray()), "PNG", compress_level=1)
    if kind == "png_cut_out":
        return _cut_out(shot)
    image = shot.colour()
    if kind in ("jpeg_photo", "jpeg_scan"):
        return _save(image, "JPEG", quality=quality, subsampling=rng.choice((0, 2)))
    if kind == "jpeg_cmyk":
        return _save(image.convert("CMYK"), "JPEG", quality=max(quality, 75))
    if kind == "jpeg_exif":
        return _save_turned(image, rng.choice((3, 3, 6, 6, 6, 8, 8, 8, 2, 4, 5, 7)), quality)
    if kind == "png_rgb":
        return _save(image, "PNG", compress_level=1)
    if kind == "png_palette":
        colours = rng.choice((16, 64, 256))
        reduced = image.quantize(colours, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        return _save(reduced, "PNG", compress_level=3)
    if kind == "webp":
        return _save(image, "WEBP", quality=max(quality, 60), method=0)
    raise ValueError(f"unknown kind of file {kind!r}; known: {', '.join(KINDS)}")


def _camera(kind: str, rng: Random) -> degrade.Camera:
    if kind in ("jpeg_photo", "jpeg_cmyk", "jpeg_exif", "webp"):
        return degrade.photograph
    if kind == "png_cut_out":
        return degrade.cut_out
    if kind == "png_bilevel":
        return degrade.crisp_scan
    if kind in ("png_rgb", "png_palette") and rng.random() < 0.5:
        return degrade.clean
    return degrade.scan


def _save(image: Image.Image, container: str, orientation: int = 1, **options: object) -> EncodedImage:
    buffer = io.BytesIO()
    image.save(buffer, container, **options)
    return EncodedImage(buffer.getvalue(), container, image.size, image.mode, orientation)


def _save_turned(image: Image.Image, orientation: int, quality: int) -> EncodedImage:
    exif = Image.Exif()
    exif[_ORIENTATION_TAG] = orientation
    return _save(image.transpose(_TURNS[orientation]), "JPEG", orientation, quality=quality, exif=exif)


def _cut_out(shot: degrade.Shot) -> EncodedImage:
    """The paper with nothing around it; black where alpha is 0, so that dropping alpha shows."""
    assert shot.alpha is not None
    # Paper also under its half-transparent edge: blended with black, that would be a dark seam.
    image = dataclasses.replace(shot, alpha=None).colour()
    image.paste((0, 0, 0), (0, 0), shot.alpha.point([255 * (v == 0) for v in range(256)]))
    image.putalpha(shot.alpha)
    return _save(image, "PNG", compress_level=1)


def _ink_on_nothing(drawing: Drawing) -> EncodedImage:
    """Dark ink on fully transparent paper: unreadable to whoever drops the alpha channel."""
    image = Image.new("RGBA", drawing.size, (*drawing.ink, 0))
    for picture in drawing.accents:
        image.paste((*(picture.ink or drawing.ink), 0), picture.box)
    image.putalpha(Image.fromarray(drawing.coverage))
    return _save(image, "PNG", compress_level=6)


def _gray16(levels: Image.Image) -> Image.Image:
    """Mode I;16: grey levels spread over the full 16 bits."""
    return Image.fromarray(np.asarray(levels).astype(np.uint16) * np.uint16(257))
