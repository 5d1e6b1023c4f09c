"""The text of a receipt, as printed, and its ground truth in CORD-V2's keys."""

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MenuLine:
    """One line of the menu. ``None`` is not printed. ``price`` is the total, without discount and extras."""

    name: str
    price: str
    quantity: int
    count: str | None
    unit: str | None
    code: str | None
    discount: str | None
    extras: tuple[tuple[str, str | None], ...]


@dataclass(frozen=True)
class Figure:
    """A labelled value below the items, with the keys of its text in the ground truth."""

    group: str
    key: str
    label: str
    text: str


@dataclass(frozen=True)
class Receipt:
    """All texts of a receipt, in no particular layout."""

    locale: str  # for example ``id_ID``
    shop: str  # name of the shop
    address: tuple[str, ...]  # lines below the name
    date: str  # as printed, without the time
    facts: tuple[tuple[str, str], ...]  # labels and values above the items; the first holds the date
    #: Words of columns (by attribute of ``MenuLine``) and of discounts (``promotion``), and the last line
    #: (``thanks``).
    labels: dict[str, str]
    items: tuple[MenuLine, ...]  # one or more
    figures: tuple[Figure, ...]  # in printing order
    currency: str  # ISO 4217 code
    total: int  # amount to pay, in minor units

    def text(self, key: str) -> str | None:
        """Returns the figure with this ground-truth key, as printed."""
        return next((figure.text for figure in self.figures if figure.key == key), None)


def _one_or_list(rows: list[dict[str, Any]]) -> Any:
    # CORD writes a list of one as its element.
    return rows[0] if len(rows) == 1 else rows


def _printed(texts: dict[str, str | None]) -> dict[str, Any]:
    return {key: text for key, text in texts.items() if text is not None}


def _item_parse(item: MenuLine) -> dict[str, Any]:
    texts = {"nm": item.name, "num": item.code, "unitprice": item.unit, "cnt": item.count}
    entry = _printed(texts | {"discountprice": item.discount, "price": item.price})
    subs = [_printed({"nm": name, "price": price}) for name, price in item.extras]
    return entry | ({"sub": _one_or_list(subs)} if subs else {})


def gt_parse(receipt: Receipt) -> dict[str, Any]:
    """Returns the receipt in CORD-V2's keys. All values are strings, exactly as printed."""
    parse: dict[str, Any] = {"menu": _one_or_list([_item_parse(item) for item in receipt.items])}
    for group in ("sub_total", "total"):
        texts = {figure.key: figure.text for figure in receipt.figures if figure.group == group}
        parse |= {group: texts} if texts else {}
    return parse


def ground_truth(receipt: Receipt, row: int, upright: tuple[int, int], two: bool) -> str:
    """Returns the ``ground_truth`` column of a row: JSON with ``gt_parse`` (or the list ``gt_parses``) and ``meta``.

    ``upright`` is width and height of the displayed image. With ``two``, there is a second valid reading: names and
    prices of the items, and the total.
    """
    full, total = gt_parse(receipt), receipt.text("total_price")
    brief = {"menu": _one_or_list([{"nm": item.name, "price": item.price} for item in receipt.items])}
    parse: dict[str, Any] = (
        {"gt_parses": [full, brief | {"total": {"total_price": total}}]} if two else {"gt_parse": full}
    )
    size = {"width": upright[0], "height": upright[1]}
    meta = {"version": "2.0.0", "split": "train", "image_id": row, "image_size": size}
    return json.dumps(parse | {"meta": meta}, ensure_ascii=False)
