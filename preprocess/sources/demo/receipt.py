"""One row of the demo: content, look, drawing, effects and file, all decided by (version, seed, row)."""

import json
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from preprocess.sources.demo.compose import LOCALES, compose_receipt
from preprocess.sources.demo.content import Receipt, brief_parse, gt_parse
from preprocess.sources.demo.draw import draw_receipt
from preprocess.sources.demo.encode import KINDS, encode
from preprocess.sources.demo.look import SHAPES, choose_item_count, choose_look

DEMO_VERSION = 1
"""To be raised whenever any pixel, text or order of the demo changes: caches are named by it."""

_PARSES = {"one": 30, "two": 2}
_SPLIT = "train"


@dataclass(frozen=True)
class DemoReceipt:
    """A drawn receipt.

    Attributes:
        row: its number.
        image_bytes: the encoded image file.
        image_format: Pillow's name of the container, "JPEG", "PNG" or "WEBP".
        width: pixels across, as stored (before any EXIF rotation).
        height: pixels down, as stored.
        mode: Pillow's mode of the stored pixels, such as "RGB", "1", "CMYK" or "I;16".
        orientation: EXIF orientation, 1 to 8; 1 when upright.
        kind: a key of ``encode.KINDS``.
        ground_truth: JSON as in CORD-V2: ``gt_parse`` (or the list ``gt_parses``) and ``meta``, whose
            ``image_size`` is that of the upright image.
        receipt: the content behind it.
        texts: every string drawn to be read, in no particular order.
    """

    row: int
    image_bytes: bytes = field(repr=False)
    image_format: str
    width: int
    height: int
    mode: str
    orientation: int
    kind: str
    ground_truth: str
    receipt: Receipt = field(repr=False)
    texts: tuple[str, ...] = field(repr=False)


def stream(purpose: str, row: int, seed: int) -> Random:
    """The chance that decides one purpose of one row."""
    # One stream per purpose: a further draw for one of them leaves the others as they were.
    return Random(f"vlmdata demo {DEMO_VERSION} {seed} {row} {purpose}")


def deal(purpose: str, shares: dict[str, int], row: int, seed: int) -> str:
    """A card from a deck shuffled anew for every ``len(deck)`` rows: each kind comes up in every such block.

    Raises:
        ValueError: ``row`` is negative.
    """
    if row < 0:
        raise ValueError(f"row must be 0 or more, got {row}")
    deck = [card for card, count in shares.items() for _ in range(count)]
    block, place = divmod(row, len(deck))
    stream(f"deck of {purpose}", block, seed).shuffle(deck)
    return deck[place]


def demo_content(row: int, seed: int = 0) -> Receipt:
    """What the receipt of a row says, without drawing it.

    Raises:
        ValueError: ``row`` is negative.
    """
    shape = deal("shapes", SHAPES, row, seed)
    locale = deal("locales", dict.fromkeys(LOCALES, 1), row, seed)
    rng = stream("content", row, seed)
    return compose_receipt(rng, locale, choose_item_count(rng, shape))


def demo_receipt(row: int, seed: int = 0) -> DemoReceipt:
    """Draws the receipt of a row. The same arguments always give the same bytes, whatever was drawn before.

    Args:
        row: 0 or more; there is no end.
        seed: another seed gives another dataset.

    Raises:
        ValueError: ``row`` is negative.
    """
    receipt = demo_content(row, seed)
    look = choose_look(stream("look", row, seed), deal("shapes", SHAPES, row, seed))
    drawing = draw_receipt(receipt, look, stream("ornaments", row, seed).randrange(2**32))
    kind = deal("kinds", KINDS, row, seed)
    rng = stream("effects", row, seed)
    noise = np.random.Generator(np.random.PCG64(rng.getrandbits(128)))
    image = encode(drawing, kind, rng, noise)
    upright = image.size if image.orientation < 5 else (image.size[1], image.size[0])
    return DemoReceipt(
        row=row,
        image_bytes=image.data,
        image_format=image.format,
        width=image.size[0],
        height=image.size[1],
        mode=image.mode,
        orientation=image.orientation,
        kind=kind,
        ground_truth=ground_truth(receipt, row, upright, two=deal("parses", _PARSES, row, seed) == "two"),
        receipt=receipt,
        texts=drawing.texts,
    )


def ground_truth(receipt: Receipt, row: int, upright: tuple[int, int], two: bool) -> str:
    """The row's ``ground_truth`` column.

    Args:
        receipt: what it says.
        row: goes into ``meta.image_id``.
        upright: width and height of the image as seen, pixels.
        two: give a list of two valid readings, where there are two.
    """
    full, brief = gt_parse(receipt), brief_parse(receipt)
    meta: dict[str, Any] = {
        "version": "2.0.0",
        "split": _SPLIT,
        "image_id": row,
        "image_size": {"width": upright[0], "height": upright[1]},
    }
    parse = {"gt_parses": [full, brief]} if two and brief != full else {"gt_parse": full}
    return json.dumps(parse | {"meta": meta}, ensure_ascii=False)
