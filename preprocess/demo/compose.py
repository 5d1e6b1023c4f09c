"""Composes receipts from the words of four countries in ``words.json``, with their ground truth in CORD-V2's keys."""

import datetime
import json
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from random import Random
from typing import Any

LOCALES = ("id_ID", "en_US", "de_DE", "ja_JP")
_EPOCH = datetime.datetime(2019, 1, 1, 8, 0)


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


@dataclass(frozen=True)
class Locale:
    """Words and conventions of a country. All texts are ASCII, because Pillow's fonts have no accents."""

    currency: str  # ISO 4217
    minor: int  # minor units per major unit: 100, or 1
    step: int  # prices are multiples of this many minor units
    cash_step: int  # cash totals are, too
    notes: list[int]  # cash is handed over in multiples of one of these, minor units
    thousands: list[str]  # marks between groups of three digits
    point: str  # decimal mark
    signs: list[tuple[str, str]]  # currency signs, before and after an amount
    tax_rates: list[int]  # units of 0.01 %
    tax_added: bool  # taxes may come on top of the prices
    service_rates: list[int]  # units of 0.01 %; empty: there is no service charge
    date_formats: list[str]  # of strftime
    labels: dict[str, list[str]]  # alternatives for each
    eateries: list[str]
    stores: list[str]
    streets: list[str]  # {} is the house number
    cities: list[str]
    phones: list[str]  # every # becomes a digit
    variants: list[str]  # endings that turn one article into another
    food: list[tuple[str, int]]  # names with usual prices in minor units, as in the two below
    retail: list[tuple[str, int]]
    extras: list[tuple[str, int]]  # those of price 0 are printed without one


@dataclass(frozen=True)
class Money:
    """How a receipt prints amounts; ``minor``, ``thousands`` and ``point`` are as in ``Locale``."""

    minor: int
    thousands: str
    point: str
    before: str
    after: str
    negative: str

    def text(self, amount: int) -> str:
        """Prints an amount in minor units: ``"Rp 54,000"``, ``"12,50 EUR"``, ``"(3.20)"``."""
        major, rest = divmod(abs(amount), self.minor)
        decimals = f"{self.point}{rest:02d}" if self.minor > 1 else ""
        text = f"{self.before}{f'{major:,}'.replace(',', self.thousands)}{decimals}{self.after}"
        return self.negative.format(text) if amount < 0 else text


@cache
def locale_named(code: str) -> Locale:
    """Returns the locale with this code, one of ``LOCALES``."""
    text = files(__package__).joinpath("words.json").read_text(encoding="utf-8")
    return Locale(**json.loads(text)[code])


def compose_receipt(rng: Random, locale_code: str, item_count: int) -> Receipt:
    """Composes one receipt of 1 to 30 item lines in the words of one of ``LOCALES``."""
    locale, eatery = locale_named(locale_code), rng.random() < 0.6
    labels = {key: rng.choice(words) for key, words in locale.labels.items()}
    if rng.random() < 0.3:
        labels |= {key: f"{labels[key]}:" for key in ("subtotal", "total", "cash", "change", "number")}
    negative, (before, after) = rng.choice(("-{}", "-{}", "({})", "- {}")), rng.choice(locale.signs)
    money = Money(locale.minor, rng.choice(locale.thousands), locale.point, before, after, negative)
    bare = money if rng.random() < 0.4 else replace(money, before="", after="")
    items, subtotal = _items(rng, locale, bare, eatery, item_count)
    figures, total = _figures(rng, locale, labels, money, eatery, subtotal, sum(item.quantity for item in items))
    moment = _EPOCH + datetime.timedelta(days=rng.randrange(2400), minutes=rng.randrange(14 * 60))
    date = moment.strftime(rng.choice(locale.date_formats))
    facts = [(labels["number"], f"{rng.randrange(10, 99999):05d}"), (labels["table"], str(rng.randrange(1, 40)))]
    phone = "".join(str(rng.randrange(10)) if ch == "#" else ch for ch in rng.choice(locale.phones))
    street = rng.choice(locale.streets).format(rng.randrange(1, 240))
    return Receipt(
        locale=locale_code,
        shop=rng.choice(locale.eateries if eatery else locale.stores),
        address=(street, rng.choice(locale.cities), phone)[: rng.choice((1, 2, 3, 3))],
        date=date,
        facts=((labels["date"], f"{date} {moment:%H:%M}"), *facts[: rng.randrange(3 if eatery else 2)]),
        labels=labels,
        items=items,
        figures=figures,
        currency=locale.currency,
        total=total,
    )


def _articles(rng: Random, locale: Locale, eatery: bool, count: int) -> list[tuple[str, int]]:
    """Draws distinct articles with their usual prices: plain ones first, then variants."""
    goods, prices = locale.food if eatery else locale.retail, dict[str, int]()
    for name, price in rng.sample(goods, min(count, len(goods))):
        prices[f"{name} {rng.choice(locale.variants)}" if rng.random() < 0.25 else name] = price
    while len(prices) < count:
        name, price = rng.choice(goods)
        prices.setdefault(f"{name} {rng.choice(locale.variants)}", price)
    return rng.sample(list(prices.items()), count)


def _items(rng: Random, locale: Locale, money: Money, eatery: bool, count: int) -> tuple[tuple[MenuLine, ...], int]:
    """Returns the item lines and their sum in minor units."""
    codes, discounts, extras = rng.random() < 0.12, rng.random() < 0.15, eatery and rng.random() < 0.4
    counts, capitals = rng.random() < 0.85, rng.random() < 0.25
    pattern, units = rng.choice(("{}", "{}", "{}x", "{} x", "x{}")), rng.choice((0, 1, 1, 2))
    items, subtotal, step = [], 0, locale.step
    for name, usual in _articles(rng, locale, eatery, count):
        unit = max(step, round(usual * rng.uniform(0.8, 1.3) / step) * step)
        quantity = rng.choices((1, 2, 3, 4, 5, 12), (60, 22, 9, 5, 3, 1))[0] if counts else 1
        off = unit * quantity * rng.choice((10, 20, 25)) // (100 * step) * step
        off = off if discounts and rng.random() < 0.4 else 0
        added = rng.sample(locale.extras, rng.choice((1, 1, 2))) if extras and rng.random() < 0.35 else []
        subtotal += unit * quantity - off + sum(price for _, price in added)
        item = MenuLine(
            name=name.upper() if capitals else name,
            price=money.text(unit * quantity),
            quantity=quantity,
            count=pattern.format(quantity) if counts else None,
            # For every line, for lines with several, or for none.
            unit=money.text(unit) if counts and units + (quantity > 1) > 1 else None,
            code=f"{rng.randrange(100000):05d}" if codes else None,
            discount=money.text(-off) if off else None,
            extras=tuple((extra, money.text(price) if price else None) for extra, price in added),
        )
        items.append(item)
    return tuple(items), subtotal


def _figures(
    rng: Random, locale: Locale, labels: dict[str, str], money: Money, eatery: bool, subtotal: int, quantity: int
) -> tuple[tuple[Figure, ...], int]:
    """Returns everything below the items, in printing order, and the total in minor units."""
    discount = service = tax = rounding = tendered = 0
    service_rate = tax_rate = ""
    if rng.random() < 0.15:
        discount = subtotal * rng.choice((5, 10, 15)) // (100 * locale.step) * locale.step
    if eatery and locale.service_rates and rng.random() < 0.35:
        rate = rng.choice(locale.service_rates)
        service, service_rate = round((subtotal - discount) * rate / 10000), _percent(rate, locale)
    taxed, included = subtotal - discount + service, not locale.tax_added or rng.random() < 0.3
    if rng.random() < 0.65:
        rate = rng.choice(locale.tax_rates)
        tax, tax_rate = round(taxed * rate / (10000 + rate * included)), _percent(rate, locale)
    total = taxed + (0 if included else tax)
    payment = rng.choices(("cash", "card", "none"), (55, 30, 15))[0]
    if payment == "cash":
        rounding = (total + locale.cash_step // 2) // locale.cash_step * locale.cash_step - total
        total += rounding
        note = rng.choice(locale.notes)
        tendered = -(-total // note) * note
    # A charge without a subtotal would not show its base.
    show_subtotal = bool(discount or service or (tax and not included)) or rng.random() < 0.7
    rows = [
        (show_subtotal, "sub_total", "subtotal_price", labels["subtotal"], subtotal),
        (discount > 0, "sub_total", "discount_price", labels["discount"], -discount),
        (service > 0, "sub_total", "service_price", labels["service"] + service_rate, service),
        (tax > 0 and not included, "sub_total", "tax_price", labels["tax"] + tax_rate, tax),
        (rounding != 0, "sub_total", "etc", labels["rounding"], rounding),
        (True, "total", "total_price", labels["total"], total),
        (tax > 0 and included, "sub_total", "tax_price", labels["tax_included"] + tax_rate, tax),
        (payment == "cash", "total", "cashprice", labels["cash"], tendered),
        (payment == "cash", "total", "changeprice", labels["change"], tendered - total),
        (payment == "card", "total", "creditcardprice", labels["card"], total),
    ]
    figures = [Figure(group, key, label, money.text(amount)) for shown, group, key, label, amount in rows if shown]
    if rng.random() < 0.25:
        figures.append(Figure("total", "menuqty_cnt", labels["quantity"], str(quantity)))
    return tuple(figures), total


def _percent(rate: int, locale: Locale) -> str:
    """Formats a rate in units of 0.01 % that follows a label: 1250 gives `` 12.5%``."""
    return f" {rate / 100:g}%".replace(".", locale.point)
