"""Letters from the two fonts inside Pillow, so that every machine draws the same ones.

``sans`` is Aileron, which Pillow carries in a cut-down form without accents or currency signs: those are built here
from its own letters and a few strokes. ``dots`` is the 6 x 11 bitmap font, drawn as the dots of a needle printer.
Letters are placed one by one with whole-pixel advances: no text-shaping library has a say in it.
"""

import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from preprocess.sources.demo import marks

Coverage = npt.NDArray[np.uint8]
"""``[height, width]``, 0 where there is no ink to 255 where there is nothing else."""

LINE_EM = 1.25
"""Height of a line in em: a quarter above the capitals for their accents, a quarter below the baseline."""
_CELL_W, _CELL_H = 6, 11
_MONO_EM = 0.6
_EURO_DOTS = ("..###.", ".#...#", "####..", ".#....", "####..", ".#...#", "..###.")


@dataclass(frozen=True)
class FaceSpec:
    """A face to draw with.

    Attributes:
        family: which of the two fonts.
        size: em in pixels; a line is about 1.25 of it high.
        bold: double strike.
        stretch: horizontal scale (``sans`` only).
        slant: rightward lean per unit of height (``sans`` only).
        mono: every letter in a cell of the same width (``dots`` always is).
    """

    family: Literal["sans", "dots"]
    size: int
    bold: bool = False
    stretch: float = 1.0
    slant: float = 0.0
    mono: bool = False


@dataclass(frozen=True, eq=False)
class _Glyph:
    """Ink of one letter, and where its upper left corner lies from that of the letter's box."""

    ink: Coverage
    left: int
    top: int


class Face:
    """Measures and draws text in one face. Obtain it from ``face``, which keeps recently used ones.

    Attributes:
        spec: what it draws.
        height: pixels from the top of the tallest accent to the lowest descender.
    """

    def __init__(self, spec: FaceSpec) -> None:
        self.spec = spec
        self._advances: dict[str, int] = {}
        self._glyphs: dict[str, _Glyph | None] = {}
        # The bitmap font's cell stands for 0.6 em across, as the monospaced sans does.
        self._dot = max(1, round(spec.size * _MONO_EM / _CELL_W))
        self.height = self._dot * _CELL_H if spec.family == "dots" else round(spec.size * LINE_EM)

    def length(self, text: str) -> int:
        """Width of ``text`` in pixels.

        Raises:
            ValueError: a character has no glyph.
        """
        return sum(self._advance(ch) for ch in text)

    def draw(self, canvas: Coverage, x: int, y: int, text: str) -> None:
        """Adds the ink of ``text``, its box's upper left corner at ``(x, y)``.

        Args:
            canvas: where to; changed in place.
            x: left edge, pixels.
            y: top edge, pixels.
            text: what; see ``drawable``.

        Raises:
            ValueError: a character has no glyph, or ink falls outside the canvas.
        """
        for ch in text:
            glyph = self._glyph(ch)
            if glyph is not None:
                left, top = x + glyph.left, y + glyph.top
                height, width = glyph.ink.shape
                window = canvas[max(top, 0) : top + height, max(left, 0) : left + width]
                if window.shape != glyph.ink.shape:
                    raise ValueError(f"{ch!r} of {text!r} at ({left}, {top}) leaves a canvas {canvas.shape}")
                np.maximum(window, glyph.ink, out=window)
            x += self._advance(ch)

    def _advance(self, ch: str) -> int:
        advance = self._advances.get(ch)
        if advance is None:
            if not drawable(ch):
                raise ValueError(f"neither built-in font has a glyph for {ch!r} (U+{ord(ch):04X})")
            spec = self.spec
            if spec.family == "dots":
                advance = _CELL_W * self._dot
            elif spec.mono:
                advance = round(spec.size * _MONO_EM * spec.stretch)
            else:
                advance = _natural_width(ch, spec)
            self._advances[ch] = advance
        return advance

    def _glyph(self, ch: str) -> _Glyph | None:
        if ch not in self._glyphs:
            advance = self._advance(ch)
            dots = self.spec.family == "dots"
            made = _dot_glyph(ch, self.spec, self._dot) if dots else _sans_glyph(ch, self.spec, advance)
            self._glyphs[ch] = made
        return self._glyphs[ch]


@lru_cache(maxsize=96)
def face(spec: FaceSpec) -> Face:
    """The face for a spec; recently used ones are kept."""
    return Face(spec)


def drawable(ch: str) -> bool:
    """Whether both fonts can draw this character."""
    if " " <= ch <= "~" or ch in marks.SIGNS or ch in marks.INVERTED or ch == "°":
        return True
    base, *accents = list(unicodedata.normalize("NFD", ch))
    # Latin-1 is where the bitmap font ends.
    letter = ord(ch) < 256 and base.isascii() and base.isalpha()
    return letter and len(accents) == 1 and accents[0] in marks.KNOWN


def _glyph_of(ink: Coverage, left: int, top: int) -> _Glyph | None:
    """Crops to the ink; None where there is none."""
    rows, columns = np.flatnonzero(ink.any(axis=1)), np.flatnonzero(ink.any(axis=0))
    if rows.size == 0:
        return None
    box = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    return _Glyph(np.ascontiguousarray(box), left + int(columns[0]), top + int(rows[0]))


def _double_strike(ink: Coverage, step: int) -> Coverage:
    struck = ink.copy()
    np.maximum(struck[:, step:], ink[:, :-step], out=struck[:, step:])
    return struck


@lru_cache(maxsize=96)
def _font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise RuntimeError("this Pillow was built without FreeType, which the demo receipts are drawn with")
    return font


def _natural_width(ch: str, spec: FaceSpec) -> int:
    width = _font(spec.size).getlength(marks.letter_of(ch))
    extra = spec.size * (marks.wider(ch) + 0.02 * spec.bold)
    return max(1, round((width + extra) * spec.stretch))


def _sans_glyph(ch: str, spec: FaceSpec, advance: int) -> _Glyph | None:
    # Stretched letters are drawn larger and scaled down, others directly with FreeType's hinting.
    natural = _natural_width(ch, spec)
    squeeze = min(1.0, advance / natural)
    factor = spec.stretch * squeeze
    scale = 1 if factor == 1.0 else 2
    em = spec.size * scale
    pad = em // 4
    font, letter = _font(em), marks.letter_of(ch)
    wide = round(font.getlength(letter)) + 2 * pad + em // 6
    mask = Image.new("L", (wide, round(em * LINE_EM) + 2 * pad))
    ImageDraw.Draw(mask).text((pad + round(em * marks.wider(ch) / 2), pad), letter, fill=255, font=font)
    marks.complete(mask, ch, em)
    if scale != 1:
        size = (max(1, round(mask.width * factor / 2)), mask.height // 2)
        mask = mask.resize(size, Image.Resampling.BICUBIC, box=(0, 0, mask.width, size[1] * 2))
    if spec.slant:
        lean = (1, spec.slant, -spec.slant * mask.height * 0.6, 0, 1, 0)
        mask = mask.transform(mask.size, Image.Transform.AFFINE, lean, Image.Resampling.BILINEAR)
    ink = np.asarray(mask)
    if spec.bold:
        ink = _double_strike(ink, max(1, round(spec.size * 0.045 * spec.stretch)))
    left = (advance - min(natural, advance)) // 2 - round(pad * factor / scale)
    return _glyph_of(ink, left, -(pad // scale))


@lru_cache(maxsize=1)
def _bitmap_font() -> ImageFont.ImageFont:
    return ImageFont.load_default_imagefont()


@lru_cache(maxsize=32)
def _needle(dot: int) -> Coverage:
    """One needle's mark: a square while it is too small to tell, else round and just touching its neighbours."""
    if dot < 3:
        return np.full((dot, dot), 255, np.uint8)
    fine = Image.new("L", (dot * 4, dot * 4))
    ImageDraw.Draw(fine).ellipse((-1, -1, dot * 4, dot * 4), fill=255)
    return np.array(fine.reduce(4))


def _dot_glyph(ch: str, spec: FaceSpec, dot: int) -> _Glyph | None:
    cell = np.zeros((_CELL_H, _CELL_W), np.uint8)
    if ch == "€":
        cell[2 : 2 + len(_EURO_DOTS)] = [[pixel == "#" for pixel in line] for line in _EURO_DOTS]
    else:
        mask = Image.new("L", (_CELL_W, _CELL_H))
        ImageDraw.Draw(mask).text((0, 0), ch, fill=1, font=_bitmap_font())
        cell[:] = np.asarray(mask)
    ink = np.kron(cell, _needle(dot)).astype(np.uint8)
    return _glyph_of(_double_strike(ink, max(1, dot // 3)) if spec.bold else ink, 0, 0)
