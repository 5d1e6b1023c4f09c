"""Chats of random words with a long tail of lengths, preprocessed for both families, for `adapter_peer.py`.

    python benchmarks/long_tailed_chats.py --out build/chats

Lengths are lognormal: of 600 chats, half are below 320 tokens, six above 3,300, and the longest has 6,563. The same
rows and the same words each time. Needs no network: the tokenizer is the embedded one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from loader_data import preprocess

FAMILIES = ("qwen3_5", "qwen3_vl")
#: Of the natural logarithm of a chat's number of words.
MEAN, DEVIATION = 5.7, 1.1
LONGEST = 6000
WORDS = """
the of and to in that is was for it with as his on be at by had are but from or have an they which one you were all
her she there would their we him been has when who will no more if out so up said what its about than into them can
only other time new some could these two may first then do any like my now over such our man me even most made after
also did many off before must well back through years much where your way down should because
""".split()  # noqa: SIM905


def chats(count: int, seed: int = 0) -> list[dict[str, object]]:
    """Rows of messages: turns of up to 60 words by the user and up to 240 by the assistant."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, object]] = []
    for length in np.minimum(rng.lognormal(MEAN, DEVIATION, count), LONGEST).astype(int).tolist():
        messages: list[dict[str, str]] = []
        left = max(8, length)
        while left > 0:
            asked, answered = int(rng.integers(4, 60)), int(rng.integers(4, 240))
            for role, words in (("user", min(asked, left)), ("assistant", max(4, min(answered, left - asked)))):
                messages.append({"role": role, "content": " ".join(rng.choice(WORDS, words))})
            left -= asked + answered
        rows.append({"messages": messages})
    return rows


def main() -> None:
    """Writes the rows and both datasets."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder for chats.jsonl and a dataset per family")
    parser.add_argument("--count", type=int, default=600)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    source = options.out / "chats.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in chats(options.count)))
    for family in FAMILIES:
        preprocess(str(source), options.out / family, "--recipe", "chat", "--family", family)


if __name__ == "__main__":
    main()
