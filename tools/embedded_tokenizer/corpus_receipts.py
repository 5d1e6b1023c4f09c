"""Receipts of several countries for the tokenizer's training text: printed lines, Donut tags and JSON."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LOCALES = Path(__file__).parent / "corpus_text" / "receipts.json"
_SEED = 10
_RECEIPTS_PER_LOCALE = 24
_TAX_PERCENT = (5, 7, 8, 10, 11, 19, 20)
_RARE_LINE_KEYS = ("num", "discountprice", "itemsubtotal", "etc", "vatyn")


@dataclass(frozen=True)
class Locale:
    """The parts of a country's receipts; `point` and `thousands` format amounts."""

    currency: str
    decimals: int
    thousands: str
    point: str
    shops: Sequence[str]
    streets: Sequence[str]
    items: Sequence[str]
    labels: Sequence[str]
    footers: Sequence[str]

    def money(self, units: int) -> str:
        """Formats an amount of the smallest unit: `75,000`, `12.50`, `1.234,50`."""
        whole, rest = divmod(units, 10**self.decimals)
        text = f"{whole:,}".replace(",", self.thousands)
        return f"{text}{self.point}{rest:0{self.decimals}}" if self.decimals else text


class Draw:
    """Draws only from `random()`, whose sequence is equal in all Python versions, unlike that of `choice`."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def below(self, limit: int) -> int:
        """Draws a whole number from 0 to `limit` - 1."""
        return int(self._random.random() * limit)

    def pick[T](self, options: Sequence[T]) -> T:
        """Draws one of the options."""
        return options[self.below(len(options))]


def _menu_line(draw: Draw, locale: Locale) -> tuple[dict[str, Any], int]:
    """Draws one line of the menu. Returns it with its price."""
    count = 1 + draw.below(3)
    unit = (1 + draw.below(120)) * (500 if locale.decimals == 0 else 25)
    line: dict[str, Any] = {
        "nm": draw.pick(locale.items),
        "cnt": draw.pick((f"{count}", f"{count} x", f"x{count}", f"{count}.00")),
        "price": locale.money(count * unit),
    }
    if draw.below(2):
        line["unitprice"] = draw.pick(("", "@", f"{locale.currency} ")) + locale.money(unit)
    if not draw.below(4):
        extra = {"sub_nm": draw.pick(locale.items), "sub_price": locale.money(unit // 5), "sub_cnt": "1"}
        line["sub"] = [extra]
    for key in _RARE_LINE_KEYS:
        if not draw.below(12):
            line[key] = f"-{locale.money(unit // 10)}" if key == "discountprice" else str(draw.below(100))
    return line, count * unit


def _sums(draw: Draw, locale: Locale, subtotal: int, lines: int) -> tuple[dict[str, str], dict[str, str]]:
    """Draws the `sub_total` and the `total` of a receipt whose lines add up to `subtotal`."""
    discount, service = subtotal // 10 * draw.below(2), subtotal // 20 * draw.below(2)
    tax = (subtotal - discount) * draw.pick(_TAX_PERCENT) // 100
    due = subtotal - discount + service + tax
    given = due + (1 + draw.below(50)) * 50
    sub_total = {"subtotal_price": locale.money(subtotal), "tax_price": locale.money(tax)}
    if discount:
        sub_total["discount_price"] = f"-{locale.money(discount)}"
    if service:
        sub_total[draw.pick(("service_price", "othersvc_price", "etc"))] = locale.money(service)
    if not draw.below(10):
        sub_total |= {"subtotal_count": str(lines), "tax_and_service": locale.money(service + tax)}
    total = {"total_price": draw.pick(("", f"{locale.currency} ")) + locale.money(due)}
    paid_by = draw.pick(("cashprice", "creditcardprice", "emoneyprice"))
    total[paid_by] = locale.money(given)
    if paid_by == "cashprice":
        total["changeprice"] = locale.money(given - due)
    total[draw.pick(("menutype_cnt", "menuqty_cnt", "total_etc"))] = str(lines)
    return sub_total, total


def draw_receipt(draw: Draw, locale: Locale) -> dict[str, Any]:
    """Draws one receipt with the keys of CORD-V2."""
    lines = [_menu_line(draw, locale) for _ in range(1 + draw.below(6))]
    sub_total, total = _sums(draw, locale, sum(price for _, price in lines), len(lines))
    receipt: dict[str, Any] = {"menu": [line for line, _ in lines], "sub_total": sub_total, "total": total}
    if not draw.below(10):
        receipt["void_menu"] = {key: lines[0][0][key] for key in ("nm", "price")}
    return receipt


def donut_tags(value: Any) -> str:
    """Writes a parse in Donut's token form: `<s_key>…</s_key>`, list items joined by `<sep/>`."""
    if isinstance(value, dict):
        return "".join(f"<s_{key}>{donut_tags(value[key])}</s_{key}>" for key in sorted(value, reverse=True))
    if isinstance(value, list):
        return "<sep/>".join(donut_tags(item) for item in value)
    return str(value)


def printed(draw: Draw, locale: Locale, receipt: dict[str, Any]) -> str:
    """Prints a receipt as a till does."""
    rule = draw.pick("-=*") * draw.pick((8, 16, 24, 32))
    date = f"{1 + draw.below(28):02}/{1 + draw.below(12):02}/{2015 + draw.below(15)}"

    def gap() -> str:
        return " " * (1 + draw.below(14))

    lines = [
        draw.pick(locale.shops),
        f"{draw.pick(locale.streets)} {1 + draw.below(200)}",
        f"Tel. {draw.below(1000):03}-{draw.below(10_000_000):07}",
        f"{date} {draw.below(24):02}:{draw.below(60):02}",
        rule,
        *(f"{line['cnt']} {line['nm']} {gap()}{line['price']}" for line in receipt["menu"]),
        rule,
        *(f"{draw.pick(locale.labels)}: {locale.currency} {price}" for price in receipt["sub_total"].values()),
        *(f"{draw.pick(locale.labels)}{gap()}{price}" for price in receipt["total"].values()),
        draw.pick(locale.footers),
    ]
    return "\n".join(lines) + "\n"


def receipt_texts() -> Iterator[str]:
    """Yields every drawn receipt four times: printed, in Donut's tags, as JSON on one line and indented."""
    draw = Draw(_SEED)
    for fields in json.loads(_LOCALES.read_text(encoding="utf-8")):
        locale = Locale(**fields)
        for _ in range(_RECEIPTS_PER_LOCALE):
            receipt = draw_receipt(draw, locale)
            yield printed(draw, locale, receipt)
            yield donut_tags(receipt) + "\n"
            yield json.dumps({"gt_parse": receipt}, ensure_ascii=False) + "\n"
            yield json.dumps(receipt, ensure_ascii=False, indent=2) + "\n"
