"""How a receipt's paper looks: its size in pixels, letters, columns, ornaments. Chosen apart from what it says."""

from dataclasses import dataclass
from random import Random
from typing import Literal

from preprocess.sources.demo.glyphs import FaceSpec
from preprocess.sources.demo.page import Align

ItemStyle = Literal["columns", "below", "leaders", "table"]
SHAPES = {"usual": 19, "small": 3, "strip": 4, "wide": 3, "medium": 2, "large": 1}
"""Kinds of paper and how many of every 32 rows are of each: ``strip`` is long and narrow, ``wide`` is landscape."""


@dataclass(frozen=True)
class Look:
    """Everything that decides how a page comes out, given its content.

    Attributes:
        shape: one of ``SHAPES``.
        width: paper width, pixels.
        max_height: paper height not to exceed while smaller letters can avoid it, pixels.
        size: em of the body text to try first, pixels.
        body: face of the body text; ``size`` replaces its size.
        leading: line distance over letter height.
        margin: of the paper, as a share of its width.
        items: how item lines are set.
        rule: separator, see ``Flow.rule``.
        header: alignment of the shop's name and address.
        title_scale: size of the shop's name over the body's.
        total_scale: size of the total's line over the body's.
        boxed_total: whether the total stands in a frame.
        totals_inset: share of the width left free at the left of the totals.
        heads: whether columns have headings.
        logo: whether there is an emblem.
        code: block of bars or modules at the foot.
        stamped: whether a "paid" stamp is at the foot.
        tail: blank paper at the end, as a share of the width.
        ink: colour of the print.
        accent: colour of logo and stamp.
    """

    shape: str
    width: int
    max_height: int
    size: int
    body: FaceSpec
    leading: float
    margin: float
    items: ItemStyle
    rule: str
    header: Align
    title_scale: float
    total_scale: float
    boxed_total: bool
    totals_inset: float
    heads: bool
    logo: bool
    code: Literal["bars", "matrix", "none"]
    stamped: bool
    tail: float
    ink: tuple[int, int, int]
    accent: tuple[int, int, int]

    def spec(self, size: int, scale: float = 1.0, bold: bool = False) -> FaceSpec:
        """The body's face at ``scale`` times ``size``, perhaps bold."""
        kind, pixels = self.body, round(size * scale)
        # Large sizes in coarse steps, so that faces are shared between receipts.
        pixels -= pixels % (1 if pixels <= 24 else 2 if pixels <= 48 else 4)
        return FaceSpec(kind.family, pixels, bold, kind.stretch, kind.slant, kind.mono)


_WIDTHS = {
    "usual": (530, 780),
    "small": (350, 430),
    "strip": (380, 500),
    "wide": (820, 1150),
    "medium": (900, 1200),
    "large": (1600, 1950),
}
_LETTERS = {
    "usual": (34, 50),
    "small": (24, 30),
    "strip": (26, 36),
    "wide": (52, 68),
    "medium": (44, 60),
    "large": (52, 72),
}
_ITEM_COUNTS = {
    "usual": (1, 1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 10, 12, 15),
    "small": (1, 1, 2, 3, 4, 5),
    "strip": (12, 15, 18, 22, 26, 30),
    "wide": (2, 3, 4, 5, 6, 8),
    "medium": (2, 4, 6, 9, 14),
    "large": (3, 6, 10, 16),
}
_INKS = ((18, 18, 20), (30, 28, 30), (45, 44, 48), (60, 58, 62), (38, 34, 84), (60, 40, 88))
_ACCENTS = ((176, 32, 40), (28, 64, 140), (20, 104, 70), (150, 84, 16), (40, 40, 44))


def choose_item_count(rng: Random, shape: str) -> int:
    """Number of item lines that suits a paper shape."""
    return rng.choice(_ITEM_COUNTS[shape])


def choose_look(rng: Random, shape: str) -> Look:
    """Chooses a look for a paper shape.

    Args:
        rng: the only source of chance.
        shape: one of ``SHAPES``.
    """
    width = rng.randrange(*_WIDTHS[shape])
    margin = rng.uniform(0.03, 0.08)
    body = _choose_body(rng)
    # A proportional letter is about half an em wide.
    em_share = (0.6 if body.mono or body.family == "dots" else 0.5) * body.stretch
    size = round(width * (1 - 2 * margin) / (rng.randint(*_LETTERS[shape]) * em_share))
    strip, wide = shape == "strip", shape == "wide"
    styles: tuple[ItemStyle, ...] = ("columns", "columns", "below", "leaders", "table")
    return Look(
        shape=shape,
        width=width,
        max_height=width * 9 // 10 if wide else min(2800, round(width * (4.3 if strip else 2.3))),
        size=size,
        body=body,
        leading=rng.choice((1.0, 1.05, 1.15, 1.3)) if not wide else 1.05,
        margin=margin,
        items=rng.choice(("columns", "below", "leaders") if strip else styles),
        rule=rng.choice(("-", "-", "-", "=", ".", "*", "_", "solid", "solid", "double", "none")),
        header=rng.choice(("centre", "centre", "centre", "left")),
        title_scale=rng.choice((1.0, 1.3, 1.5, 1.8, 2.0)),
        total_scale=rng.choice((1.0, 1.0, 1.2, 1.5, 1.8)),
        boxed_total=rng.random() < 0.18,
        totals_inset=rng.choice((0.0, 0.0, 0.0, 0.2, 0.35)) if not wide else 0.0,
        heads=rng.random() < 0.4,
        logo=rng.random() < 0.3,
        code=rng.choice(("none", "none", "none", "bars", "matrix")),
        stamped=rng.random() < 0.15,
        tail=rng.choice((0.0, 0.0, 0.05, 0.2)) if not wide else 0.0,
        ink=rng.choice(_INKS),
        accent=rng.choice(_ACCENTS),
    )


def _choose_body(rng: Random) -> FaceSpec:
    kind = rng.choice(("plain", "plain", "mono", "mono", "narrow", "wide", "slanted", "dots", "dots"))
    bold = rng.random() < 0.2
    return {
        "plain": FaceSpec("sans", 0, bold),
        "mono": FaceSpec("sans", 0, bold, mono=True, stretch=rng.choice((0.85, 1.0))),
        "narrow": FaceSpec("sans", 0, bold, stretch=rng.choice((0.75, 0.85))),
        "wide": FaceSpec("sans", 0, bold, stretch=1.15),
        "slanted": FaceSpec("sans", 0, bold, slant=0.18),
        "dots": FaceSpec("dots", 0),
    }[kind]
