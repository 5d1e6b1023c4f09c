"""Ways to set the lines of the menu."""

from dataclasses import dataclass

from preprocess.sources.demo.content import Item, Receipt
from preprocess.sources.demo.glyphs import FaceSpec, face
from preprocess.sources.demo.look import Look
from preprocess.sources.demo.page import Align, Flow, Line, NoRoomError, Run

_MIN_NAME_EM = 5
"""A name's column narrower than this many em is not worth having."""


def lay_items(flow: Flow, receipt: Receipt, look: Look, size: int) -> None:
    """Places all items and moves below them.

    Raises:
        NoRoomError: they do not fit the width.
    """
    if look.items == "below":
        _below(flow, receipt, look.spec(size))
    elif look.items == "leaders":
        _leaders(flow, receipt, look.spec(size))
    else:
        _columns(flow, receipt, look, size)


def _second_line(flow: Flow, receipt: Receipt, item: Item, spec: FaceSpec, indent: int, right: int) -> None:
    """Modifiers and the discount, each on a line below the item, amounts right-aligned at ``right``."""
    letters = face(spec)
    rows = [
        ("+", modifier.name, receipt.line_money(modifier.price) if modifier.price else "")
        for modifier in item.modifiers
    ]
    if item.discount:
        rows.append(("", receipt.printing.labels["promotion"], receipt.line_money(-item.discount)))
    for sign, name, amount in rows:
        x = indent
        if sign:
            flow.page.decor.append(Run(x, flow.y, sign, spec))
            x += letters.length(f"{sign} ")
        width = letters.length(amount)
        lines = flow.put(x, right - width - spec.size // 2 - x, name, spec)
        if amount:
            flow.put(right - width, width, amount, spec, "right")
        flow.y += lines * flow.pitch(spec)


def _below(flow: Flow, receipt: Receipt, spec: FaceSpec) -> None:
    """The name over the full width, then a line with count, price of one, and price."""
    letters, room = face(spec), flow.x1 - flow.x0
    indent = spec.size
    for item in receipt.items:
        x = flow.x0
        if item.code:
            flow.put(x, room, item.code, spec)
            x += letters.length(f"{item.code} ")
        flow.y += flow.put(x, flow.x1 - x, item.name, spec) * flow.pitch(spec)
        x = flow.x0 + indent
        count, unit, price = receipt.count_text(item), receipt.unit_text(item), receipt.line_money(item.price)
        start = flow.x1 - letters.length(price)
        if count:
            flow.put(x, start - x, count, spec)
            x += letters.length(f"{count} ")
        if unit:
            flow.page.decor.append(Run(x, flow.y, "@", spec))
            x += letters.length("@ ")
            flow.put(x, letters.length(unit), unit, spec)
            x += letters.length(f"{unit} ")
        if x > start:
            raise NoRoomError(f"the figures of {item.name!r} overlap")
        flow.put(start, flow.x1 - start, price, spec)
        flow.y += flow.pitch(spec)
        _second_line(flow, receipt, item, spec, flow.x0 + indent, flow.x1)


def _leaders(flow: Flow, receipt: Receipt, spec: FaceSpec) -> None:
    """Count and name, dots, price; where a name wraps, dots and price stand on its last line."""
    letters = face(spec)
    lead = max((letters.length(f"{receipt.count_text(item)} ") for item in receipt.items), default=0)
    lead = lead if receipt.printing.show_counts else 0
    for item in receipt.items:
        x, count = flow.x0, receipt.count_text(item)
        if count:
            flow.put(x, lead, count, spec)
            x += lead
        if item.code:
            flow.put(x, letters.length(item.code), item.code, spec)
            x += letters.length(f"{item.code} ")
        price, unit = receipt.line_money(item.price), receipt.unit_text(item)
        start = flow.x1 - letters.length(price)
        room = start - x - 2 * spec.size
        if room < _MIN_NAME_EM * spec.size:
            raise NoRoomError(f"{room} px for a name")
        lines = flow.put(x, room, item.name, spec)
        last = flow.page.fields[-1].runs[-1]
        dy = (lines - 1) * flow.pitch(spec)
        flow.leader(last.box[2], start, spec, dy)
        flow.put(start, flow.x1 - start, price, spec, "right", dy)
        flow.y += lines * flow.pitch(spec)
        if unit:
            flow.page.decor.append(Run(x, flow.y, "@", spec))
            x += letters.length("@ ")
            flow.put(x, flow.x1 - x, unit, spec)
            flow.y += flow.pitch(spec)
        _second_line(flow, receipt, item, spec, flow.x0 + lead, flow.x1)


@dataclass(frozen=True)
class _Column:
    """One column: its edges, heading, and each item's text."""

    x: int
    width: int
    heading: str
    texts: tuple[str, ...]
    align: Align
    name: bool


def _plan_columns(
    receipt: Receipt, spec: FaceSpec, head_spec: FaceSpec | None, x0: int, x1: int, gap: int
) -> list[_Column]:
    """Columns from left to right; the name gets what the others leave. Headings count where they have a face.

    Raises:
        NoRoomError: that is too little.
    """
    labels, letters = receipt.printing.labels, face(spec)
    wanted: list[tuple[str, list[str | None], bool]] = [
        ("", [item.code for item in receipt.items], False),
        (labels["head_count"], [receipt.count_text(item) for item in receipt.items], False),
        (labels["head_name"], [item.name for item in receipt.items], False),
        (labels["head_unit"], [receipt.unit_text(item) for item in receipt.items], True),
        (labels["head_price"], [receipt.line_money(item.price) for item in receipt.items], True),
    ]
    kept = [(head, [text or "" for text in texts], right) for head, texts, right in wanted if any(texts)]
    widths = [max(map(letters.length, texts)) for _, texts, _ in kept]
    if head_spec is not None:
        widths = [max(width, face(head_spec).length(head)) for width, (head, _, _) in zip(widths, kept, strict=True)]
    name_at = next(number for number, (head, _, _) in enumerate(kept) if head == labels["head_name"])
    widths[name_at] = x1 - x0 - gap * (len(kept) - 1) - (sum(widths) - widths[name_at])
    if widths[name_at] < _MIN_NAME_EM * spec.size:
        raise NoRoomError(f"{widths[name_at]} px for the names")
    columns, x = [], x0
    for number, ((head, texts, right), width) in enumerate(zip(kept, widths, strict=True)):
        columns.append(_Column(x, width, head, tuple(texts), "right" if right else "left", number == name_at))
        x += width + gap
    return columns


def _columns(flow: Flow, receipt: Receipt, look: Look, size: int) -> None:
    """Columns under headings; as a ``table`` with lines between rows and columns."""
    grid, spec = look.items == "table", look.spec(size)
    head_spec = look.spec(size, bold=grid) if look.heads or grid else None
    pad, thick = (size // 2 if grid else 0), max(1, size // 16)
    gap = size if grid else max(face(spec).length(" "), size * 3 // 4)
    columns = _plan_columns(receipt, spec, head_spec, flow.x0 + pad, flow.x1 - pad, gap)
    right = columns[-1].x + columns[-1].width
    top = flow.y
    levels = [top]
    step = size // 3 if grid else 0
    if head_spec is not None:
        flow.y += step
        tall = 1
        for column in columns:
            if column.heading:
                tall = max(tall, flow.put(column.x, column.width, column.heading, head_spec, column.align))
        flow.y += tall * flow.pitch(head_spec) + step
        levels.append(flow.y)
        if not grid:
            flow.rule(look.rule, spec)
    name = next(column for column in columns if column.name)
    for number, item in enumerate(receipt.items):
        flow.y += step
        tall = 1
        for column in columns:
            if column.texts[number]:
                tall = max(tall, flow.put(column.x, column.width, column.texts[number], spec, column.align))
        flow.y += tall * flow.pitch(spec)
        _second_line(flow, receipt, item, spec, name.x, name.x + name.width if grid else right)
        flow.y += step
        levels.append(flow.y)
    if grid:
        for y in levels:
            flow.page.lines.append(Line(flow.x0, y, flow.x1, y, thick))
        for x in [flow.x0, flow.x1, *(column.x - gap // 2 for column in columns[1:])]:
            flow.page.lines.append(Line(x, top, x, flow.y, thick))
        flow.y += size // 2
