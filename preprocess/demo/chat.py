"""Conversations about the demo's receipts. Every answer follows from what the receipts say."""

import json
from random import Random
from typing import Any

from vlmdata.preprocess.demo.compose import Receipt, gt_parse
from vlmdata.preprocess.demo.row import deal, demo_content, stream

KINDS: dict[str, int] = {
    "single": 4,
    "system": 2,
    "thinking": 3,
    "pair": 3,
    "late_image": 1,
    "late_second": 1,
    "text_only": 2,
}
"""Kinds of conversation, and the number of each in 16 rows."""
_IMAGES = {"text_only": 0, "pair": 2, "late_second": 2}
_SYSTEM = (
    "You read receipts. Answer with the value as printed and nothing else.",
    "You are a careful bookkeeping assistant. If a figure is not on the receipt, say so.",
    "Be brief.",
)
_SUBTOTAL = "The subtotal adds up the items; the total also has discounts, service charge and tax applied."
Message = dict[str, Any]
Question = tuple[str, str, str | None]
"""Question, answer, and the way to it."""


def demo_conversation(row: int) -> tuple[list[Message], tuple[int, ...]]:
    """Creates the messages of a row in the chat layout, and the rows of the receipts in the order of their images."""
    kind, rng = deal("chat kinds", KINDS, row), stream("chat", row)
    # Rows 2k and 2k + 1, so that no receipt is in two conversations.
    shown = tuple(range(2 * row, 2 * row + _IMAGES.get(kind, 1)))
    return _messages(rng, kind, [demo_content(number) for number in shown]), shown


def _message(role: str, *parts: str | None, reasoning: str | None = None) -> Message:
    """Creates a message. A part of None is an image."""
    content = [{"type": "image" if part is None else "text", "text": part} for part in parts]
    return {"role": role, "content": content, "reasoning_content": reasoning}


def _ask(questions: list[Question], *first: str | None, thinking: bool = False) -> list[Message]:
    """Creates questions and answers. ``first`` precedes the first question."""
    messages = []
    for number, (question, answer, way) in enumerate(questions):
        messages.append(_message("user", *(first if number == 0 else ()), question))
        messages.append(_message("assistant", answer, reasoning=way if thinking else None))
    return messages


def _messages(rng: Random, kind: str, receipts: list[Receipt]) -> list[Message]:
    if kind == "text_only":
        return _ask(rng.sample(_about_none(rng), rng.choice((1, 2))))
    about_both = rng.sample(_about_two(*receipts), rng.choice((1, 2))) if len(receipts) == 2 else []
    if kind == "pair":
        return _ask(about_both, *rng.choice(((None, None), ("The first receipt:", None, "The second receipt:", None))))
    about_one = _about_one(rng, receipts[0])
    if kind == "late_second":
        return [*_ask(rng.sample(about_one, 1), None), *_ask(about_both, "Here is another one.", None)]
    if kind == "late_image":
        hello = _message("user", rng.choice(("Can you read a receipt for me?", "I need help with my expenses.")))
        reply = _message("assistant", "Of course. Please send me the picture.")
        return [hello, reply, *_ask(rng.sample(about_one, 2), None)]
    messages = _ask(rng.sample(about_one, rng.choice((1, 2, 2, 3, 4))), None, thinking=kind == "thinking")
    if rng.random() < 0.2:  # the image after the words
        messages[0]["content"].reverse()
    return [_message("system", rng.choice(_SYSTEM)), *messages] if kind == "system" else messages


def _about_none(rng: Random) -> list[Question]:
    people, share, rate = rng.randint(2, 6), rng.randint(800, 4500), rng.choice((5, 10, 15, 20))
    base, price, note = rng.randint(10, 200), rng.randint(101, 1999), rng.choice((20, 50))
    bill = f"A bill of {people * share / 100:.2f} is shared equally by {people} people. What does each pay?"
    pay = f"I pay {price / 100:.2f} with a note of {note}. How much change is due?"
    return [
        (bill, f"{share / 100:.2f}", None),
        (f"What is a service charge of {rate}% on {base}.00?", f"{base * rate / 100:.2f}", None),
        (pay, f"{(note * 100 - price) / 100:.2f}", None),
        ("What is the difference between a subtotal and a total?", _SUBTOTAL, None),
    ]


def _about_one(rng: Random, receipt: Receipt) -> list[Question]:
    """Returns all questions about one receipt, some of them about a random item."""
    item, total, number = rng.choice(receipt.items), receipt.text("total_price") or "", len(receipt.items)
    names = "; ".join(item.name for item in receipt.items)
    prices = json.dumps([{"name": item.name, "price": item.price} for item in receipt.items])
    lines = f"The item lines are: {names}. That makes {number}."
    groups = "Items first, then what is charged on top, then the total and the payment."
    questions: list[Question] = [
        ("What is the total?", total, f'The line "{receipt.labels["total"].rstrip(":")}" reads {total}.'),
        ("How many different items are on this receipt?", str(number), lines),
        ("List the items with their prices as JSON.", prices, f"I copy each of: {names}."),
        ("Which shop is this from?", receipt.shop, "The name stands at the top."),
        ("What date is on the receipt?", receipt.date, f"A line reads {receipt.facts[0][1]}."),
        (f'What is the price of the line "{item.name}"?', item.price, f"With {item.name} stands {item.price}."),
        ("Transcribe the whole receipt as JSON.", json.dumps(gt_parse(receipt)), groups),
    ]
    if item.count is not None:
        count = f"The count on that line is {item.quantity}."
        questions.append((f'How many "{item.name}" were bought?', str(item.quantity), count))
    if change := receipt.text("changeprice"):
        way = f"{receipt.text('cashprice')} was handed over for {total}, which leaves {change}."
        questions.append(("How much change was given?", change, way))
    return questions


def _about_two(first: Receipt, second: Receipt) -> list[Question]:
    """Returns all questions that need both receipts."""
    totals = first.text("total_price") or "", second.text("total_price") or ""
    counts = len(first.items), len(second.items)
    more = _larger(counts, (str(counts[0]), str(counts[1])))
    questions: list[Question] = [
        ("What are the two totals?", f"First: {totals[0]}. Second: {totals[1]}.", None),
        ("Which shops are these from?", f"First: {first.shop}. Second: {second.shop}.", None),
        ("Which of the two receipts lists more items?", more, None),
    ]
    if first.currency == second.currency:
        higher = _larger((first.total, second.total), totals)
        questions.append(("Which of the two receipts has the higher total?", higher, None))
    return questions


def _larger(values: tuple[int, int], texts: tuple[str, str]) -> str:
    """Describes which of two values is larger, with both as text."""
    if values[0] == values[1]:
        return f"Neither: both have {texts[0]}."
    more = 0 if values[0] > values[1] else 1
    return f"The {('first', 'second')[more]}: {texts[more]} against {texts[1 - more]}."
