"""A page of paper before any ink: positioned text, lines and pictures, and the cursor that places them."""

from dataclasses import dataclass, field
from typing import Literal

from PIL import Image

from preprocess.sources.demo.glyphs import FaceSpec, face

Align = Literal["left", "centre", "right"]


class NoRoomError(Exception):
    """The content does not fit the width at this letter size; a smaller one may do."""


@dataclass(frozen=True)
class Run:
    """Text on one line; ``(x, y)`` is the upper left corner of its box, in pixels."""

    x: int
    y: int
    text: str
    spec: FaceSpec

    @property
    def box(self) -> tuple[int, int, int, int]:
        """Left, top, right, bottom."""
        letters = face(self.spec)
        return self.x, self.y, self.x + letters.length(self.text), self.y + letters.height


@dataclass(frozen=True)
class Field:
    """One string a reader should read, in one run or, where it wrapped, several."""

    text: str
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Line:
    """A level or upright line between two points, ``width`` pixels thick."""

    x0: int
    y0: int
    x1: int
    y1: int
    width: int


@dataclass(frozen=True, eq=False)
class Picture:
    """A mask (mode L) to fill with ``ink``; None stands for the ink of the text."""

    x: int
    y: int
    mask: Image.Image
    ink: tuple[int, int, int] | None = None

    @property
    def box(self) -> tuple[int, int, int, int]:
        """Left, top, right, bottom."""
        return self.x, self.y, self.x + self.mask.width, self.y + self.mask.height


@dataclass
class Page:
    """What is on the paper. ``fields`` are to be read; ``decor`` (leaders, rules of signs) is not."""

    width: int
    height: int = 0
    fields: list[Field] = field(default_factory=list)
    decor: list[Run] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)

    def runs(self) -> list[Run]:
        """Every run, fields' first."""
        return [run for entry in self.fields for run in entry.runs] + self.decor


def wrap(text: str, spec: FaceSpec, width: int) -> list[str]:
    """Breaks text at spaces.

    Raises:
        NoRoomError: a single word is wider than ``width`` pixels.
    """
    letters, lines, current = face(spec), list[str](), ""
    for word in text.split(" "):
        longer = f"{current} {word}" if current else word
        if letters.length(longer) <= width:
            current = longer
            continue
        if current:
            lines.append(current)
        if letters.length(word) > width:
            raise NoRoomError(f"{word!r} is wider than {width} px")
        current = word
    return [*lines, current]


class Flow:
    """Places text downwards between two edges of a page.

    Attributes:
        page: what is filled.
        x0: left edge, pixels.
        x1: right edge, pixels.
        y: top of the next line, pixels.
        leading: line distance as a multiple of the letters' height.
    """

    def __init__(self, page: Page, x0: int, x1: int, y: int, leading: float) -> None:
        self.page, self.x0, self.x1, self.y, self.leading = page, x0, x1, y, leading

    def pitch(self, spec: FaceSpec) -> int:
        """Line distance in pixels."""
        return round(face(spec).height * self.leading)

    def put(self, x: int, width: int, text: str, spec: FaceSpec, align: Align = "left", dy: int = 0) -> int:
        """Places one field at ``x`` within ``width``, wrapping it, without moving the cursor.

        Returns:
            The number of lines it took.

        Raises:
            NoRoomError: a word is wider than ``width``.
        """
        letters, runs = face(spec), []
        parts = wrap(text, spec, width)
        for number, part in enumerate(parts):
            slack = width - letters.length(part)
            left = x + {"left": 0, "centre": slack // 2, "right": slack}[align]
            runs.append(Run(left, self.y + dy + number * self.pitch(spec), part, spec))
        self.page.fields.append(Field(text, tuple(runs)))
        return len(parts)

    def text(self, text: str, spec: FaceSpec, align: Align = "left") -> None:
        """Places a paragraph over the whole width and moves below it."""
        self.y += self.put(self.x0, self.x1 - self.x0, text, spec, align) * self.pitch(spec)

    def pair(self, label: str, value: str, spec: FaceSpec, leader: bool = False, inset: int = 0) -> None:
        """Places a label at the left and its value at the right of one line.

        Raises:
            NoRoomError: they do not fit side by side.
        """
        letters, gap = face(spec), spec.size // 2
        x0, x1 = self.x0 + inset, self.x1 - inset
        end, start = x0 + letters.length(label), x1 - letters.length(value)
        if end + gap > start:
            raise NoRoomError(f"{label!r} and {value!r} need more than {x1 - x0} px")
        self.put(x0, end - x0, label, spec)
        self.put(start, x1 - start, value, spec)
        if leader:
            self.leader(end, start, spec)
        self.y += self.pitch(spec)

    def leader(self, x0: int, x1: int, spec: FaceSpec, dy: int = 0) -> None:
        """Fills the space between two runs with dots, some way off both."""
        step = face(spec).length(".")
        gap = max(step, spec.size // 3)
        count = (x1 - x0 - 2 * gap) // step
        if count >= 2:
            # Right-aligned, so that the dots of successive lines stand in columns.
            self.page.decor.append(Run(x1 - gap - count * step, self.y + dy, "." * count, spec))

    def rule(self, kind: str, spec: FaceSpec) -> None:
        """A separator over the whole width: a sign to repeat, ``solid``, ``double`` or ``none``."""
        height = self.pitch(spec)
        if kind in ("solid", "double"):
            middle, thick = self.y + height // 2, max(1, spec.size // 14)
            for offset in (0,) if kind == "solid" else (-2 * thick, 2 * thick):
                self.page.lines.append(Line(self.x0, middle + offset, self.x1, middle + offset, thick))
        elif kind != "none":
            count = (self.x1 - self.x0) // face(spec).length(kind)
            self.page.decor.append(Run(self.x0, self.y, kind * count, spec))
        else:
            height //= 2
        self.y += height

    def picture(self, mask: Image.Image, align: Align, ink: tuple[int, int, int] | None = None) -> None:
        """Places a picture and moves below it.

        Raises:
            NoRoomError: it is wider than the flow.
        """
        slack = self.x1 - self.x0 - mask.width
        if slack < 0:
            raise NoRoomError(f"a picture of {mask.width} px in {self.x1 - self.x0} px")
        x = self.x0 + {"left": 0, "centre": slack // 2, "right": slack}[align]
        self.page.pictures.append(Picture(x, self.y, mask, ink))
        self.y += mask.height
