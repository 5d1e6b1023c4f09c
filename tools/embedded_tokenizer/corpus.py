"""The training text of the embedded tokenizer: written for this project or drawn from a fixed seed.

Nothing here depends on the machine, the time or the network, so that a rebuild gives the same merges. The LICENSE is
read from the repository: building needs a checkout, loading the result does not.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tools.embedded_tokenizer.corpus_receipts import Draw, receipt_texts

_TEXT_DIR = Path(__file__).parent / "corpus_text"
_LICENSE = Path(__file__).parents[2] / "LICENSE"

# Repetition sets the weight of a text: written text is short compared with drawn text, which would dominate.
_PROSE_WEIGHT = 10
_LANGUAGE_WEIGHT = 6
_CODE_WEIGHT = 6
_NUMBER_LINES = 200
_SEED = 20


@cache
def _read(name: str) -> str:
    return (_TEXT_DIR / name).read_text(encoding="utf-8")


def word_texts() -> Iterator[str]:
    """Yields frequent English words, each with a count that fits its rank in the list.

    A pre-token is a word with the space before it, so the order of words does not matter to the trainer, and a
    list with Zipf's counts replaces megabytes of prose.
    """
    for rank, word in enumerate(dict.fromkeys(_read("words.txt").split())):
        count = max(12, 24_000 // (rank + 40))
        yield f" {word}" * count
        # Sentences start with a capital, strings in JSON and code without a space; tills print only capitals.
        yield f" {word.capitalize()}" * (count // 8)
        yield f"\n{word.capitalize()}" * (count // 16)
        yield f'"{word}"' * (count // 16)
        yield f" {word.upper()}" * (count // 8)


def number_texts() -> Iterator[str]:
    """Yields dates, times, amounts and identifiers, for the text around digits. Digits remain single tokens."""
    draw = Draw(_SEED).below
    for _ in range(_NUMBER_LINES):
        day, month, year = 1 + draw(28), 1 + draw(12), 2000 + draw(40)
        time = f"{draw(24):02}:{draw(60):02}:{draw(60):02}"
        yield f"{year}-{month:02}-{day:02}T{time}Z {day:02}/{month:02}/{year} {day}.{month}.{year}\n"
        yield f"({draw(10)}, {draw(100)}), [{draw(1000)}, {draw(1000)}, {draw(1000)}] {draw(100)}%\n"
        yield f"{draw(1000)},{draw(1000):03}.{draw(100):02} + {draw(100)} = {draw(100)} x {draw(10)}.5\n"
        yield f"#{draw(100_000):05} +{draw(100)} ({draw(1000):03}) {draw(10_000):04} v{draw(10)}.{draw(10)}\n"


def json_texts() -> Iterator[str]:
    """Yields the JSON lines of the prose again, indented."""
    for line in _read("prose.txt").splitlines():
        if line.startswith("{"):
            yield json.dumps(json.loads(line), indent=2, ensure_ascii=False) + "\n"


def corpus() -> Iterator[str]:
    """Yields the whole training text in pieces, whose order does not matter to the trainer."""
    yield from [_read("prose.txt")] * _PROSE_WEIGHT
    yield from [_read("languages.txt")] * _LANGUAGE_WEIGHT
    yield from [_read("code.txt")] * _CODE_WEIGHT
    yield _LICENSE.read_text(encoding="utf-8")
    yield from json_texts()
    yield from word_texts()
    yield from number_texts()
    yield from receipt_texts()
