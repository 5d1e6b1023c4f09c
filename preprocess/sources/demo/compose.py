"""Makes up receipts: a random but consistent ``Receipt`` for a locale."""

import dataclasses
import datetime
from random import Random

from preprocess.sources.demo.catalog_asia import INDONESIA, JAPAN
from preprocess.sources.demo.catalog_english import AMERICA, BRITAIN
from preprocess.sources.demo.catalog_europe import FRANCE, GERMANY, ITALY, SPAIN
from preprocess.sources.demo.content import Item, Modifier, Printing, Receipt, Shop
from preprocess.sources.demo.words import Labels, Locale

LOCALES: dict[str, Locale] = {
    locale.code: locale for locale in (INDONESIA, JAPAN, AMERICA, BRITAIN, FRANCE, GERMANY, SPAIN, ITALY)
}

_EPOCH = datetime.datetime(2019, 1, 1, 8, 0)


def compose_receipt(rng: Random, locale_code: str, item_count: int) -> Receipt:
    """Makes up one receipt.

    Args:
        rng: the only source of chance.
        locale_code: a key of ``LOCALES``.
        item_count: number of item lines, 1 to 30.

    Returns:
        A receipt whose sums hold.
    """
    locale = LOCALES[locale_code]
    eatery = rng.random() < 0.6
    printing = _printing(rng, locale)
    items = _items(rng, locale, eatery, item_count, with_counts=printing.show_counts)
    if rng.random() < 0.25:
        items = tuple(dataclasses.replace(item, name=item.name.upper()) for item in items)
    bare = Receipt(
        locale=locale.code,
        currency=locale.currency,
        minor=locale.minor,
        eatery=eatery,
        shop=_shop(rng, locale, printing.labels, eatery),
        items=items,
        discount=0,
        service=0,
        tax=0,
        tax_included=not locale.tax_added or rng.random() < 0.3,
        rounding=0,
        payment="none",
        tendered=0,
        printing=printing,
    )
    return _paid(rng, locale, _charged(rng, locale, bare))


def _chance(rng: Random, share: float) -> bool:
    return rng.random() < share


def _printing(rng: Random, locale: Locale) -> Printing:
    style = rng.randrange(len(locale.lines))
    words = locale.labels
    labels = {field.name: rng.choice(getattr(words, field.name)) for field in dataclasses.fields(Labels)}
    if _chance(rng, 0.3):
        labels |= {key: f"{labels[key]}:" for key in ("subtotal", "total", "cash", "change", "number")}
    show_counts = _chance(rng, 0.85)
    return Printing(
        lines=locale.lines[style],
        totals=locale.totals[style] if _chance(rng, 0.6) else locale.lines[style],
        count_format=rng.choice(("{}", "{}", "{}x", "{} x", "x{}")),
        negative_format=rng.choice(("-{}", "-{}", "({})", "- {}")),
        show_counts=show_counts,
        show_units=rng.choice(("never", "multiple", "multiple", "always")) if show_counts else "never",
        show_subtotal=_chance(rng, 0.7),
        show_types=_chance(rng, 0.12),
        show_quantity=_chance(rng, 0.25),
        labels=labels,
    )


def _shop(rng: Random, locale: Locale, labels: dict[str, str], eatery: bool) -> Shop:
    moment = _EPOCH + datetime.timedelta(days=rng.randrange(2400), minutes=rng.randrange(14 * 60))
    date = moment.strftime(rng.choice(locale.date_formats))
    street = rng.choice(locale.streets).format(rng.randrange(1, 240))
    phone = "".join(str(rng.randrange(10)) if ch == "#" else ch for ch in rng.choice(locale.phones))
    address = [street, rng.choice(locale.cities), phone]
    facts = [
        (labels["date"], f"{date} {moment:%H:%M}" if _chance(rng, 0.7) else date),
        (labels["number"], f"{rng.randrange(10, 99999):0{rng.choice((4, 5, 6))}d}"),
        (labels["cashier"], rng.choice(locale.people)),
    ]
    if eatery and _chance(rng, 0.6):
        facts.append((labels["table"], str(rng.randrange(1, 40))))
    return Shop(
        name=rng.choice(locale.eateries if eatery else locale.stores),
        address=tuple(address[: rng.choice((1, 2, 3, 3))]),
        facts=(facts[0], *rng.sample(facts[1:], rng.randrange(len(facts)))),
        date=date,
        thanks=labels["thanks"],
    )


def _names(rng: Random, locale: Locale, eatery: bool, count: int) -> list[tuple[str, int]]:
    """Distinct articles: plain ones first, then variants, as a long shopping list would have them."""
    goods = locale.food if eatery else locale.retail
    plain = rng.sample(goods, min(count, len(goods)))
    varied = [
        (f"{name} {variant}", price) if _chance(rng, 0.25) else (name, price)
        for (name, price), variant in ((good, rng.choice(locale.variants)) for good in plain)
    ]
    taken = {name for name, _ in varied}
    while len(varied) < count:
        name, price = rng.choice(goods)
        name = f"{name} {rng.choice(locale.variants)}"
        if name not in taken:
            taken.add(name)
            varied.append((name, price))
    rng.shuffle(varied)
    return varied


def _items(rng: Random, locale: Locale, eatery: bool, count: int, with_counts: bool) -> tuple[Item, ...]:
    codes = _chance(rng, 0.12)
    discounts = _chance(rng, 0.15)
    modifiers = eatery and _chance(rng, 0.4)
    items = []
    for name, usual in _names(rng, locale, eatery, count):
        unit = max(locale.step, round(usual * rng.uniform(0.8, 1.3) / locale.step) * locale.step)
        quantity = rng.choices((1, 2, 3, 4, 5, 12), (60, 22, 9, 5, 3, 1))[0] if with_counts else 1
        off = unit * quantity * rng.choice((10, 20, 25)) // (100 * locale.step) * locale.step
        extras = rng.sample(locale.extras, rng.choice((1, 1, 2))) if modifiers and _chance(rng, 0.35) else []
        items.append(
            Item(
                name=name,
                quantity=quantity,
                unit=unit,
                discount=off if discounts and _chance(rng, 0.4) else 0,
                code=f"{rng.randrange(100000):05d}" if codes else None,
                modifiers=tuple(Modifier(extra, price) for extra, price in extras),
            )
        )
    return tuple(items)


def _percent(rate: int, locale: Locale) -> str:
    """A rate in units of 0.01 % as text: 1000 -> "10%", 1250 -> "12.5%" or "12,5%"."""
    whole, rest = divmod(rate, 100)
    fraction = f"{rest:02d}".rstrip("0")
    return f"{whole}{locale.lines[0].point}{fraction}%" if fraction else f"{whole}%"


def _charged(rng: Random, locale: Locale, receipt: Receipt) -> Receipt:
    """Adds discount, service and tax, with the rates in their labels."""
    labels = dict(receipt.printing.labels)
    discount = service = tax = 0
    if _chance(rng, 0.15):
        discount = receipt.subtotal * rng.choice((500, 1000, 1500)) // (10000 * locale.step) * locale.step
    base = receipt.subtotal - discount
    if receipt.eatery and locale.service_rates and _chance(rng, 0.35):
        rate = rng.choice(locale.service_rates)
        service = round(base * rate / 10000)
        labels["service"] = f"{labels['service']} {_percent(rate, locale)}"
    if _chance(rng, 0.65):
        rate = rng.choice(locale.tax_rates)
        taxed = base + service
        tax = round(taxed * rate / (10000 + rate) if receipt.tax_included else taxed * rate / 10000)
        key = "tax_included" if receipt.tax_included else "tax"
        labels[key] = f"{labels[key]} {_percent(rate, locale)}"
    # A charge without a subtotal would leave the reader to guess what it was taken on.
    charged = discount > 0 or service > 0 or (tax > 0 and not receipt.tax_included)
    printing = dataclasses.replace(
        receipt.printing, labels=labels, show_subtotal=receipt.printing.show_subtotal or charged
    )
    return dataclasses.replace(receipt, discount=discount, service=service, tax=tax, printing=printing)


def _paid(rng: Random, locale: Locale, receipt: Receipt) -> Receipt:
    """Chooses the payment; cash may round the total and is tendered in whole notes."""
    luck = rng.random()
    if luck < 0.45:
        return dataclasses.replace(receipt, payment="card" if luck < 0.3 else "none")
    off = receipt.total % locale.cash_step
    rounding = -off if off * 2 < locale.cash_step else locale.cash_step - off
    receipt = dataclasses.replace(receipt, payment="cash", rounding=rounding if off else 0)
    note = rng.choice(locale.notes)
    tendered = -(-receipt.total // note) * note
    return dataclasses.replace(receipt, tendered=tendered)
