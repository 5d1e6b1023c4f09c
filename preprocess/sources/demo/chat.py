"""Conversations about the demo's receipts. Every answer is worked out from what the receipt says."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from preprocess.sources.demo.content import Receipt, gt_parse
from preprocess.sources.demo.receipt import deal, demo_content, stream

Role = Literal["system", "user", "assistant"]

KINDS: dict[str, int] = {
    "single": 4,
    "system": 2,
    "thinking": 3,
    "pair_adjacent": 2,
    "pair_separated": 1,
    "late_image": 1,
    "late_second": 1,
    "text_only": 2,
}
"""Kinds of conversation and how many of every 16 rows are of each."""

_SYSTEM = (
    "You read receipts. Answer with the value as printed and nothing else.",
    "You are a careful bookkeeping assistant. If a figure is not on the receipt, say so.",
    "Be brief.",
)


@dataclass(frozen=True)
class Turn:
    """One message. In ``parts`` an image is None, text is a string."""

    role: Role
    parts: tuple[str | None, ...]
    reasoning: str | None = None

    def as_message(self) -> dict[str, Any]:
        """The message as the chat layout stores it."""
        content = [{"type": "image" if part is None else "text", "text": part} for part in self.parts]
        return {"role": self.role, "content": content, "reasoning_content": self.reasoning}


@dataclass(frozen=True)
class Conversation:
    """A row of the chat layout.

    Attributes:
        row: its number.
        kind: a key of ``KINDS``.
        turns: messages; after an optional system turn, user and assistant alternate.
        receipts: rows of the receipts shown, in the order of their images.
    """

    row: int
    kind: str
    turns: tuple[Turn, ...]
    receipts: tuple[int, ...]


@dataclass(frozen=True)
class _Question:
    text: str
    answer: str
    reasoning: str


def demo_conversation(row: int, seed: int = 0) -> Conversation:
    """Makes up the conversation of a row; its images are those of ``demo_receipt`` for ``receipts``.

    Args:
        row: 0 or more.
        seed: another seed gives another dataset.

    Raises:
        ValueError: ``row`` is negative.
    """
    kind = deal("chat kinds", KINDS, row, seed)
    rng = stream("chat", row, seed)
    # Rows 2k and 2k + 1, so that no receipt is in two conversations.
    needed = {"text_only": 0, "pair_adjacent": 2, "pair_separated": 2, "late_second": 2}.get(kind, 1)
    shown = tuple(2 * row + offset for offset in range(needed))
    receipts = [demo_content(number, seed) for number in shown]
    turns = _BUILDERS[kind](rng, receipts)
    return Conversation(row, kind, tuple(turns), shown)


def _ask(first: tuple[str | None, ...], questions: list[_Question], thinking: bool = False) -> list[Turn]:
    """Questions and answers; ``first`` stands before the first question."""
    turns = []
    for number, question in enumerate(questions):
        parts = (*first, question.text) if number == 0 else (question.text,)
        turns.append(Turn("user", parts))
        turns.append(Turn("assistant", (question.answer,), question.reasoning if thinking else None))
    return turns


def _single(rng: Random, receipts: list[Receipt]) -> list[Turn]:
    questions = _about_one(rng, receipts[0], rng.choice((1, 2, 2, 3, 4)))
    if rng.random() < 0.2:
        # The picture after the words.
        opening = Turn("user", (questions[0].text, None))
        return [opening, *_ask((None,), questions)[1:]]
    return _ask((None,), questions)


def _system(rng: Random, receipts: list[Receipt]) -> list[Turn]:
    return [Turn("system", (rng.choice(_SYSTEM),)), *_single(rng, receipts)]


def _thinking(rng: Random, receipts: list[Receipt]) -> list[Turn]:
    turns = _ask((None,), _about_one(rng, receipts[0], rng.choice((1, 1, 2))), thinking=True)
    if rng.random() < 0.4:
        turns.insert(0, Turn("system", ("Think before you answer.",)))
    return turns


def _pair_adjacent(rng: Random, receipts: list[Receipt]) -> list[Turn]:
    return _ask((None, None), _about_two(rng, *receipts))


def _pair_separated(rng: Random, receipts: list[Receipt]) -> list[Turn]:
    return _ask(("The first receipt:", None, "The second receipt:", None), _about_two(rng, *receipts))


def _late_image(rng: Random, receipts: list[Receipt]) -> list[Turn]:
    greeting = [
        Turn("user", (rng.choice(("Can you read a receipt for me?", "I need help with my expenses.")),)),
        Turn("assistant", ("Of course. Please send me the picture.",)),
    ]
    return [*greeting, *_ask((None,), _about_one(rng, receipts[0], 2))]


def _late_second(rng: Random, receipts: list[Receipt]) -> list[Turn]:
    first = _ask((None,), _about_one(rng, receipts[0], 1))
    return [*first, *_ask(("Here is another one.", None), _about_two(rng, *receipts))]


def _text_only(rng: Random, receipts: list[Receipt]) -> list[Turn]:
    assert not receipts
    people, share = rng.randint(2, 6), rng.randint(800, 4500)
    rate, base = rng.choice((5, 10, 15, 20)), rng.randint(10, 200) * 100
    price, note = rng.randint(101, 1999), rng.choice((20, 50))
    rows = [
        (
            f"A bill of {people * share / 100:.2f} is shared equally by {people} people. What does each pay?",
            f"{share / 100:.2f}",
        ),
        (f"What is a service charge of {rate}% on {base / 100:.2f}?", f"{base * rate / 10000:.2f}"),
        (
            f"I pay {price / 100:.2f} with a note of {note}. How much change is due?",
            f"{(note * 100 - price) / 100:.2f}",
        ),
        ("What does VAT stand for?", "Value added tax."),
        ("What is the difference between a subtotal and a total?", _SUBTOTAL),
    ]
    chosen = rng.sample(rows, rng.choice((1, 2)))
    return _ask((), [_Question(text, answer, "") for text, answer in chosen])


_SUBTOTAL = "The subtotal adds up the items; the total also has discounts, service charge and tax applied."

_BUILDERS: dict[str, Callable[[Random, list[Receipt]], list[Turn]]] = {
    "single": _single,
    "system": _system,
    "thinking": _thinking,
    "pair_adjacent": _pair_adjacent,
    "pair_separated": _pair_separated,
    "late_image": _late_image,
    "late_second": _late_second,
    "text_only": _text_only,
}


def _about_one(rng: Random, receipt: Receipt, count: int) -> list[_Question]:
    """``count`` different questions about one receipt, with answers and the way to them."""
    item = rng.choice(receipt.items)
    total, price = receipt.total_money(receipt.total), receipt.line_money(item.price)
    lines = [{"name": entry.name, "price": receipt.line_money(entry.price)} for entry in receipt.items]
    listing = json.dumps(lines, ensure_ascii=False)
    label = receipt.printing.labels["total"].rstrip(":")
    names = "; ".join(entry.name for entry in receipt.items)
    questions = [
        _Question("What is the total?", total, f'The line "{label}" reads {total}.'),
        _Question(
            "How many different items are on this receipt?",
            str(len(receipt.items)),
            f"The item lines are: {names}. That makes {len(receipt.items)}.",
        ),
        _Question("List the items with their prices as JSON.", listing, f"I copy each of: {names}."),
        _Question("Which shop is this from?", receipt.shop.name, "The name stands at the top."),
        _Question("What date is on the receipt?", receipt.shop.date, f"A line reads {receipt.shop.facts[0][1]}."),
        _Question(f'What is the price of the line "{item.name}"?', price, f"To the right of {item.name}: {price}."),
        _Question(
            "Transcribe the whole receipt as JSON.",
            json.dumps(gt_parse(receipt), ensure_ascii=False),
            "Items first, then what is charged on top, then the total and the payment.",
        ),
        _sum_question(receipt),
    ]
    if receipt.printing.show_counts:
        bought = f"The count on that line is {item.quantity}."
        questions.append(_Question(f'How many "{item.name}" were bought?', str(item.quantity), bought))
    if receipt.payment == "cash":
        change = receipt.total_money(receipt.change)
        tendered = receipt.total_money(receipt.tendered)
        way = f"{tendered} was handed over for {total}, which leaves {change}."
        questions.append(_Question("How much change was given?", change, way))
    return rng.sample(questions, count)


def _sum_question(receipt: Receipt) -> _Question:
    """What the items come to, each line with its discount and additions."""
    amounts = [receipt.line_money(item.amount) for item in receipt.items]
    subtotal = receipt.line_money(receipt.subtotal)
    way = " + ".join(amounts) + (f" = {subtotal}." if len(amounts) > 1 else " is the only line.")
    text = "What do the items come to together, after their own discounts and additions?"
    return _Question(text, subtotal, way)


def _about_two(rng: Random, first: Receipt, second: Receipt) -> list[_Question]:
    """One or two questions that need both receipts."""
    totals = [receipt.total_money(receipt.total) for receipt in (first, second)]
    counts = len(first.items), len(second.items)
    questions = [
        _Question("What are the two totals?", f"First: {totals[0]}. Second: {totals[1]}.", ""),
        _Question("Which shops are these from?", f"First: {first.shop.name}. Second: {second.shop.name}.", ""),
        _Question(
            "Which of the two receipts lists more items?",
            _larger(counts, [str(count) for count in counts]),
            "",
        ),
    ]
    if first.currency == second.currency:
        larger = _larger((first.total, second.total), totals)
        questions.append(_Question("Which of the two receipts has the higher total?", larger, ""))
    return rng.sample(questions, rng.choice((1, 2)))


def _larger(values: tuple[int, int], texts: list[str]) -> str:
    """Which of two is larger, in words, with both as text."""
    if values[0] == values[1]:
        return f"Neither: both have {texts[0]}."
    more = 0 if values[0] > values[1] else 1
    return f"The {('first', 'second')[more]}: {texts[more]} against {texts[1 - more]}."
