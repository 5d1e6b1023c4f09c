"""Turns flat, clean print into a scan or photograph. The whole paper stays in the image.

All effects work on one band of brightness, from 0 (full ink, or the darkest spot of a table) to 255 (bare paper).
Colours are applied at the end, which is three to four times as fast as working in RGB.
"""

import math
from dataclasses import dataclass
from random import Random
from typing import Literal

import numpy as np
from PIL import Image, ImageChops, ImageFilter, ImageOps

from preprocess.demo.page import Colour

MAX_SIZE = (2200, 3000)
"""Largest image: width and height in pixels."""
_TINTS: tuple[Colour, ...] = ((255, 255, 255), (250, 248, 242), (246, 240, 226), (252, 244, 206), (232, 240, 248))
# Darkest and lightest colour of a table, and the size of its grain across and down, in pixels.
_TABLES: tuple[tuple[Colour, Colour, tuple[int, int]], ...] = (
    ((58, 34, 18), (176, 124, 78), (260, 5)),  # wood
    ((140, 108, 74), (214, 188, 150), (5, 260)),  # pale wood
    ((34, 38, 44), (92, 96, 102), (3, 3)),  # slate
    ((20, 32, 56), (66, 84, 118), (3, 3)),  # cloth
    ((150, 150, 152), (240, 238, 234), (300, 300)),  # marble
)
Camera = Literal["photo", "cut_out", "scan", "crisp", "clean"]
"""On a table; the same without the table; on a flatbed scanner; fresh print on a flatbed; the flat print itself."""


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
    """Photographs a flat print.

    Args:
        paper: Black print on white, mode L.
        em: Size of its letters in pixels: small letters get less blur and noise.
        ink: Colour of the print.
        camera: Way of taking the image.
        rng: Source of random choices except textures.
        noise: Source of textures.
    """
    tint = rng.choice(_TINTS)
    if camera == "clean":
        return Shot(paper, Image.new("L", paper.size, 255), ink, (255, 255, 255), (ink, ink))
    if camera in ("crisp", "scan"):
        paper = _fade(paper, rng, noise) if camera == "scan" else paper
        scene, alpha = _lay(paper, em, rng, rng.choice((0.0, 0.0, 1.2)), 0.0, (0.0, 0.06))
        lid = rng.choice((255, 244, 226, 52))
        return Shot(_sense(scene, em, rng, noise, 4.0), alpha, ink, tint, ((lid // 2,) * 3, (lid,) * 3))
    paper = _crease(_fade(paper, rng, noise), rng)
    scene, alpha = _lay(paper, em, rng, 4.0, 0.02, (0.03, 0.14) if camera == "photo" else (0.0, 0.05))
    if camera == "cut_out":
        return Shot(scene, alpha, ink, tint, ((0, 0, 0), (0, 0, 0)))
    dark, light, (across, down) = rng.choice(_TABLES)
    table = _smooth(noise, scene.size, (max(2, scene.width // across), max(2, scene.height // down)), 30)
    scene = Image.composite(scene, ImageChops.multiply(table, _shadow(alpha, rng)), alpha)
    scene = ImageChops.multiply(scene, _smooth(noise, scene.size, rng.choice(((1, 2), (2, 1), (3, 4))), 180))
    return Shot(_sense(scene, em, rng, noise, 7.0), alpha, ink, tint, (dark, light))


def _lay(
    paper: Image.Image, em: int, rng: Random, degrees: float, skew: float, margins: tuple[float, float]
) -> tuple[Image.Image, Image.Image]:
    """Places the paper, turned and skewed by at most these amounts, with margins as a share of its width.

    Returns:
        The scene, white around the paper, and the paper's mask, both mode L.
    """
    width, height = paper.size
    margin, angle = rng.uniform(*margins) * width, math.radians(rng.uniform(-degrees, degrees))
    cos, sin = math.cos(angle), math.sin(angle)
    wide, high = width * cos + height * abs(sin) + 2 * margin, height * cos + width * abs(sin) + 2 * margin
    scale = min(1.0, MAX_SIZE[0] / wide, MAX_SIZE[1] / high)
    size = (round(wide * scale), round(high * scale))
    if not degrees and scale == 1.0:
        scene, alpha = Image.new("L", size, 255), Image.new("L", size)
        at = ((size[0] - width) // 2, (size[1] - height) // 2)
        scene.paste(paper, at)
        alpha.paste(255, (*at, at[0] + width, at[1] + height))
        return scene, alpha
    # Position of each image corner on the paper, in pixels. Moving it outwards keeps the paper inside.
    corners: list[float] = []
    for right, lower in ((-0.5, -0.5), (-0.5, 0.5), (0.5, 0.5), (0.5, -0.5)):
        x, y = right * (wide + rng.uniform(0, skew) * width), lower * (high + rng.uniform(0, skew) * width)
        corners += [width / 2 + cos * x + sin * y, height / 2 - sin * x + cos * y]
    # Bicubic takes twice as long, and large letters do not need it.
    how = Image.Resampling.BICUBIC if em < 18 else Image.Resampling.BILINEAR
    scene = _seen(paper, size, corners, how, 255)
    # The mask has no detail, so a quarter of its pixels is enough.
    mask = Image.new("L", (width // 2, height // 2), 255)
    half = (-(-size[0] // 2), -(-size[1] // 2))
    mask = _seen(mask, half, [value / 2 for value in corners], Image.Resampling.BILINEAR, 0)
    return scene, mask.resize(size, Image.Resampling.BILINEAR)


def _seen(
    flat: Image.Image, size: tuple[int, int], corners: list[float], how: Image.Resampling, around: int
) -> Image.Image:
    """Maps ``corners`` on a flat image to the corners of an image of ``size`` pixels, with a grey surrounding."""
    # The border allows interpolation at the edge.
    framed = ImageOps.expand(flat, 1, around)
    corners = [value + 1 for value in corners]
    return framed.transform(size, Image.Transform.QUAD, corners, how, fillcolor=around)


def _smooth(noise: np.random.Generator, size: tuple[int, int], cells: tuple[int, int], low: int) -> Image.Image:
    """Draws a smooth map of ``size`` pixels, with random values from ``low`` to 255 at ``cells`` points."""
    grid = noise.integers(low, 256, (cells[1], cells[0]), dtype=np.uint8)
    return Image.fromarray(grid).resize(size, Image.Resampling.BILINEAR)


def _fade(paper: Image.Image, rng: Random, noise: np.random.Generator) -> Image.Image:
    """Weakens the ink in clouds, streaks or to one side, as old printers do, by at most a third, or not at all."""
    cells = rng.choice((None, (5, 9), (60, 1), (2, 1)))
    if cells is None:
        return paper
    loss = _smooth(noise, paper.size, cells, 0).point([v // 3 for v in range(256)])
    return ImageChops.screen(paper, loss)


def _crease(paper: Image.Image, rng: Random) -> Image.Image:
    """Adds up to three folds: sharp shades across the paper that fade downwards."""
    levels = [255] * paper.height
    for _ in range(rng.choice((0, 0, 1, 2, 3))):
        at, depth = rng.randrange(paper.height), rng.randrange(18, 60)
        reach = min(rng.randrange(8, 16 + paper.height // 10), paper.height - at)
        levels[at : at + reach] = [255 - depth * (reach - step) // reach for step in range(reach)]
    column = Image.frombytes("L", (1, paper.height), bytes(levels))
    return ImageChops.multiply(paper, column.resize(paper.size)) if min(levels) < 255 else paper


def _shadow(alpha: Image.Image, rng: Random) -> Image.Image:
    """Returns the shadow factor of the paper on the table around it."""
    depth = rng.randrange(140, 220)
    small = ImageChops.offset(alpha.reduce(8), rng.randrange(-2, 4), rng.randrange(1, 4))
    small = small.filter(ImageFilter.BoxBlur(1.5)).point([255 - v * depth // 255 for v in range(256)])
    return small.resize(alpha.size, Image.Resampling.BILINEAR)


def _sense(scene: Image.Image, em: int, rng: Random, noise: np.random.Generator, most: float) -> Image.Image:
    """Blurs a little, and adds sensor noise of a standard deviation of up to ``most`` grey levels."""
    radius = rng.choice((0.0, 0.0, 0.0, 0.5, 1.0)) * 0.03 * em
    scene = scene.filter(ImageFilter.BoxBlur(radius)) if radius >= 0.2 else scene
    sigma = rng.choice((0.0, 0.3, 0.6, 1.0)) * most * min(1.0, em / 22)
    if sigma == 0:
        return scene
    # The sum of three uniform bytes has a standard deviation of 128 and is nearly normal. One tile is repeated.
    total = noise.integers(0, 256, (3, 512, 512), dtype=np.uint8).sum(axis=0, dtype=np.int16) - 382
    tile = (total * round(sigma * 8) // 1024 + 128).astype(np.uint8)
    grain = np.tile(tile, (-(-scene.height // 512), -(-scene.width // 512)))[: scene.height, : scene.width]
    return ImageChops.add(scene, Image.fromarray(grain), 1.0, -128)
