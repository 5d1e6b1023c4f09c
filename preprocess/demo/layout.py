"""Lays a receipt's text out on a page: head, items, figures, foot, in one or two columns."""

from random import Random

from PIL import Image, ImageDraw

from vlmdata.preprocess.demo.compose import MenuLine, Receipt
from vlmdata.preprocess.demo.page import Align, Face, Flow, Look, NoRoomError, Page

MIN_SIZE = 13
"""Em in pixels, below which letters are illegible after effects."""
_MIN_NAME_EM = 5
"""Minimum width of the names column, in em."""
_COLUMNS = ("code", "count", "name", "unit", "price")


def lay_out(receipt: Receipt, look: Look, seed: int) -> tuple[Page, int]:
    """Lays a receipt out with the largest letters that fit. Returns the page, and the size of its letters in pixels.

    Letters shrink until nothing is too wide and the page is not too high. At ``MIN_SIZE``, the height is not limited,
    and a word that is wider than the paper is a NoRoomError. The seed determines the modules of codes.
    """
    size, tallest = max(look.face.size, MIN_SIZE), min(2800, round(look.width * look.shape.tallest))
    while True:
        try:
            page = _lay_out(receipt, look, size, Random(seed))
            if page.height <= tallest or size == MIN_SIZE:
                return page, size
            factor = (tallest / page.height) ** 0.5
        except NoRoomError:
            if size == MIN_SIZE:
                raise
            factor = 0.92
        size = max(MIN_SIZE, min(size - 1, round(size * factor)))


def _lay_out(receipt: Receipt, look: Look, size: int, rng: Random) -> Page:
    page, face, margin = Page(look.width), look.at(size), round(look.width * look.margin)
    right = look.width - margin
    flow = Flow(page, margin, round(look.width * 0.58) if look.shape.two_columns else right, margin, look.leading)
    _head(flow, receipt, look, size)
    _items(flow, receipt, look, face)
    bottom = flow.y
    if look.shape.two_columns:
        line = Image.new("L", (max(1, size // 14), flow.y - margin), 255)
        page.pictures.append((flow.x1 + size, margin, line))
        flow = Flow(page, flow.x1 + 2 * size, right, margin, look.leading)
    else:
        flow.rule(look.rule, face)
    for figure in receipt.figures:
        if figure.key == "total_price":
            scaled = _headline(look, size, f"{figure.label} {figure.text}", flow.x1 - flow.x0 - size)
            flow.y += size // 4
            flow.pair(figure.label, figure.text, scaled)
            flow.y += size // 4
        else:
            flow.pair(figure.label, figure.text, face, leader=look.items == "leaders")
    flow.rule(look.rule, face)
    flow.text(receipt.labels["thanks"], face, "centre")
    if look.code != "none":
        code = _code(rng, look.code, min((flow.x1 - flow.x0) // 2, size * 8))
        page.pictures.append(((flow.x0 + flow.x1 - code.width) // 2, flow.y + size // 2, code))
        flow.y += size // 2 + code.height
    page.height = max(bottom, flow.y) + margin
    return page


def _headline(look: Look, size: int, text: str, room: int) -> Face:
    """Returns a bold face for a text in ``room`` pixels, 1 to ``look.scale`` times as large as the body."""
    fitting = look.scale * room / look.at(size * look.scale, bold=True).width(text)
    return look.at(size * max(1.0, min(look.scale, fitting)), bold=True)


def _head(flow: Flow, receipt: Receipt, look: Look, size: int) -> None:
    # Prefer two words on a line to a huge name broken into many lines.
    room, face = round((flow.x1 - flow.x0) * 1.6), look.at(size)
    flow.text(receipt.shop, _headline(look, size, receipt.shop, room), look.header)
    for line in receipt.address:
        flow.text(line, look.at(max(size * 0.88, MIN_SIZE)), look.header)
    flow.y += size // 2
    for label, value in receipt.facts:
        if look.header == "centre":
            flow.pair(label, value, face)
        else:
            flow.text(f"{label} {value}", face)
    flow.rule(look.rule, face)


def _items(flow: Flow, receipt: Receipt, look: Look, face: Face) -> None:
    {"columns": _columns, "below": _below, "leaders": _leaders}[look.items](flow, receipt, look, face)


def _additions(flow: Flow, receipt: Receipt, item: MenuLine, face: Face, inset: int) -> None:
    """Places extras and the discount of an item, each on a line below it."""
    for name, price in item.extras:
        flow.mark(flow.x0 + inset, "+", face)
        flow.pair(name, price, face, inset=inset + face.width("+ "))
    if item.discount:
        flow.pair(receipt.labels["promotion"], item.discount, face, inset=inset)


def _words(flow: Flow, x: int, face: Face, *texts: str | None, unit: str | None = None) -> int:
    """Places texts, and the unit price after an ``@``, side by side. Returns the start of the next."""
    for text in texts:
        if text:
            flow.put(x, face.width(text), text, face)
            x += face.width(f"{text} ")
    if unit:
        flow.mark(x, "@", face)
        x = _words(flow, x + face.width("@ "), face, unit)
    return x


def _below(flow: Flow, receipt: Receipt, look: Look, face: Face) -> None:
    """Places the name over the whole width, then a line with count, unit price and price."""
    for item in receipt.items:
        x = _words(flow, flow.x0, face, item.code)
        flow.y += flow.put(x, flow.x1 - x, item.name, face)
        x = _words(flow, flow.x0 + face.size, face, item.count, unit=item.unit)
        if x + face.width(item.price) > flow.x1:
            raise NoRoomError(f"the figures of {item.name!r} overlap")
        flow.y += flow.put(x, flow.x1 - x, item.price, face, "right")
        _additions(flow, receipt, item, face, face.size)


def _leaders(flow: Flow, receipt: Receipt, look: Look, face: Face) -> None:
    """Places count and name, dots, and the price on the name's last line, with the unit price below."""
    for item in receipt.items:
        inset = _words(flow, flow.x0, face, item.count, item.code) - flow.x0
        flow.pair(item.name, item.price, face, leader=True, inset=inset)
        if item.unit:
            _words(flow, flow.x0 + inset, face, unit=item.unit)
            flow.y += flow.pitch(face)
        _additions(flow, receipt, item, face, inset)


def _columns(flow: Flow, receipt: Receipt, look: Look, face: Face) -> None:
    """Places columns, with optional headings. The names get the remaining width."""
    gap, bold = face.size * 3 // 4, look.at(face.size, bold=True)
    columns = {key: [getattr(item, key) or "" for item in receipt.items] for key in _COLUMNS}
    columns = {key: texts for key, texts in columns.items() if any(texts)}
    heads = {key: receipt.labels.get(key, "") if look.heads else "" for key in columns}
    widths = {key: max(bold.width(heads[key]), *map(face.width, texts)) for key, texts in columns.items()}
    widths["name"] += flow.x1 - flow.x0 - sum(widths.values()) - gap * (len(widths) - 1)
    if widths["name"] < face.size * _MIN_NAME_EM:
        raise NoRoomError(f"{widths['name']} px for the names")

    def line(texts: dict[str, str], face: Face) -> None:
        x, height = flow.x0, 0
        for key, width in widths.items():
            align: Align = "right" if key in ("unit", "price") else "left"
            height = max(height, flow.put(x, width, texts[key], face, align) if texts[key] else 0)
            x += width + gap
        flow.y += height

    if look.heads:
        line(heads, bold)
    inset = sum(width + gap for key, width in widths.items() if key in ("code", "count"))
    for number, item in enumerate(receipt.items):
        line({key: texts[number] for key, texts in columns.items()}, face)
        _additions(flow, receipt, item, face, inset)


def _code(rng: Random, kind: str, size: int) -> Image.Image:
    """Draws something like a barcode or QR code, about ``size`` pixels wide, in mode L."""
    side, height = (25, 25) if kind == "matrix" else (75, 1)
    modules = Image.frombytes("L", (side, height), bytes(255 * rng.getrandbits(1) for _ in range(side * height)))
    if kind == "matrix":
        draw = ImageDraw.Draw(modules)
        for x, y in ((0, 0), (18, 0), (0, 18)):
            draw.rectangle((x - 1, y - 1, x + 7, y + 7), fill=0)
            draw.rectangle((x, y, x + 6, y + 6), outline=255)
            draw.rectangle((x + 2, y + 2, x + 4, y + 4), fill=255)
    unit = max(1, size // side)
    return modules.resize((side * unit, height * unit if height > 1 else size // 3), Image.Resampling.NEAREST)
