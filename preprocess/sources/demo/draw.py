"""Draws a receipt as flat, clean print, and says what it drew and where."""

from dataclasses import dataclass

import numpy as np
from PIL import Image

from preprocess.sources.demo.content import Receipt
from preprocess.sources.demo.glyphs import Coverage, face
from preprocess.sources.demo.layout import lay_out
from preprocess.sources.demo.look import Look
from preprocess.sources.demo.page import Page, Picture

Colour = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Drawing:
    """Print on flat paper.

    Attributes:
        coverage: ``[height, width]`` uint8, 0 where there is no ink, 255 for full ink.
        page: everything on it, with positions in pixels.
        ink: colour of the ink.
        accents: pictures on the page whose ink is of another colour.
        em: size of the smallest letters, pixels.
    """

    coverage: Coverage
    page: Page
    ink: Colour
    accents: tuple[Picture, ...]
    em: int

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        return self.page.width, self.page.height

    @property
    def texts(self) -> tuple[str, ...]:
        """Every string drawn to be read. One that wrapped counts as one, its parts joined by a space."""
        return tuple(" ".join(run.text for run in field.runs) for field in self.page.fields)

    def paper(self) -> Image.Image:
        """Brightness, mode L: black ink on white paper."""
        return Image.fromarray(~self.coverage)


def draw_receipt(receipt: Receipt, look: Look, ornament_seed: int) -> Drawing:
    """Lays out and draws a receipt.

    Args:
        receipt: what it says.
        look: how it looks.
        ornament_seed: chooses logo, code and stamp.

    Returns:
        The drawing, ``look.width`` pixels wide.

    Raises:
        NoRoomError: a word is wider than the paper even with the smallest legible letters.
        ValueError: a character has no glyph.
    """
    page = lay_out(receipt, look, ornament_seed)
    canvas = np.zeros((page.height, page.width), np.uint8)
    for picture in page.pictures:
        x0, y0, x1, y1 = picture.box
        canvas[y0:y1, x0:x1] = np.asarray(picture.mask)
    for line in page.lines:
        # Lines are upright or level; the stroke lies around the path as evenly as whole pixels allow.
        before, after = (line.width - 1) // 2, line.width // 2
        (x0, x1), (y0, y1) = sorted((line.x0, line.x1)), sorted((line.y0, line.y1))
        canvas[max(0, y0 - before) : y1 + after + 1, max(0, x0 - before) : x1 + after + 1] = 255
    runs = page.runs()
    for run in runs:
        face(run.spec).draw(canvas, run.x, run.y, run.text)
    accents = tuple(picture for picture in page.pictures if picture.ink is not None)
    return Drawing(canvas, page, look.ink, accents, min(run.spec.size for run in runs))
