"""The text that the embedded tokenizer is trained on: written for this project or drawn from a fixed seed.

Nothing here depends on the machine, the time or the network, so that a rebuild gives the same merges. The
LICENSE is read from the repository: building needs a checkout, loading what was built does not.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from preprocess.assets.corpus_receipts import Draw, receipt_texts

_TEXT_DIR = Path(__file__).parent / "corpus_text"
_LICENSE = Path(__file__).parents[2] / "LICENSE"

# Repetition is the weight of a text: what was written is short beside what is drawn and would drown in it.
_PROSE_WEIGHT = 10
_LANGUAGE_WEIGHT = 6
_CODE_WEIGHT = 6
_NUMBER_LINES = 200
_SEED = 20


@cache
def _read(name: str) -> str:
    return (_TEXT_DIR / name).read_text(encoding="utf-8")


def word_texts() -> Iterator[str]:
    """Yield the frequent English words, each as often as its rank in the list deserves.

    A pre-token is a word with the space before it, so the order of words means nothing to the trainer, and a
    list with Zipf's counts does the work of megabytes of prose.
    """
    for rank, word in enumerate(dict.fromkeys(_read("words.txt").split())):
        count = max(12, 24_000 // (rank + 40))
        yield f" {word}" * count
        # Sentences open with a capital, strings in JSON and code without a space; tills print capitals alone.
        yield f" {word.capitalize()}" * (count // 8)
        yield f"\n{word.capitalize()}" * (count // 16)
        yield f'"{word}"' * (count // 16)
        yield f" {word.upper()}" * (count // 8)


def number_texts() -> Iterator[str]:
    """Yield dates, times, amounts and identifiers, for what stands around digits; the digits stay single."""
    draw = Draw(_SEED).below
    for _ in range(_NUMBER_LINES):
        day, month, year = 1 + draw(28), 1 + draw(12), 2000 + draw(40)
        time = f"{draw(24):02}:{draw(60):02}:{draw(60):02}"
        yield f"{year}-{month:02}-{day:02}T{time}Z {day:02}/{month:02}/{year} {day}.{month}.{year}\n"
        yield f"({draw(10)}, {draw(100)}), [{draw(1000)}, {draw(1000)}, {draw(1000)}] {draw(100)}%\n"
        yield f"{draw(1000)},{draw(1000):03}.{draw(100):02} + {draw(100)} = {draw(100)} x {draw(10)}.5\n"
        yield f"#{draw(100_000):05} +{draw(100)} ({draw(1000):03}) {draw(10_000):04} v{draw(10)}.{draw(10)}\n"


def json_texts() -> Iterator[str]:
    """Yield the JSON lines of the prose once more, indented."""
    for line in _read("prose.txt").splitlines():
        if line.startswith("{"):
            yield json.dumps(json.loads(line), indent=2, ensure_ascii=False) + "\n"


def corpus() -> Iterator[str]:
    """Yield the whole training text, in pieces; their order does not matter to the trainer."""
    yield from [_read("prose.txt")] * _PROSE_WEIGHT
    yield from [_read("languages.txt")] * _LANGUAGE_WEIGHT
    yield from [_read("code.txt")] * _CODE_WEIGHT
    yield _LICENSE.read_text(encoding="utf-8")
    yield from json_texts()
    yield from word_texts()
    yield from number_texts()
    yield from receipt_texts()
