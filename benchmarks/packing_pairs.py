"""Packs over the bound where tokens and patches bind alike, for samples of several kinds.

``python packing_pairs.py 300 100000`` packs so many samples of each kind. The patch limit is what a full pack of mean
samples has, times 1.06, 1.00 and 0.97: first tokens need more packs, then both as many, then patches. Prints a table,
with the CPU time of packing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
from hardware import hardware
from packing import CAPACITY, draw, repeated_receipts

from vlmdata.packing.arrays import IntArray
from vlmdata.packing.bins.two_limits import Limits, Window, lower_bound, pack_windows

_FACTORS = (1.06, 1.00, 0.97)
_Pairs = tuple[IntArray, IntArray]  # tokens and patches of each sample
_Draw = Callable[[np.random.Generator, int], _Pairs]


def receipts(random: np.random.Generator, count: int) -> _Pairs:
    """Draws from the 626 receipts, with replacement."""
    table = repeated_receipts(1)
    drawn = random.integers(0, len(table.lengths), count)
    return table.lengths[drawn].astype(np.int64), table.num_patches[drawn].astype(np.int64)


def photographs(random: np.random.Generator, count: int) -> _Pairs:
    """One to three images of common sizes or any, and text of 20 to 599 tokens."""
    common = random.choice([768, 1024, 1176, 1350], count)
    image = np.where(random.random(count) < 0.7, common, random.integers(200, 1500, count))
    image = image * random.integers(1, 4, count)
    return image + random.integers(20, 600, count), 4 * image


def mixed(random: np.random.Generator, count: int) -> _Pairs:
    """Receipts and texts."""
    table = draw("mixed", count)
    return table.lengths.astype(np.int64), table.num_patches.astype(np.int64)


def correlated(random: np.random.Generator, count: int) -> _Pairs:
    """Images of 50 to 699 tokens, and text of 30 to 1,499."""
    image = random.integers(50, 700, count)
    return image + random.integers(30, 1500, count), 4 * image


def uncorrelated(random: np.random.Generator, count: int) -> _Pairs:
    """Tokens and patches without a relation to each other."""
    return random.integers(100, 3000, count), random.integers(0, 2000, count) * 4


KINDS: dict[str, _Draw] = {
    "626 receipts, resampled": receipts,
    "photographs, one to three": photographs,
    "receipts and texts mixed": mixed,
    "correlated, sizes all over": correlated,
    "uncorrelated": uncorrelated,
}


def measure(tokens: IntArray, patches: IntArray, factor: float) -> str:
    """Packs once. Returns the bound, the packs above it, and CPU seconds."""
    most = max(int(CAPACITY * patches.sum() / tokens.sum() * factor) // 4 * 4, int(patches.max()))
    limits = Limits(CAPACITY, most)
    begun = time.process_time()
    bins = pack_windows([Window(tokens, patches, 5)], limits, 6)[0]
    seconds = time.process_time() - begun
    if bins.sums(tokens).max() > CAPACITY or bins.sums(patches).max() > most or len(bins.items) != len(tokens):
        raise SystemExit("a pack exceeds a limit, or samples are missing")
    bound = lower_bound(tokens, patches, limits)
    return f"{bound:,} + {bins.num_bins - bound:,} ({bins.num_bins / bound - 1:.2%}), {seconds:.2f} s"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("counts", type=int, nargs="+")
    given = parser.parse_args()
    print(hardware())
    print("| samples | kind | " + " | ".join(f"{factor:.2f}" for factor in _FACTORS) + " |")
    print("|---" * (2 + len(_FACTORS)) + "|")
    for count in given.counts:
        for name, kind in KINDS.items():
            pairs = kind(np.random.default_rng(7), count)
            cells = " | ".join(measure(*pairs, factor) for factor in _FACTORS)
            print(f"| {count:,} | {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
