"""Time to group near duplicates of 100,000 samples, without reading them, and to mark one picture and one text.

    python benchmarks/near_duplicates.py --samples 100000

Hashes and texts are drawn; a tenth of them are near an earlier one. CPU time. Prints a line for each.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.hardware import hardware
from vlmdata.select.near import near_pictures, near_texts, picture_hash, text_signature


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=100_000)
    count = parser.parse_args().samples
    random = np.random.default_rng(0)
    hashes = [int(each) for each in random.integers(0, 1 << 63, count, np.uint64)]
    signatures = random.integers(0, 1 << 63, (count, 125), np.uint64)
    for near in range(0, count, 10):
        hashes[near] = hashes[near // 2] ^ (1 << near % 64)
        signatures[near] = signatures[near // 2]
    picture = random.integers(0, 256, (1000, 1000, 3), np.uint8)
    text = " ".join(f"word{number}" for number in range(500))
    print(hardware())
    for name, made in {
        f"group {count:,} pictures": lambda: len(near_pictures(range(count), [[each] for each in hashes])),
        f"group {count:,} texts": lambda: len(near_texts(range(count), list(signatures))),
        "mark 20 pictures of 1000 x 1000": lambda: [picture_hash(picture) for _ in range(20)][0] > 0,
        "mark 100 texts of 500 words": lambda: [text_signature(text) for _ in range(100)][0].size,
    }.items():
        print(f"{name}: {seconds(made)}")


def seconds(make: Callable[[], object]) -> str:
    """CPU seconds of a call, and what it gave."""
    begun = time.process_time()
    found = make()
    return f"{time.process_time() - begun:.2f} s, {found}"


if __name__ == "__main__":
    main()
