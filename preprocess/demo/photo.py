"""Turns flat, clean print into the file of a scan or photograph. The whole paper stays in the image.

All effects work on one band of brightness, from 0 (full ink, or the darkest spot of a table) to 255 (bare paper).
Colours are applied at the end, which is three to four times as fast as working in RGB.
"""

import io
import math
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageChops, ImageFilter

from vlmdata.preprocess.demo.page import Colour

MAX_SIZE = (2200, 3000)
"""Largest image: width and height in pixels."""
_TINTS: tuple[Colour, ...] = ((255, 255, 255), (250, 248, 242), (246, 240, 226), (252, 244, 206), (232, 240, 248))
# Darkest and lightest colour of a table, and the size of its grain across and down, in pixels.
_TABLES: tuple[tuple[Colour, Colour, tuple[int, int]], ...] = (
    ((58, 34, 18), (176, 124, 78), (260, 5)),  # wood
    ((34, 38, 44), (92, 96, 102), (3, 3)),  # slate
    ((150, 150, 152), (240, 238, 234), (300, 300)),  # marble
)
Camera = Literal["photo", "cut_out", "scan", "crisp", "clean"]
"""On a table; the same without the table; on a flatbed scanner; fresh print on a flatbed; the flat print itself."""
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


@dataclass(frozen=True, eq=False)
class Shot:
    """An image before colouring: brightness and the paper's mask (both mode L), and its colours.

    ``ink`` and ``tint`` are full ink and bare paper, ``ground`` the darkest and lightest colour around the paper.
    """

    brightness: Image.Image
    alpha: Image.Image
    ink: Colour
    tint: Colour
    ground: tuple[Colour, Colour]

    def colour(self) -> Image.Image:
        """Returns the image in mode RGB."""
        paper = _coloured(self.brightness, self.ink, self.tint)
        return Image.composite(paper, _coloured(self.brightness, *self.ground), self.alpha)

    def grey(self) -> Image.Image:
        """Returns the image in mode L."""
        return self.brightness.point([max(self.ink[0], v) for v in range(256)])


def _coloured(brightness: Image.Image, dark: Colour, light: Colour) -> Image.Image:
    indexed = brightness.copy()
    # A palette needs one pass over the image instead of one per band.
    indexed.putpalette([max(d, b * v // 255) for v in range(256) for d, b in zip(dark, light, strict=True)])
    return indexed.convert("RGB")


def shoot(paper: Image.Image, em: int, ink: Colour, camera: Camera, rng: Random, noise: np.random.Generator) -> Shot:
    """Photographs a flat print, black on white, with small noise on small letters (``em`` is their size in pixels).

    ``noise`` gives textures, ``rng`` all other random choices.
    """
    tint = rng.choice(_TINTS)
    if camera == "clean":
        return Shot(paper, Image.new("L", paper.size, 255), ink, (255, 255, 255), (ink, ink))
    if camera in ("crisp", "scan"):
        scene, alpha = _lay(paper, rng, 1.2, (0.0, 0.06))
        lid = rng.choice((255, 226, 52))
        return Shot(_noisy(scene, em, noise, 2.0), alpha, ink, tint, ((lid // 2,) * 3, (lid,) * 3))
    scene, alpha = _lay(_folded(paper, rng), rng, 4.0, (0.03, 0.14) if camera == "photo" else (0.0, 0.05))
    if camera == "cut_out":
        return Shot(scene, alpha, ink, tint, ((0, 0, 0), (0, 0, 0)))
    dark, light, (across, down) = rng.choice(_TABLES)
    table = _smooth(noise, scene.size, (max(2, scene.width // across), max(2, scene.height // down)), 30)
    shadow = ImageChops.offset(alpha.reduce(8), rng.randrange(-2, 4), rng.randrange(1, 4))
    shadow = shadow.filter(ImageFilter.BoxBlur(1.5)).point([255 - v * 2 // 3 for v in range(256)])
    scene = Image.composite(scene, ImageChops.multiply(table, shadow.resize(scene.size)), alpha)
    light_map = _smooth(noise, scene.size, rng.choice(((1, 2), (2, 1), (3, 4))), 180)
    return Shot(_noisy(ImageChops.multiply(scene, light_map), em, noise, 4.0), alpha, ink, tint, (dark, light))


def _lay(
    paper: Image.Image, rng: Random, degrees: float, margins: tuple[float, float]
) -> tuple[Image.Image, Image.Image]:
    """Places the paper, turned by at most so many degrees, with margins as a share of its width.

    Returns the scene, white around the paper, and the paper's mask, both mode L.
    """
    (width, height), angle = paper.size, math.radians(rng.uniform(-degrees, degrees))
    cos, sin, margin = math.cos(angle), math.sin(angle), 2 * rng.uniform(*margins) * width
    wide, high = width * cos + height * abs(sin) + margin, height * cos + width * abs(sin) + margin
    scale = min(1.0, MAX_SIZE[0] / wide, MAX_SIZE[1] / high)
    size, step, rise = (round(wide * scale), round(high * scale)), cos / scale, sin / scale
    # Position on the paper of each pixel of the image.
    left, top = (width - wide * cos - high * sin) / 2, (height - high * cos + wide * sin) / 2
    place = (step, rise, left, -rise, step, top)

    def seen(flat: Image.Image, around: int) -> Image.Image:
        return flat.transform(size, Image.Transform.AFFINE, place, Image.Resampling.BICUBIC, fillcolor=around)

    return seen(paper, 255), seen(Image.new("L", paper.size, 255), 0)


def _folded(paper: Image.Image, rng: Random) -> Image.Image:
    """Adds up to three folds: sharp shades across the paper that fade downwards."""
    levels = np.full((paper.height, 1), 255, np.uint8)
    for _ in range(rng.randrange(4)):
        shade = levels[rng.randrange(paper.height) :][: 16 + paper.height // 12]
        shade[:, 0] = 255 - np.linspace(rng.randrange(18, 60), 0, len(shade))
    return ImageChops.multiply(paper, Image.fromarray(levels).resize(paper.size))


def _smooth(noise: np.random.Generator, size: tuple[int, int], cells: tuple[int, int], low: int) -> Image.Image:
    """Draws a smooth map of ``size`` pixels, with random values from ``low`` to 255 at ``cells`` points."""
    grid = noise.integers(low, 256, (cells[1], cells[0]), dtype=np.uint8)
    return Image.fromarray(grid).resize(size, Image.Resampling.BILINEAR)


def _noisy(scene: Image.Image, em: int, noise: np.random.Generator, most: float) -> Image.Image:
    """Adds sensor noise of a standard deviation of ``most`` grey levels, less on small letters. One tile repeats."""
    tile = noise.normal(128, most * min(1.0, em / 22), (512, 512)).astype(np.uint8)
    grain = np.tile(tile, (-(-scene.height // 512), -(-scene.width // 512)))[: scene.height, : scene.width]
    return ImageChops.add(scene, Image.fromarray(grain), 1.0, -128)


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
