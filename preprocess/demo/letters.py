"""Text in Pillow's two built-in fonts, so that every machine with the same Pillow draws the same letters."""

import math
from dataclasses import dataclass
from functools import cache, lru_cache

from PIL import Image, ImageChops, ImageDraw, ImageFont

_CELL = (6, 11)
"""Width and height of a letter of the bitmap font, in pixels."""


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
