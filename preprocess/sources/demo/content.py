"""What a receipt says: shop, items, totals and payment, and the CORD-V2 reading of them.

Amounts are integers in minor units (cents, or whole rupiah and yen). How they are printed belongs to
the content too, because the ground truth holds every value exactly as it stands on the paper.
"""

from dataclasses import dataclass
from typing import Any, Literal

from preprocess.sources.demo.words import MoneyStyle


def format_money(amount: int, style: MoneyStyle, minor: int) -> str:
    """Prints a non-negative amount.

    Args:
        amount: minor units.
        style: how to print it.
        minor: minor units per major unit.

    Returns:
        For example ``"Rp 54,000"`` or ``"12,50 €"``.

    Raises:
        ValueError: the amount is negative, or has a fraction that the style has no digits for.
    """
    if amount < 0:
        raise ValueError(f"format_money prints amounts from 0 on, got {amount}")
    major, rest = divmod(amount, minor)
    if rest and style.decimals == 0:
        raise ValueError(f"{amount} minor units of 1/{minor} cannot be printed without decimals")
    digits = f"{major:,}".replace(",", style.thousands)
    if style.decimals:
        digits += f"{style.point}{rest:0{style.decimals}d}"
    return f"{style.before}{digits}{style.after}"


@dataclass(frozen=True)
class Shop:
    """Head and foot of the paper; none of it is in the ground truth.

    Attributes:
        name: of the shop.
        address: lines under the name.
        facts: (label, value) such as date, receipt number, cashier.
        date: as printed.
        thanks: closing line.
    """

    name: str
    address: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    date: str
    thanks: str


@dataclass(frozen=True)
class Modifier:
    """An addition to an item. ``price`` is for the whole line; 0 is not printed."""

    name: str
    price: int


@dataclass(frozen=True)
class Item:
    """One line of the menu.

    Attributes:
        name: as printed, on one line or wrapped.
        quantity: 1 or more.
        unit: price of one, in minor units.
        discount: taken off this line, in minor units; 0 is not printed.
        code: article number, or None.
        modifiers: additions, each printed below the item.
    """

    name: str
    quantity: int
    unit: int
    discount: int = 0
    code: str | None = None
    modifiers: tuple[Modifier, ...] = ()

    @property
    def price(self) -> int:
        """``quantity * unit``, before the discount and without modifiers."""
        return self.quantity * self.unit

    @property
    def amount(self) -> int:
        """What the line adds to the subtotal."""
        return self.price - self.discount + sum(modifier.price for modifier in self.modifiers)


@dataclass(frozen=True)
class Printing:
    """How this receipt prints what it says.

    Attributes:
        lines: amounts among the items.
        totals: amounts below them.
        count_format: such as ``"{}x"``.
        negative_format: such as ``"-{}"``.
        show_counts: whether quantities are printed (else all are 1).
        show_units: ``"always"``, for quantities over 1 only, or ``"never"``.
        show_subtotal: whether there is a subtotal line.
        show_types: whether the number of item lines is printed.
        show_quantity: whether the sum of quantities is printed.
        labels: the word beside each figure, keyed as in ``words.Labels``.
    """

    lines: MoneyStyle
    totals: MoneyStyle
    count_format: str
    negative_format: str
    show_counts: bool
    show_units: Literal["always", "multiple", "never"]
    show_subtotal: bool
    show_types: bool
    show_quantity: bool
    labels: dict[str, str]


@dataclass(frozen=True)
class Receipt:
    """A whole receipt. ``total`` is what the customer pays.

    Attributes:
        locale: for example ``fr_FR``.
        currency: ISO 4217 code.
        minor: minor units per major unit.
        eatery: whether it comes from a cafe or restaurant (else a store).
        shop: head and foot.
        items: one or more.
        discount: off the subtotal.
        service: service charge on top.
        tax: tax, on top of the prices unless ``tax_included``.
        tax_included: whether ``tax`` is already within the prices.
        rounding: signed correction of the total.
        payment: how it was paid; ``"none"`` prints nothing.
        tendered: cash handed over; 0 unless paid in cash.
        printing: how the figures are printed.
    """

    locale: str
    currency: str
    minor: int
    eatery: bool
    shop: Shop
    items: tuple[Item, ...]
    discount: int
    service: int
    tax: int
    tax_included: bool
    rounding: int
    payment: Literal["cash", "card", "none"]
    tendered: int
    printing: Printing

    @property
    def subtotal(self) -> int:
        """Sum over the items."""
        return sum(item.amount for item in self.items)

    @property
    def total(self) -> int:
        """What is to be paid."""
        added_tax = 0 if self.tax_included else self.tax
        return self.subtotal - self.discount + self.service + added_tax + self.rounding

    @property
    def change(self) -> int:
        """Cash handed back."""
        return self.tendered - self.total if self.payment == "cash" else 0

    @property
    def quantity(self) -> int:
        """Sum of the quantities."""
        return sum(item.quantity for item in self.items)

    def line_money(self, amount: int) -> str:
        """An amount as printed among the items; a negative one in the receipt's own way."""
        return self._signed(amount, self.printing.lines)

    def total_money(self, amount: int) -> str:
        """An amount as printed below the items; a negative one in the receipt's own way."""
        return self._signed(amount, self.printing.totals)

    def _signed(self, amount: int, style: MoneyStyle) -> str:
        text = format_money(abs(amount), style, self.minor)
        return self.printing.negative_format.format(text) if amount < 0 else text

    def count_text(self, item: Item) -> str | None:
        """The quantity as printed, or None where this receipt prints none."""
        return self.printing.count_format.format(item.quantity) if self.printing.show_counts else None

    def unit_text(self, item: Item) -> str | None:
        """The price of one as printed, or None where this item's line has none."""
        show = self.printing.show_units
        shown = show == "always" or (show == "multiple" and item.quantity > 1)
        return self.line_money(item.unit) if shown else None


@dataclass(frozen=True)
class Figure:
    """One labelled amount below the items: where it stands in the ground truth, and its text."""

    group: Literal["sub_total", "total"]
    key: str
    label: str
    text: str


def figures(receipt: Receipt) -> tuple[Figure, ...]:
    """The labelled figures below the items, in printing order.

    This one list feeds both the drawing and the ground truth, so the two cannot differ.
    """
    labels, money = receipt.printing.labels, receipt.total_money
    added, included = receipt.tax > 0 and not receipt.tax_included, receipt.tax > 0 and receipt.tax_included
    rows: list[tuple[bool, Literal["sub_total", "total"], str, str, str]] = [
        (receipt.printing.show_subtotal, "sub_total", "subtotal_price", "subtotal", money(receipt.subtotal)),
        (receipt.discount > 0, "sub_total", "discount_price", "discount", money(-receipt.discount)),
        (receipt.service > 0, "sub_total", "service_price", "service", money(receipt.service)),
        (added, "sub_total", "tax_price", "tax", money(receipt.tax)),
        (receipt.rounding != 0, "sub_total", "etc", "rounding", money(receipt.rounding)),
        (True, "total", "total_price", "total", money(receipt.total)),
        (included, "sub_total", "tax_price", "tax_included", money(receipt.tax)),
        (receipt.payment == "cash", "total", "cashprice", "cash", money(receipt.tendered)),
        (receipt.payment == "cash", "total", "changeprice", "change", money(receipt.change)),
        (receipt.payment == "card", "total", "creditcardprice", "card", money(receipt.total)),
        (receipt.printing.show_types, "total", "menutype_cnt", "types", str(len(receipt.items))),
        (receipt.printing.show_quantity, "total", "menuqty_cnt", "quantity", str(receipt.quantity)),
    ]
    return tuple(Figure(group, key, labels[word], text) for shown, group, key, word, text in rows if shown)


def _one_or_list(rows: list[dict[str, Any]]) -> Any:
    # CORD writes a list of one as the bare element.
    return rows[0] if len(rows) == 1 else rows


def _item_parse(receipt: Receipt, item: Item) -> dict[str, Any]:
    entry: dict[str, Any] = {"nm": item.name}
    optional = {
        "num": item.code,
        "unitprice": receipt.unit_text(item),
        "cnt": receipt.count_text(item),
        "discountprice": receipt.line_money(-item.discount) if item.discount else None,
    }
    entry |= {key: text for key, text in optional.items() if text is not None}
    entry["price"] = receipt.line_money(item.price)
    subs = [
        {"nm": modifier.name} | ({"price": receipt.line_money(modifier.price)} if modifier.price else {})
        for modifier in item.modifiers
    ]
    if subs:
        entry["sub"] = _one_or_list(subs)
    return entry


def gt_parse(receipt: Receipt) -> dict[str, Any]:
    """The receipt in CORD-V2's keys, every value a string exactly as printed."""
    parse: dict[str, Any] = {"menu": _one_or_list([_item_parse(receipt, item) for item in receipt.items])}
    for figure in figures(receipt):
        # sub_total stands before total, also where its only figure is printed below the total.
        parse.setdefault(figure.group, {})[figure.key] = figure.text
    return {key: parse[key] for key in ("menu", "sub_total", "total") if key in parse}


def brief_parse(receipt: Receipt) -> dict[str, Any]:
    """A second valid reading: names, counts and prices of the items, and the total, nothing else."""
    full = gt_parse(receipt)
    menu = full["menu"] if isinstance(full["menu"], list) else [full["menu"]]
    kept = [{key: entry[key] for key in ("nm", "cnt", "price") if key in entry} for entry in menu]
    return {"menu": _one_or_list(kept), "total": {"total_price": full["total"]["total_price"]}}
