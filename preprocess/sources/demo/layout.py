"""Puts a receipt's content on a page: head, items, figures, foot, in one column or two."""

import itertools
from random import Random

from preprocess.sources.demo import ornaments
from preprocess.sources.demo.content import Receipt, figures
from preprocess.sources.demo.glyphs import face
from preprocess.sources.demo.items import lay_items
from preprocess.sources.demo.look import Look
from preprocess.sources.demo.page import Flow, Line, NoRoomError, Page

MIN_SIZE = 13
"""Em in pixels below which letters are not legible after scan effects."""


def lay_out(receipt: Receipt, look: Look, ornament_seed: int) -> Page:
    """Lays a receipt out with the largest letters that fit.

    Letters shrink from ``look.size`` in steps of about 8 % until nothing is too wide and the page is not too high. If
    even ``MIN_SIZE`` does not keep it below ``look.max_height``, the page is as high as it must be.

    Args:
        receipt: what it says.
        look: how it looks.
        ornament_seed: chooses logo, code and stamp, the same at every letter size.

    Returns:
        The page.

    Raises:
        NoRoomError: a word is wider than the paper even at ``MIN_SIZE``.
    """
    size = max(look.size, MIN_SIZE)
    while True:
        smallest = size == MIN_SIZE
        try:
            page = _lay_out(receipt, look, size, Random(ornament_seed))
        except NoRoomError:
            if smallest:
                raise
        else:
            if page.height <= look.max_height or smallest:
                return page
        size = max(MIN_SIZE, min(size - 1, round(size * 0.92)))


def _lay_out(receipt: Receipt, look: Look, size: int, rng: Random) -> Page:
    page = Page(look.width)
    margin = round(look.width * look.margin)
    x1 = look.width - margin
    if look.shape == "wide":
        split = margin + round((x1 - margin) * 0.6)
        gap = size * 2
        left = Flow(page, margin, split - gap // 2, margin, look.leading)
        right = Flow(page, split + gap // 2, x1, margin, look.leading)
        _head(left, receipt, look, size, rng)
        left.rule(look.rule, look.spec(size))
        lay_items(left, receipt, look, size)
        _facts(right, receipt, look, size)
        right.rule(look.rule, look.spec(size))
        _figures(right, receipt, look, size)
        _foot(right, receipt, look, size, rng)
        bottom = max(left.y, right.y)
        page.lines.append(Line(split, margin, split, bottom, max(1, size // 14)))
    else:
        flow = Flow(page, margin, x1, margin, look.leading)
        _head(flow, receipt, look, size, rng)
        _facts(flow, receipt, look, size)
        flow.rule(look.rule, look.spec(size))
        lay_items(flow, receipt, look, size)
        flow.rule(look.rule, look.spec(size))
        _figures(flow, receipt, look, size)
        flow.rule(look.rule, look.spec(size))
        _foot(flow, receipt, look, size, rng)
        bottom = flow.y
    page.height = bottom + margin + round(look.width * look.tail)
    return page


def _head(flow: Flow, receipt: Receipt, look: Look, size: int, rng: Random) -> None:
    room = flow.x1 - flow.x0
    if look.logo:
        side = min(room // 3, size * 6)
        flow.picture(ornaments.logo(rng, side, receipt.shop.name[0]), look.header, look.accent)
        flow.y += size // 2
    scale = look.title_scale
    # Rather two words on a line than a huge title broken into many.
    while scale > 1.0 and face(look.spec(size, scale, bold=True)).length(receipt.shop.name) > room * 1.6:
        scale = max(1.0, scale - 0.25)
    flow.text(receipt.shop.name, look.spec(size, scale, bold=True), look.header)
    small = look.spec(max(size - size // 8, MIN_SIZE))
    for line in receipt.shop.address:
        flow.text(line, small, look.header)
    flow.y += size // 2


def _facts(flow: Flow, receipt: Receipt, look: Look, size: int) -> None:
    spec = look.spec(size)
    spread = look.header == "centre" and look.items != "leaders"
    for label, value in receipt.shop.facts:
        if spread:
            flow.pair(label, value, spec)
            continue
        x = flow.x0 + face(spec).length(f"{label} ")
        flow.put(flow.x0, x - flow.x0, label, spec)
        flow.y += flow.put(x, flow.x1 - x, value, spec) * flow.pitch(spec)


def _figures(flow: Flow, receipt: Receipt, look: Look, size: int) -> None:
    room, spec = flow.x1 - flow.x0, look.spec(size)
    rows = figures(receipt)
    widest = max(face(spec).length(row.label) + face(spec).length(row.text) for row in rows)
    # All figures stand inset, or none does.
    inset = round(room * look.totals_inset)
    if widest + size > room - inset:
        inset = 0
    for row in rows:
        if row.key == "total_price":
            _total(flow, row.label, row.text, look, size)
            continue
        part = Flow(flow.page, flow.x0 + inset, flow.x1, flow.y, flow.leading)
        part.pair(row.label, row.text, spec, leader=look.items == "leaders")
        flow.y = part.y


def _total(flow: Flow, label: str, text: str, look: Look, size: int) -> None:
    pad = size // 2 if look.boxed_total else 0
    room = flow.x1 - flow.x0 - 2 * pad - size
    scale = look.total_scale
    while scale > 1.0:
        letters = face(look.spec(size, scale, bold=True))
        if letters.length(label) + letters.length(text) + size <= room:
            break
        scale = max(1.0, scale - 0.2)
    spec = look.spec(size, scale, bold=True)
    flow.y += pad + size // 4
    top = flow.y
    flow.pair(label, text, spec, inset=pad)
    if look.boxed_total:
        thick = max(1, size // 12)
        bottom = top + face(spec).height + pad // 2
        top -= pad // 2
        corners = ((flow.x0, top), (flow.x1, top), (flow.x1, bottom), (flow.x0, bottom), (flow.x0, top))
        for (x0, y0), (x1, y1) in itertools.pairwise(corners):
            flow.page.lines.append(Line(x0, y0, x1, y1, thick))
    flow.y += pad + size // 4


def _foot(flow: Flow, receipt: Receipt, look: Look, size: int, rng: Random) -> None:
    room = flow.x1 - flow.x0
    flow.y += size // 2
    flow.text(receipt.shop.thanks, look.spec(size), "centre")
    flow.y += size // 2
    if look.stamped:
        text = receipt.printing.labels["paid"]
        mask = ornaments.stamp(rng, text, min(size * 2, room * 3 // 4 // len(text)))
        flow.picture(mask, rng.choice(("left", "centre", "right")), look.accent)
        flow.y += size // 2
    if look.code == "matrix":
        flow.picture(ornaments.matrix(rng, min(room // 2, size * 8)), "centre")
    elif look.code == "bars":
        mask = ornaments.bars(rng, min(room, size * 18), size * 3)
        flow.picture(mask, "centre")
        digits = "".join(str(rng.randrange(10)) for _ in range(12))
        flow.text(digits, look.spec(max(size * 3 // 4, MIN_SIZE)), "centre")
