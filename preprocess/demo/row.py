"""One receipt of the demo: text, look, print, effects and file, all determined by (version, row)."""

from dataclasses import dataclass, field
from random import Random

import numpy as np

from vlmdata.preprocess.demo.compose import LOCALES, Receipt, compose_receipt, ground_truth
from vlmdata.preprocess.demo.layout import lay_out
from vlmdata.preprocess.demo.page import SHAPES, Look, Page, choose_look
from vlmdata.preprocess.demo.photo import KINDS, DemoImage, encode

DEMO_VERSION = 3
"""Increase it when any pixel, text or order of the demo changes, since cached datasets are named by it."""


@dataclass(frozen=True)
class DemoReceipt:
    """A drawn receipt: its kind of file, the file, the JSON of its ground truth, and all strings to read."""

    kind: str
    file: DemoImage = field(repr=False)
    ground_truth: str
    texts: tuple[str, ...] = field(repr=False)


def stream(purpose: str, row: int) -> Random:
    """Returns the random stream for one purpose of one row."""
    # One stream per purpose: an additional draw for one purpose leaves the others unchanged.
    # The 2 stays when only pixels change, so that the texts remain.
    return Random(f"vlmdata demo 2 0 {row} {purpose}")


def deal(purpose: str, shares: dict[str, int], row: int) -> str:
    """Chooses a kind for a row, so that each block of ``sum(shares.values())`` rows has the exact shares."""
    if row < 0:
        raise ValueError(f"row must be 0 or more, got {row}")
    deck = [kind for kind, count in shares.items() for _ in range(count)]
    block, place = divmod(row, len(deck))
    stream(f"deck of {purpose}", block).shuffle(deck)
    return deck[place]


def demo_content(row: int) -> Receipt:
    """Returns the text of a row's receipt."""
    locale = deal("locales", dict.fromkeys(LOCALES, 4), row)
    rng = stream("content", row)
    return compose_receipt(rng, locale, rng.choice(SHAPES[_shape(row)].counts))


def demo_page(row: int) -> tuple[Page, int, Look]:
    """Lays out a row's receipt. Returns the page, the size of its letters (em in pixels), and its look."""
    look = choose_look(stream("look", row), SHAPES[_shape(row)])
    return *lay_out(demo_content(row), look, stream("codes", row).getrandbits(32)), look


def demo_receipt(row: int) -> DemoReceipt:
    """Draws the receipt of a row, 0 or more. Equal arguments give equal bytes, regardless of earlier draws."""
    page, em, look = demo_page(row)
    kind, rng = deal("kinds", KINDS, row), stream("effects", row)
    noise = np.random.Generator(np.random.PCG64(rng.getrandbits(128)))
    file = encode(page.print(), em, look.ink, kind, rng, noise)
    two = deal("parses", {"one": 15, "two": 1}, row) == "two"
    return DemoReceipt(kind, file, ground_truth(demo_content(row), row, file.upright, two), tuple(page.texts))


def _shape(row: int) -> str:
    return deal("shapes", {name: shape.share for name, shape in SHAPES.items()}, row)
