"""Where flat paper comes to lie in a picture."""

import math
from dataclasses import dataclass
from random import Random

from PIL import Image, ImageDraw

Size = tuple[int, int]
Point = tuple[float, float]
Box = tuple[int, int, int, int]
"""Left, top, right, bottom, pixels."""
Quad = tuple[Point, Point, Point, Point]
"""Upper left, upper right, lower right and lower left corner, pixels."""
MAX_SIZE: Size = (2200, 3000)
"""Largest picture, (width, height) in pixels."""
_BORDER = 2


@dataclass(frozen=True)
class Pose:
    """Flat paper of ``paper`` pixels, seen as ``quad`` in a picture of ``size`` pixels."""

    paper: Size
    quad: Quad
    size: Size

    @property
    def shift(self) -> tuple[int, int] | None:
        """By how many whole pixels the paper is moved, where nothing else is done to it."""
        dx, dy = self.quad[0]
        moved = tuple((x + dx, y + dy) for x, y in flat_pose(self.paper).quad)
        return (int(dx), int(dy)) if moved == self.quad and dx == int(dx) and dy == int(dy) else None

    def _matrix(self) -> tuple[float, float, float, float, float, float, float, float]:
        """Row by row, the map from the unit square to the quad; its last entry is 1 (Heckbert 1989)."""
        (x0, y0), (x1, y1), (x2, y2), (x3, y3) = self.quad
        dx1, dx2, sx = x1 - x2, x3 - x2, x0 - x1 + x2 - x3
        dy1, dy2, sy = y1 - y2, y3 - y2, y0 - y1 + y2 - y3
        area = dx1 * dy2 - dx2 * dy1
        g, h = (sx * dy2 - dx2 * sy) / area, (dx1 * sy - sx * dy1) / area
        return x1 - x0 + g * x1, x3 - x0 + h * x3, x0, y1 - y0 + g * y1, y3 - y0 + h * y3, y0, g, h

    def to_picture(self, point: Point) -> Point:
        """Maps a point on the flat paper (pixels) to the picture."""
        a, b, c, d, e, f, g, h = self._matrix()
        u, v = point[0] / self.paper[0], point[1] / self.paper[1]
        depth = g * u + h * v + 1
        return (a * u + b * v + c) / depth, (d * u + e * v + f) / depth

    def project(
        self, paper: Image.Image, how: Image.Resampling, around: int = 255, window: Box | None = None
    ) -> Image.Image:
        """The paper as it comes to lie in the picture.

        Args:
            paper: mode L.
            how: interpolation.
            around: what continues the paper beyond its edges, a grey level; far from them it is arbitrary.
            window: box of the picture to give, by default all of it.
        """
        left, top, right, bottom = window or (0, 0, *self.size)
        shift = self.shift
        if shift is not None:
            canvas = Image.new("L", (right - left, bottom - top), around)
            canvas.paste(paper, (shift[0] - left, shift[1] - top))
            return canvas
        # The border gives the pixels on the paper's edge something to be interpolated from.
        framed = Image.new("L", (paper.width + 2 * _BORDER, paper.height + 2 * _BORDER), around)
        framed.paste(paper, (_BORDER, _BORDER))
        a, b, c, d, e, f, g, h = self._matrix()
        # The inverse map is the adjugate, up to a factor.
        back = (
            (e - f * h, c * h - b, b * f - c * e),
            (f * g - d, a - c * g, c * d - a * f),
            (d * h - e * g, b * g - a * h, a * e - b * d),
        )
        u, v, depth = ((p, q, r + p * left + q * top) for p, q, r in back)
        across = [self.paper[0] * value + _BORDER * w for value, w in zip(u, depth, strict=True)]
        down = [self.paper[1] * value + _BORDER * w for value, w in zip(v, depth, strict=True)]
        coefficients = [value / depth[2] for value in (*across, *down, *depth[:2])]
        return framed.transform((right - left, bottom - top), Image.Transform.PERSPECTIVE, coefficients, how)

    def bounds(self, box: Box) -> Box:
        """The smallest box of the picture around a box of the paper."""
        x0, y0, x1, y1 = box
        seen = [self.to_picture(point) for point in ((x0, y0), (x1, y0), (x1, y1), (x0, y1))]
        xs, ys = [x for x, _ in seen], [y for _, y in seen]
        right, bottom = min(self.size[0], math.ceil(max(xs))), min(self.size[1], math.ceil(max(ys)))
        return max(0, math.floor(min(xs))), max(0, math.floor(min(ys))), right, bottom

    def region(self, outline: list[Point]) -> Image.Image:
        """A mask (mode L, smooth edges) of a polygon given on the flat paper."""
        width, height = self.size
        mask = Image.new("L", (width * 2, height * 2))
        points = [(2 * x, 2 * y) for x, y in map(self.to_picture, outline)]
        ImageDraw.Draw(mask).polygon(points, fill=255)
        return mask.reduce(2)


def flat_pose(size: Size) -> Pose:
    """The paper is the picture."""
    width, height = float(size[0]), float(size[1])
    return Pose(size, ((0.0, 0.0), (width, 0.0), (width, height), (0.0, height)), size)


def tilted_pose(paper: Size, rng: Random, degrees: float, skew: float, margins: tuple[float, float]) -> Pose:
    """Chooses how the paper lies, and a picture that holds all of it.

    Args:
        paper: size of the paper, pixels.
        rng: source of chance.
        degrees: greatest rotation.
        skew: greatest displacement of a corner, as a share of the paper's shorter side.
        margins: least and greatest free border on each side, as a share of the paper's width.

    Returns:
        A pose in a picture of at most ``MAX_SIZE``.
    """
    width, height = paper
    angle = math.radians(rng.uniform(-degrees, degrees))
    # A tall strip turned by a few degrees would need a picture much wider than itself.
    angle *= min(1.0, 2.0 * width / height)
    cosine, sine = math.cos(angle), math.sin(angle)
    reach = skew * min(paper)
    corners = []
    for x, y in ((0, 0), (width, 0), (width, height), (0, height)):
        dx, dy = rng.uniform(-reach, reach), rng.uniform(-reach, reach)
        corners.append((x * cosine - y * sine + dx, x * sine + y * cosine + dy))
    left, top, right, bottom = (round(rng.uniform(*margins) * width) for _ in range(4))
    x0, y0 = min(x for x, _ in corners) - left, min(y for _, y in corners) - top
    full_width = max(x for x, _ in corners) + right - x0
    full_height = max(y for _, y in corners) + bottom - y0
    scale = min(1.0, MAX_SIZE[0] / full_width, MAX_SIZE[1] / full_height)
    a, b, c, d = (((x - x0) * scale, (y - y0) * scale) for x, y in corners)
    # Rounded first: sines that differ in the last bit must not decide about a row of pixels.
    size = (math.ceil(round(full_width * scale, 3)), math.ceil(round(full_height * scale, 3)))
    return Pose(paper, (a, b, c, d), size)
