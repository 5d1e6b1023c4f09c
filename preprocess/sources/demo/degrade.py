"""From flat, clean print to a scan or a photograph of it. The whole paper stays in the picture.

Everything up to the last step works on one band of brightness, 0 for full ink (or the darkest spot of a table) and
255 for bare paper (or the lightest); colours are looked up at the end. That is three to four times as fast as RGB.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter

from preprocess.sources.demo.draw import Drawing
from preprocess.sources.demo.geometry import Point, Pose, Size, flat_pose, tilted_pose
from preprocess.sources.demo.page import Picture
from preprocess.sources.demo.texture import TABLES, Colour, grain, profile, smooth_map, table_top

_TINTS: tuple[Colour, ...] = (
    (255, 255, 255),
    (250, 248, 242),
    (246, 240, 226),
    (238, 236, 232),
    (252, 244, 206),
    (244, 226, 228),
    (226, 236, 246),
)
_LIDS: tuple[Colour, ...] = ((255, 255, 255), (244, 244, 244), (226, 226, 224), (52, 52, 54))


@dataclass(frozen=True, eq=False)
class Shot:
    """A picture of a receipt before it is coloured.

    Attributes:
        brightness: mode L.
        alpha: mode L, 255 where the paper is; None where it is everywhere.
        pose: how the paper lies.
        ink: colour of full ink on the paper.
        tint: colour of bare paper.
        ground: darkest and lightest colour of what surrounds the paper.
        accents: pictures on the flat paper whose ink is of another colour.
    """

    brightness: Image.Image
    alpha: Image.Image | None
    pose: Pose
    ink: Colour
    tint: Colour
    ground: tuple[Colour, Colour]
    accents: tuple[Picture, ...]

    def colour(self) -> Image.Image:
        """The picture in mode RGB."""
        image = _inked(self.brightness, self.ink, self.tint)
        for picture in self.accents:
            assert picture.ink is not None
            window = self.pose.bounds(picture.box)
            flat = Image.new("L", self.pose.paper)
            flat.paste(picture.mask, picture.box)
            mask = self.pose.project(flat, Image.Resampling.BILINEAR, around=0, window=window)
            image.paste(_inked(self.brightness.crop(window), picture.ink, self.tint), window, mask)
        if self.alpha is None:
            return image
        dark, light = self.ground
        ground = _look_up(self.brightness, lambda v, band: dark[band] + (light[band] - dark[band]) * v // 255)
        return Image.composite(image, ground, self.alpha)

    def gray(self) -> Image.Image:
        """The picture in mode L, as a scanner without colour would have it."""
        dark = sum(self.ink) // 3
        return self.brightness.point([max(dark, v) for v in range(256)])


def _inked(brightness: Image.Image, ink: Colour, tint: Colour) -> Image.Image:
    """Colours paper: shaded ``tint``, and nowhere darker than the ink, whose colour shows where the print is."""
    return _look_up(brightness, lambda v, band: max(ink[band], tint[band] * v // 255))


def _look_up(brightness: Image.Image, level: Callable[[int, int], int]) -> Image.Image:
    """Mode RGB, from ``level(brightness, band)``."""
    indexed = brightness.copy()
    # A palette takes one pass over the picture instead of one per band.
    indexed.putpalette([level(v, band) for v in range(256) for band in range(3)])
    return indexed.convert("RGB")


Camera = Callable[[Drawing, Random, np.random.Generator], Shot]
"""Takes a picture of a drawing: (drawing, source of choices, source of textures)."""


def photograph(drawing: Drawing, rng: Random, noise: np.random.Generator) -> Shot:
    """Lays the paper on a table and takes a picture: creases, tilt, shadow, light, blur, noise."""
    pose = tilted_pose(drawing.size, rng, degrees=4.0, skew=0.012, margins=(0.03, 0.14))
    lying, alpha = _lay_down(drawing, pose, rng, noise)
    table, kind = table_top(rng, noise, pose.size)
    scene = Image.composite(lying, ImageChops.multiply(table, shadow(pose, rng)), alpha)
    scene = ImageChops.multiply(scene, light(rng, noise, pose.size))
    scene = speckle(soften(scene, drawing.em, rng, 0.03), drawing.em, rng, noise, 7.0)
    return _shot(drawing, scene, alpha, pose, rng.choice(_TINTS), TABLES[kind])


def cut_out(drawing: Drawing, rng: Random, noise: np.random.Generator) -> Shot:
    """The tilted paper alone; around it the picture is black."""
    pose = tilted_pose(drawing.size, rng, degrees=5.0, skew=0.01, margins=(0.0, 0.05))
    lying, alpha = _lay_down(drawing, pose, rng, noise)
    return _shot(drawing, lying, alpha, pose, rng.choice(_TINTS), ((0, 0, 0), (0, 0, 0)))


def scan(drawing: Drawing, rng: Random, noise: np.random.Generator) -> Shot:
    """Puts the paper on a flatbed: nearly straight, an even light, a plain lid around it."""
    return _scan(drawing, fade(drawing.paper(), rng, noise), 0.02, rng, noise)


def crisp_scan(drawing: Drawing, rng: Random, noise: np.random.Generator) -> Shot:
    """A scan of fresh print, in focus: what is left of it when all greys become black or white is legible."""
    return _scan(drawing, drawing.paper(), 0.0, rng, noise)


def _scan(drawing: Drawing, paper: Image.Image, blur: float, rng: Random, noise: np.random.Generator) -> Shot:
    pose = tilted_pose(drawing.size, rng, degrees=rng.choice((0.0, 0.0, 1.2)), skew=0.0, margins=(0.0, 0.06))
    alpha = pose.region(_corners(pose.paper))
    scene = Image.composite(_project(paper, pose, drawing.em), Image.new("L", pose.size, 255), alpha)
    scene = speckle(soften(scene, drawing.em, rng, blur), drawing.em, rng, noise, 4.0)
    lid = rng.choice(_LIDS)
    dark = (lid[0] // 2, lid[1] // 2, lid[2] // 2)
    return _shot(drawing, scene, alpha, pose, rng.choice(_TINTS[:4]), (dark, lid))


def clean(drawing: Drawing, rng: Random, noise: np.random.Generator) -> Shot:
    """The flat print as it is, as an electronic receipt would be; no chance in it."""
    del rng, noise
    return _shot(drawing, drawing.paper(), None, flat_pose(drawing.size), (255, 255, 255), ((0, 0, 0),) * 2)


def _shot(
    drawing: Drawing,
    scene: Image.Image,
    alpha: Image.Image | None,
    pose: Pose,
    tint: Colour,
    ground: tuple[Colour, Colour],
) -> Shot:
    return Shot(scene, alpha, pose, drawing.ink, tint, ground, drawing.accents)


def _corners(size: Size) -> list[Point]:
    return list(flat_pose(size).quad)


def _lay_down(drawing: Drawing, pose: Pose, rng: Random, noise: np.random.Generator) -> tuple[Image.Image, Image.Image]:
    """The worn paper in its pose, and where it is."""
    paper = crease(fade(drawing.paper(), rng, noise), rng)
    return _project(paper, pose, drawing.em), pose.region(torn_edge(drawing.size, rng))


def _project(paper: Image.Image, pose: Pose, em: int) -> Image.Image:
    # Bicubic takes twice as long; large letters do without.
    return pose.project(paper, Image.Resampling.BICUBIC if em < 20 else Image.Resampling.BILINEAR)


def fade(paper: Image.Image, rng: Random, noise: np.random.Generator) -> Image.Image:
    """Weakens the ink here and there, as an old or badly set printer does; never below 60 %."""
    kind = rng.choice(("none", "clouds", "streaks", "side"))
    if kind == "none":
        return paper
    if kind == "clouds":
        loss = smooth_map(noise, paper.size, (5, 9), 0, 90)
    elif kind == "streaks":
        loss = profile([rng.choice((0, 0, 0, 65)) for _ in range(120)], paper.size, vertical=False)
    else:
        loss = profile([0, 5, 25, 90], paper.size, vertical=False)
    return ImageChops.screen(paper, loss)


def crease(paper: Image.Image, rng: Random) -> Image.Image:
    """Folds: a sharp shade across the paper that fades away on one side."""
    height, folds = paper.height, rng.choice((0, 0, 1, 2, 3))
    if folds == 0:
        return paper
    values = [255] * height
    for _ in range(folds):
        at, reach = rng.randrange(height), max(8, rng.randrange(height // 30, height // 8))
        depth, side = rng.randrange(18, 60), rng.choice((-1, 1))
        for step in range(reach):
            y = at + side * step
            if 0 <= y < height:
                values[y] = min(values[y], 255 - depth * (reach - step) // reach)
    return ImageChops.multiply(paper, profile(values, paper.size, vertical=True))


def torn_edge(size: Size, rng: Random) -> list[Point]:
    """The paper's outline: straight, or torn off along teeth at top and bottom."""
    width, height = size
    if rng.random() < 0.5:
        return _corners(size)
    teeth = rng.choice((40, 60, 90))
    depth = max(2.0, width / teeth / 2)
    upper = [(width * k / (2 * teeth), depth * (k % 2)) for k in range(2 * teeth + 1)]
    return [*upper, *((x, height - y) for x, y in reversed(upper))]


def shadow(pose: Pose, rng: Random) -> Image.Image:
    """What the paper leaves of the light on the table around it, to multiply with."""
    shrink = 8
    small = (max(2, pose.size[0] // shrink), max(2, pose.size[1] // shrink))
    dx, dy = rng.uniform(-2, 3), rng.uniform(0.5, 3)
    dark = Image.new("L", small, 255)
    points = [(x / shrink + dx, y / shrink + dy) for x, y in pose.quad]
    ImageDraw.Draw(dark).polygon(points, fill=rng.randrange(40, 120))
    return dark.filter(ImageFilter.BoxBlur(1.5)).resize(pose.size, Image.Resampling.BILINEAR)


def light(rng: Random, noise: np.random.Generator, size: Size) -> Image.Image:
    """Uneven lighting, to multiply with: a gradient or patches."""
    low = rng.randrange(150, 235)
    if rng.random() < 0.5:
        return smooth_map(noise, size, (3, 4), low, 255)
    return profile([low, 255] if rng.random() < 0.5 else [255, low], size, vertical=rng.random() < 0.5)


def soften(scene: Image.Image, em: int, rng: Random, most: float) -> Image.Image:
    """Blurs by up to ``most`` em, or not at all."""
    radius = rng.choice((0.0, 0.0, 0.0, 0.5, 1.0)) * most * em
    return scene.filter(ImageFilter.BoxBlur(radius)) if radius >= 0.2 else scene


def speckle(scene: Image.Image, em: int, rng: Random, noise: np.random.Generator, most: float) -> Image.Image:
    """Adds sensor noise of up to ``most`` grey levels, and sometimes dust; less noise on small letters."""
    sigma = rng.choice((0.0, 0.3, 0.6, 1.0)) * most * min(1.0, em / 22)
    if sigma > 0:
        scene = ImageChops.add(scene, grain(noise, scene.size, sigma), 1.0, -128)
    if rng.random() < 0.2:
        pixels = np.array(scene)
        count = pixels.size // 2500
        ys, xs = noise.integers(0, pixels.shape[0], count), noise.integers(0, pixels.shape[1], count)
        pixels[ys, xs] = noise.integers(0, 2, count, dtype=np.uint8) * np.uint8(255)
        scene = Image.fromarray(pixels)
    return scene
