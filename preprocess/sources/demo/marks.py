"""Accents and currency signs that the built-in Aileron lacks, added to a letter it has. Lengths are in em."""

import unicodedata

from PIL import Image, ImageDraw

SIGNS = {"€": "C", "£": "L", "¥": "Y"}
"""Currency signs, and the letter each is built from."""
INVERTED = {"¡": "!", "¿": "?"}
_DIAERESIS, _CEDILLA = "\u0308", "\u0327"
_ACCENTS = {
    "\u0300": ((-0.11, -0.06), (0.05, 0.05)),
    "\u0301": ((-0.05, 0.05), (0.11, -0.06)),
    "\u0302": ((-0.12, 0.05), (0.0, -0.07), (0.12, 0.05)),
    "\u0303": ((-0.14, 0.05), (-0.06, -0.04), (0.06, 0.05), (0.14, -0.04)),
}
"""Strokes around the middle of the accent; y grows downwards."""
KNOWN = frozenset({*_ACCENTS, _DIAERESIS, _CEDILLA})
"""Combining characters that can be added."""


def letter_of(ch: str) -> str:
    """The letter in the font that ``ch`` is built from."""
    base = unicodedata.normalize("NFD", ch)[0]
    return SIGNS.get(base, INVERTED.get(base, base))


def wider(ch: str) -> float:
    """By how much ``ch`` is wider than its letter: an accented i must not touch its neighbours."""
    return 0.1 if ch != "i" and letter_of(ch) == "i" else 0.0


def complete(mask: Image.Image, ch: str, em: int) -> None:
    """Turns the drawn ``letter_of(ch)`` into ``ch``.

    Args:
        mask: mode L, the letter in white with some room around; changed in place.
        ch: what it is to become.
        em: size of the letter, pixels.
    """
    base, *accents = list(unicodedata.normalize("NFD", ch))
    if base in INVERTED:
        left, top, right, bottom = mask.getbbox() or (0, 0, 1, 1)
        turned = mask.crop((left, top, right, bottom)).transpose(Image.Transpose.ROTATE_180)
        mask.paste(0, (0, 0, mask.width, mask.height))
        mask.paste(turned, (left, top + round(em * 0.18)))
    if base in SIGNS:
        _add_sign(mask, base, em)
    for accent in accents:
        _add_accent(mask, base, accent, em)


def _strokes(mask: Image.Image, lines: list[list[tuple[float, float]]], width: float) -> None:
    """Draws smooth polylines given in the mask's pixels."""
    fine = Image.new("L", (mask.width * 4, mask.height * 4))
    draw = ImageDraw.Draw(fine)
    radius = width * 2
    for line in lines:
        points = [(x * 4, y * 4) for x, y in line]
        draw.line(points, fill=255, width=max(1, round(width * 4)), joint="curve")
        for x, y in (points[0], points[-1]):
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=255)
    mask.paste(255, (0, 0), fine.reduce(4))


def _add_sign(mask: Image.Image, sign: str, em: int) -> None:
    left, top, right, bottom = mask.getbbox() or (0, 0, 1, 1)
    stroke, tall, wide = em * 0.07, bottom - top, right - left
    if sign == "£":
        mask.paste(0, (0, 0, mask.width, mask.height))
        x, hook = left + wide * 0.28, [(0.95, 0.2), (0.86, 0.06), (0.6, 0.0), (0.34, 0.06), (0.22, 0.24)]
        curve = [(left + fx * wide, top + stroke / 2 + fy * tall) for fx, fy in hook]
        stem = [*curve, (x, top + tall * 0.75), (left + 0.05 * wide, bottom - stroke / 2)]
        foot = [(left + 0.05 * wide, bottom - stroke / 2), (right, bottom - stroke / 2)]
        bar = [(left, top + tall * 0.52), (left + wide * 0.75, top + tall * 0.52)]
        _strokes(mask, [stem, foot, bar], stroke)
        return
    first, second = (0.4, 0.6) if sign == "€" else (0.55, 0.75)
    x0, x1 = (left - em * 0.03, left + wide * 0.7) if sign == "€" else (left + wide * 0.15, right - wide * 0.15)
    _strokes(mask, [[(x0, top + tall * at), (x1, top + tall * at)] for at in (first, second)], stroke * 0.8)


def _add_accent(mask: Image.Image, base: str, accent: str, em: int) -> None:
    left, top, right, bottom = mask.getbbox() or (0, 0, 1, 1)
    middle, stroke = (left + right) / 2, em * 0.07
    if base == "i":
        # Take the dot away: everything above the height of an x.
        top = top + round((bottom - top) * 0.25)
        mask.paste(0, (0, 0, mask.width, top))
    if accent == _CEDILLA:
        tail = [(0.0, 0.0), (0.0, 0.05), (0.07, 0.09), (0.06, 0.17), (-0.06, 0.19)]
        _strokes(mask, [[(middle + x * em, bottom + (y - 0.02) * em) for x, y in tail]], stroke * 0.75)
        return
    y = top - em * 0.15
    if accent == _DIAERESIS:
        dots = [[(middle + x * em, y + 0.02 * em)] * 2 for x in (-0.1, 0.1)]
        _strokes(mask, [list(dot) for dot in dots], stroke * 1.3)
    else:
        _strokes(mask, [[(middle + dx * em, y + dy * em) for dx, dy in _ACCENTS[accent]]], stroke)
