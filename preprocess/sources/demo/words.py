"""What a locale brings to a receipt: money, labels, shops, goods. Types only; the words are in catalogs."""

from dataclasses import dataclass

Goods = tuple[tuple[str, int], ...]
"""(name as written, usual price in minor units)."""


@dataclass(frozen=True)
class MoneyStyle:
    """How an amount is printed.

    Attributes:
        decimals: digits printed after the decimal mark.
        thousands: mark between groups of three digits; may be empty.
        point: decimal mark; unused when ``decimals`` is 0.
        before: currency sign printed in front, with its space if it has one.
        after: currency sign printed behind, with its space if it has one.
    """

    decimals: int
    thousands: str
    point: str
    before: str = ""
    after: str = ""


@dataclass(frozen=True)
class Labels:
    """Words beside the figures; every entry lists alternatives, one of which a receipt picks."""

    subtotal: tuple[str, ...]
    discount: tuple[str, ...]
    service: tuple[str, ...]
    tax: tuple[str, ...]
    tax_included: tuple[str, ...]
    rounding: tuple[str, ...]
    total: tuple[str, ...]
    cash: tuple[str, ...]
    change: tuple[str, ...]
    card: tuple[str, ...]
    types: tuple[str, ...]
    quantity: tuple[str, ...]
    promotion: tuple[str, ...]
    date: tuple[str, ...]
    number: tuple[str, ...]
    cashier: tuple[str, ...]
    table: tuple[str, ...]
    head_count: tuple[str, ...]
    head_name: tuple[str, ...]
    head_unit: tuple[str, ...]
    head_price: tuple[str, ...]
    paid: tuple[str, ...]
    thanks: tuple[str, ...]


@dataclass(frozen=True)
class Locale:
    """One country's receipts.

    Attributes:
        code: language and country, for example ``id_ID``.
        currency: ISO 4217 code.
        minor: minor units per major unit (100, or 1 where there are none).
        step: item prices are multiples of this many minor units.
        notes: what cash tenders are rounded up to, in minor units, small to large.
        lines: styles for amounts among the items, without a currency sign or with one.
        totals: for each of ``lines``, the style with the currency sign.
        tax_rates: rates in units of 0.01 %.
        tax_added: whether tax may be put on top of the prices.
        service_rates: rates in units of 0.01 %; empty where there is no such custom.
        cash_step: cash totals are rounded to this many minor units (1: never).
        date_formats: ``strftime`` patterns without names of days or months.
        labels: the words.
        eateries: names of cafes and restaurants.
        stores: names of shops.
        streets: street names, ``{}`` standing for the house number.
        cities: towns, with postcode where that is the custom.
        phones: patterns; each ``#`` becomes a digit.
        people: first names, for the cashier.
        food: what eateries sell.
        retail: what stores sell.
        variants: endings that turn one article into another.
        extras: modifiers with their price; 0 is printed without one.
    """

    code: str
    currency: str
    minor: int
    step: int
    notes: tuple[int, ...]
    lines: tuple[MoneyStyle, ...]
    totals: tuple[MoneyStyle, ...]
    tax_rates: tuple[int, ...]
    tax_added: bool
    service_rates: tuple[int, ...]
    cash_step: int
    date_formats: tuple[str, ...]
    labels: Labels
    eateries: tuple[str, ...]
    stores: tuple[str, ...]
    streets: tuple[str, ...]
    cities: tuple[str, ...]
    phones: tuple[str, ...]
    people: tuple[str, ...]
    food: Goods
    retail: Goods
    variants: tuple[str, ...]
    extras: Goods
