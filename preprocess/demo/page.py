"""A page before printing: letters in Pillow's fonts, its look, the placed texts, and the cursor that places them."""

import math
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from random import Random
from typing import Literal, NamedTuple

from PIL import Image, ImageChops, ImageDraw, ImageFont

_CELL = (6, 11)
"""Width and height of a letter of the bitmap font, in pixels."""
Align = Literal["left", "centre", "right"]
Colour = tuple[int, int, int]


@dataclass(frozen=True)
class Face:
    """A font at one size."""

    size: int  # em in pixels
    dots: bool = False  # true for the scaled bitmap font, False for Aileron
    bold: bool = False  # whether to draw every letter twice
    stretch: float = 1.0  # width factor of Aileron's letters

    @property
    def height(self) -> int:
        """Pixels from the top of the ascenders to the bottom of the descenders."""
        return round(self.size * (1.1 if self.dots else 1.25))

    def width(self, text: str) -> int:
        """Width of a text, in pixels."""
        length = len(text) * self.size * 0.6 if self.dots else _length(self.size, text) * self.stretch
        return math.ceil(length) + self._strike

    def mask(self, text: str) -> Image.Image:
        """Draws a text: mode L, ``width(text)`` by ``height`` pixels, 255 for full ink."""
        size = (self.width(text) - self._strike, self.height)
        font = _bitmap_font() if self.dots else _font(self.size)
        natural = (len(text) * _CELL[0], _CELL[1]) if self.dots else (math.ceil(_length(self.size, text)), size[1])
        mask = Image.new("L", natural)
        ImageDraw.Draw(mask).text((0, 0), text, fill=255, font=font)
        if self.dots:
            # Enlarge to squares first, so that smoothing affects only the edges.
            mask = mask.resize((natural[0] * 4, natural[1] * 4), Image.Resampling.NEAREST)
        mask = mask.resize(size, Image.Resampling.BOX if self.dots else Image.Resampling.BICUBIC)
        if not self.bold:
            return mask
        struck = Image.new("L", (size[0] + self._strike, size[1]))
        struck.paste(mask)
        return ImageChops.lighter(struck, ImageChops.offset(struck, self._strike, 0))

    @property
    def _strike(self) -> int:
        return max(1, round(self.size * 0.045)) if self.bold else 0


_font = cache(ImageFont.load_default)
_bitmap_font = cache(ImageFont.load_default_imagefont)


@lru_cache(maxsize=4096)
def _length(size: int, text: str) -> float:
    return _font(size).getlength(text)


class Shape(NamedTuple):
    """A kind of paper."""

    share: int  # number of rows of this kind in 32
    widths: tuple[int, int]  # pixels
    letters: tuple[int, int]  # per line
    counts: tuple[int, ...]  # numbers of items that suit it
    tallest: float = 2.3  # largest height / width; letters shrink to keep it
    two_columns: bool = False  # the figures are next to the items


SHAPES = {
    "usual": Shape(19, (530, 780), (34, 50), (1, 1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 10, 12, 15)),
    "small": Shape(3, (400, 480), (24, 30), (1, 1, 2, 3, 4, 5)),
    "strip": Shape(4, (380, 500), (26, 36), (10, 12, 15, 18, 22, 26), tallest=4.3),
    "wide": Shape(3, (820, 1150), (52, 68), (2, 3, 4, 5, 6, 8), tallest=0.9, two_columns=True),
    "medium": Shape(2, (900, 1200), (44, 60), (2, 4, 6, 9, 14)),
    "large": Shape(1, (1600, 1950), (52, 72), (3, 6, 10, 16)),
}
_INKS: tuple[Colour, ...] = ((18, 18, 20), (30, 28, 30), (45, 44, 48), (60, 58, 62), (38, 34, 84), (60, 40, 88))


@dataclass(frozen=True)
class Look:
    """Everything that determines the appearance of a page, given its text."""

    shape: Shape
    width: int  # of the paper, pixels
    margin: float  # share of the width
    face: Face  # body text, at the size to try first
    leading: float  # line distance / letter height
    items: Literal["columns", "below", "leaders"]
    heads: bool  # columns have headings
    rule: str  # separator: a character to repeat, "solid" or "none"
    header: Align
    scale: float  # largest size of the shop's name and the total, relative to the body
    code: Literal["bars", "matrix", "none"]
    ink: Colour

    def at(self, size: float, bold: bool = False) -> Face:
        """Returns the body's face at another size (em in pixels), optionally bold."""
        return replace(self.face, size=round(size), bold=bold or self.face.bold)


def choose_look(rng: Random, shape: Shape) -> Look:
    """Chooses a look for a kind of paper."""
    width, margin = rng.randrange(*shape.widths), rng.uniform(0.03, 0.08)
    dots = rng.random() < 0.35
    stretch = 1.0 if dots else rng.choice((0.78, 0.86, 1.0, 1.0, 1.0, 1.14))
    # A letter of Aileron is about half an em wide.
    size = width * (1 - 2 * margin) / (rng.randint(*shape.letters) * (0.6 if dots else 0.5 * stretch))
    return Look(
        shape=shape,
        width=width,
        margin=margin,
        face=Face(round(size), dots, not dots and rng.random() < 0.3, stretch),
        leading=rng.choice((1.0, 1.05, 1.15, 1.3)),
        items=rng.choice(("columns", "columns", "below", "leaders")),
        heads=rng.random() < 0.4,
        rule=rng.choice(("-", "-", "-", "=", ".", "*", "solid", "solid", "none")),
        header=rng.choice(("centre", "centre", "centre", "left")),
        scale=rng.choice((1.0, 1.2, 1.4, 1.6, 1.8, 2.0)),
        code=rng.choice(("none", "none", "none", "bars", "matrix")),
        ink=rng.choice(_INKS),
    )


class NoRoomError(Exception):
    """The text does not fit the width at this letter size. A smaller size may fit."""


@dataclass
class Page:
    """Printed texts, by upper left corners in pixels. ``texts`` are the strings to read, before wrapping."""

    width: int
    height: int = 0
    texts: list[str] = field(default_factory=list)
    runs: list[tuple[int, int, str, Face]] = field(default_factory=list)  # including leaders and rules
    pictures: list[tuple[int, int, Image.Image]] = field(default_factory=list)

    def print(self) -> Image.Image:
        """Draws black print on white paper, in mode L."""
        paper = Image.new("L", (self.width, self.height), 255)
        for x, y, mask in [*self.pictures, *((x, y, face.mask(text)) for x, y, text, face in self.runs)]:
            paper.paste(0, (x, y), mask)
        return paper


def wrap(text: str, face: Face, width: int) -> list[str]:
    """Breaks a text at its spaces into lines of at most ``width`` pixels; a NoRoomError if a word is wider."""
    lines: list[str] = []
    for word in text.split(" "):
        if lines and face.width(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        elif face.width(word) <= width:
            lines.append(word)
        else:
            raise NoRoomError(f"{word!r} is wider than {width} px")
    return lines


class Flow:
    """Places text downwards from ``y`` between the edges ``x0`` and ``x1`` of a page, in pixels."""

    def __init__(self, page: Page, x0: int, x1: int, y: int, leading: float) -> None:
        self.page, self.x0, self.x1, self.y, self.leading = page, x0, x1, y, leading

    def pitch(self, face: Face) -> int:
        """Line distance in pixels."""
        return round(face.height * self.leading)

    def put(self, x: int, width: int, text: str, face: Face, align: Align = "left", dy: int = 0) -> int:
        """Places a text at ``x`` within ``width`` pixels, wrapped, without moving down. Returns its height."""
        lines = wrap(text, face, width)
        for number, line in enumerate(lines):
            slack = width - face.width(line)
            left = x + {"left": 0, "centre": slack // 2, "right": slack}[align]
            self.mark(left, line, face, dy + number * self.pitch(face))
        self.page.texts.append(text)
        return len(lines) * self.pitch(face)

    def text(self, text: str, face: Face, align: Align = "left") -> None:
        """Places a paragraph over the whole width and moves below it."""
        self.y += self.put(self.x0, self.x1 - self.x0, text, face, align)

    def mark(self, x: int, text: str, face: Face, dy: int = 0) -> None:
        """Places characters on one line, unmodified. Without ``put``, they are not part of the text to read."""
        self.page.runs.append((x, self.y + dy, text, face))

    def pair(self, label: str, value: str | None, face: Face, leader: bool = False, inset: int = 0) -> None:
        """Places a label, wrapped, and its value at the right of its last line; moves below them."""
        start = self.x1 - (face.width(value) if value else 0)
        height = self.put(self.x0 + inset, start - self.x0 - inset - face.size * (2 if leader else 1), label, face)
        if value:
            (x, _, last, _), dy, gap = self.page.runs[-1], height - self.pitch(face), face.size // 3
            self.put(start, self.x1 - start, value, face, dy=dy)
            if leader:
                dots = repeated(".", face, start - x - face.width(last) - 2 * gap)
                self.mark(start - gap - face.width(dots), dots, face, dy)
        self.y += height

    def rule(self, kind: str, face: Face) -> None:
        """Places a separator over the whole width; see ``Look.rule``."""
        if kind == "solid":
            line = Image.new("L", (self.x1 - self.x0, max(1, face.size // 14)), 255)
            self.page.pictures.append((self.x0, self.y + self.pitch(face) // 2, line))
        elif kind != "none":
            self.mark(self.x0, repeated(kind, face, self.x1 - self.x0), face)
        self.y += self.pitch(face)


def repeated(sign: str, face: Face, width: int) -> str:
    """Repeats a character as often as fits in ``width`` pixels, at least once."""
    count = max(1, 16 * width // face.width(sign * 16))
    while count > 1 and face.width(sign * count) > width:
        count -= 1
    return sign * count
