"""Chats for the loader's dataset: no, one or two images each, answers of very different length, one or two turns."""

from __future__ import annotations

import random
from typing import Any

from tests.chat_rows import image_item, turn

WORDS = ("noise", "grey", "pixel", "wide", "tall", "bright", "dark", "corner", "receipt", "total", "two", "seven")
WORDS += ("left", "right", "seen", "never")
_SIZES = ((64, 64), (96, 64), (64, 128), (100, 70), (128, 128))


def _text(words: random.Random, at_most: int) -> str:
    count = min(at_most, int(words.paretovariate(0.9) * 8))  # long-tailed, as answers are
    return " ".join(words.choice(WORDS) for _ in range(count)) + "."


def chat_rows(count: int) -> list[dict[str, Any]]:
    """That many chats, the same every time."""
    rows = []
    for number in range(count):
        words = random.Random(number)
        images = [
            image_item(seed=10 * number + k, width=words.choice(_SIZES)[0], height=words.choice(_SIZES)[1])
            for k in range((1, 2, 0, 1)[number % 4])
        ]
        messages = [turn("user", *images, _text(words, 60)), turn("assistant", _text(words, 700))]
        if number % 3 == 1:
            messages += [turn("user", "And then?"), turn("assistant", _text(words, 200))]
        rows.append({"messages": messages})
    return rows
